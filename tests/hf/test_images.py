"""task=images: drawn shapes, folders of pictures, models of transformers, LoRA."""

import sys

import pytest
import torch
from harness import CONF, check_parity, fit_on
from harness.hub_server import serving_hub, use_hub

from trainer import ConfigError, load_config
from trainer.hf.pictures import MEAN, STD, crop, of_torchvision
from trainer.tasks.images import Images

SMALL = [
    *("task=images", "task.options.shapes=48", "task.options.width=4", "task.options.size=16"),
    *("strategy.precision=fp64", "data.global_batch=12", "run.steps=20", "log.every_steps=1"),
    *("eval.every_steps=9", "checkpoint.every_epochs=null"),
]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    """Return a folder of pictures of unequal size, in train/ and val/."""
    image = pytest.importorskip("PIL.Image")
    root = tmp_path_factory.mktemp("pictures")
    for split, count in (("train", 12), ("val", 4)):
        for name, colour in (("blue", (20, 30, 200)), ("red", (210, 20, 10))):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                picture = image.new("RGB", (20 + number, 30), colour)
                picture.save(folder / f"{number}.png")
    return root


def dataset_of(split, *words):
    return Images(load_config([*SMALL, *words], [CONF])).build_dataset(split)


def test_shapes_are_drawn_alike_each_time():
    one, other = dataset_of("train"), dataset_of("train")
    assert all(map(torch.equal, one.tensors, other.tensors))
    assert one.tensors[0].dtype == torch.uint8
    assert one.tensors[0].shape == (48, 3, 16, 16)
    assert not torch.equal(dataset_of("eval").tensors[0][:3], one.tensors[0][:3])


@pytest.mark.slow
def test_a_folder_of_pictures_is_learned_alike_on_two_ranks(pictures, tmp_path):
    words = [*SMALL, f"task.options.data={pictures}", "task.options.transforms=own"]
    one = fit_on(1, tmp_path / "one", *words, "strategy=single", task=Images)
    many = fit_on(2, tmp_path / "two", *words, "strategy=ddp", task=Images)
    check_parity(one, many, falls=False, weights_tolerance=1e-8)
    assert one["metrics"]["eval/accuracy"] == 1.0


def test_a_crop_has_the_size_and_is_drawn_from_torch(pictures):
    image = pytest.importorskip("PIL.Image")
    picture = image.effect_noise((40, 23), 90).convert("RGB")
    middle = crop(picture, 16, is_train=False)
    assert middle.shape == (3, 16, 16)
    assert torch.equal(middle, crop(picture, 16, is_train=False))
    random = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        random.append(crop(picture, 16, is_train=True))
    assert torch.equal(random[0], random[1])
    assert not torch.equal(random[0], random[2])


def refusal(*words, split="train"):
    with pytest.raises(ConfigError) as caught:
        dataset_of(split, *words)
    return str(caught.value)


def test_a_folder_that_is_none_is_refused(tmp_path):
    data = f"task.options.data={tmp_path}"
    must = "must be a folder with train/CLASS/*.jpg and val/CLASS/*.jpg"
    assert refusal(data) == f"{data}: has no train; {must}"
    (tmp_path / "train").mkdir()
    folder = tmp_path / "train"
    assert refusal(data) == f"{data}: {folder} must have a folder of images for each class"
    (tmp_path / "train" / "cat").mkdir()
    pytest.importorskip("PIL")
    assert refusal(data) == f"task.options.data: {tmp_path / 'train' / 'cat'} has no image; add one"
    assert refusal(data, split="eval") == f"{data}: has no val or eval or test; {must}"


def test_a_broken_picture_is_named(pictures, tmp_path):
    pytest.importorskip("PIL")
    file = tmp_path / "train" / "cat" / "1.jpg"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"no picture")
    dataset = dataset_of("train", f"task.options.data={tmp_path}")
    with pytest.raises(ConfigError, match=f"^{file}: is not an image that Pillow reads "):
        dataset[0]


def test_a_vit_in_a_folder_is_adapted_and_its_new_head_trained(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    pytest.importorskip("tqdm").tqdm.monitor_interval = 0  # it is a thread
    config = transformers.ViTConfig(
        image_size=16, patch_size=8, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32,
    )  # fmt: skip
    transformers.ViTModel(config).save_pretrained(tmp_path / "vit")
    words = [f"task.options.model={tmp_path / 'vit'}", "task.options.lora=2"]
    task = Images(load_config([*SMALL, *words], [CONF]))
    model = task.build_model()
    trained = [name for name, weight in model.named_parameters() if weight.requires_grad]
    assert any("classifier.modules_to_save" in name for name in trained)
    assert len([name for name in trained if "lora_A" in name]) == 2 * 6
    assert len(task.blocks(model)) == 2


OWN = ["task.options.transforms=own"]
NAME = "test_resnet.r160_in1k"  # a model of 0.5 million parameters


def import_or_skip(name):
    """Return a package that needs the torchvision of this torch, or skip."""
    try:
        return pytest.importorskip(name)
    except RuntimeError as error:  # torchvision's operators are for another torch
        pytest.skip(f"{name} cannot be imported with torch {torch.__version__}: {error}")


@pytest.mark.slow
def test_pictures_scaled_by_torchvision_are_learned_alike_on_two_ranks(pictures, tmp_path):
    import_or_skip("torchvision")
    words = [*SMALL, f"task.options.data={pictures}", "task.options.transforms=torchvision"]
    one = fit_on(1, tmp_path / "one", *words, "strategy=single", task=Images)
    many = fit_on(2, tmp_path / "two", *words, "strategy=ddp", task=Images)
    check_parity(one, many, falls=False, weights_tolerance=1e-8)
    assert "scaled by torchvision" in dataset_of("train", *words[len(SMALL) :]).source


def test_a_torchvision_for_another_torch_is_named(tmp_path, monkeypatch):
    broken = tmp_path / "torchvision" / "__init__.py"
    broken.parent.mkdir()
    broken.write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ConfigError) as caught:
        of_torchvision(16, is_train=True)
    assert str(caught.value) == (
        "task.options.transforms: torchvision cannot be imported (operator torchvision::nms does "
        f"not exist); install its build for torch {torch.__version__}, or give "
        "task.options.transforms=own"
    )


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Serve a model of timm as the hub does."""
    timm = import_or_skip("timm")
    safetensors = pytest.importorskip("safetensors.torch")
    pytest.importorskip("tqdm").tqdm.monitor_interval = 0  # it is a thread
    folder = tmp_path / "timm"
    folder.mkdir()
    torch.manual_seed(0)
    state = timm.create_model(NAME).state_dict()
    safetensors.save_file(
        {n: t.contiguous() for n, t in state.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text("{}")
    with serving_hub() as server:
        server.folders[f"timm/{NAME}"] = folder
        use_hub(server.url, tmp_path / "home", monkeypatch.setattr)
        yield server


def test_a_model_of_timm_is_fetched_once_and_has_a_new_head(hub, tmp_path):
    task = Images(load_config([*SMALL, *OWN, f"task.options.model={NAME}"], [CONF]))
    task.prepare()
    num_asked = len(hub.asked)
    task.prepare()
    model = task.build_model()
    assert len(hub.asked) == num_asked
    saved = pytest.importorskip("safetensors.torch").load_file(tmp_path / "timm/model.safetensors")
    own = model.state_dict()
    equal = {name for name in saved if saved[name].shape == own[name].shape}
    assert saved.keys() - equal == {"fc.weight", "fc.bias"}
    assert all(torch.equal(saved[name], own[name]) for name in equal)
    assert model.new_modules == ("fc",)
    pytest.importorskip("peft")
    with pytest.raises(ConfigError, match="ResNet has no linear layer to adapt; name other layers"):
        lora = [f"task.options.model={NAME}", "task.options.lora=2"]
        Images(load_config([*SMALL, *OWN, *lora], [CONF])).build_model()


@pytest.mark.slow
def test_a_model_of_timm_is_learned_alike_on_two_ranks(hub, tmp_path):
    words = [*SMALL, *OWN, f"task.options.model={NAME}", "run.norm_rows=3"]
    one = fit_on(1, tmp_path / "one", *words, "strategy=single", task=Images)
    many = fit_on(2, tmp_path / "two", *words, "strategy=ddp", task=Images)
    # BatchNorm over 3 rows: losses differ by 3e-16 at step 2, and by 3e-8 at step 20
    check_parity(one, many, falls=False, tolerance=1e-6, weights_tolerance=1e-5)


def test_names_that_timm_does_not_have_are_refused():
    import_or_skip("timm")
    for name, near in (("resnet1", "resnet18"), (NAME[:-1], NAME)):
        task = Images(load_config([*SMALL, f"task.options.model={name}"], [CONF]))
        with pytest.raises(ConfigError) as caught:
            task.prepare()
        line = f"task.options.model={name}: timm has no such model; did you mean {near}?"
        assert str(caught.value) == line


def test_a_name_of_timm_without_timm_is_refused():
    try:
        import timm  # noqa: F401
    except (ImportError, RuntimeError):
        task = Images(load_config([*SMALL, "task.options.model=resnet18"], [CONF]))
        with pytest.raises(
            ConfigError, match=r"pip install timm; a name on the hub|timm cannot be imported"
        ):
            task.prepare()


@pytest.mark.parametrize("train", [True, False])
def test_a_new_model_sees_pictures_by_the_mean_and_deviation_of_imagenet(train):
    task = Images(load_config(SMALL, [CONF]))
    inputs = task.build_dataset("eval").tensors[0][:2]
    found, _ = task.augment(inputs, None, None, train)
    mean, std = (torch.tensor(each).view(3, 1, 1) for each in (MEAN, STD))
    torch.testing.assert_close(found, (inputs / 255 - mean) / std, rtol=1e-5, atol=1e-5)
