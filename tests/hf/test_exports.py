"""Exports of the shipped tasks: plain pipelines of transformers do what the run's model does."""

import json
import re
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from harness.ranks import on_ranks
from harness.training import compose, fit
from pretrained import fork_reloads

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
image = pytest.importorskip("PIL.Image")
tqdm = pytest.importorskip("tqdm")
tqdm.tqdm.monitor_interval = 0  # it is a thread

from trainer.base.errors import ConfigError  # noqa: E402
from trainer.hf import (  # noqa: E402
    pipelines,
    pretrained,
    task_exports,
)
from trainer.hf.folder_export import FolderExport, write_pretrained  # noqa: E402
from trainer.hf.pictures import crop  # noqa: E402
from trainer.hf.processors import find_values, load_processor, prepare  # noqa: E402
from trainer.tasks.dpo import DPO  # noqa: E402
from trainer.tasks.finetune import Finetune  # noqa: E402
from trainer.tasks.images import Images  # noqa: E402
from trainer.tasks.lm import END, LM, build_llama, build_tokenizer  # noqa: E402

COMMON = [
    *("strategy=single", "strategy.precision=fp32", "run.steps=2", "log.trackers=[]"),
    *("data.global_batch=4", "eval.every_epochs=null", "eval.every_steps=null"),
    *("checkpoint.every_epochs=null", "checkpoint.every_steps=null", "run.name=run"),
]
EXPORT = "checkpoint.export=hf"
OF_TEXT = 7  # the token after which the bases below stop
SMALL = ["task.options.context=96", "task.options.answers=0"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def write_chats(folder, task="lm"):
    """Write chats, or pairs of answers, and return the words of a run on them."""
    rows = []
    for number in range(12):
        asked = [{"role": "user", "content": f"Which is {number}?"}]
        said, other = ([{"role": "assistant", "content": f"{word} {number}."}] for word in "ab")
        row = {"messages": asked + said}
        rows.append(row if task == "lm" else {"prompt": asked, "chosen": said, "rejected": other})
    file = folder / f"{task}.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [f"task={task}", *COMMON, *SMALL, f"task.options.data={file}", "task.options.eval=0.2"]


def write_base(folder, ends=OF_TEXT, **generation):
    """Write a Llama that stops at the end of a text, with a tokenizer whose turns end otherwise."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    model = build_llama(SimpleNamespace(width=16, heads=2, layers=1, context=96), tokenizer)
    model.config.eos_token_id = ends
    for name, value in {"eos_token_id": ends, **generation}.items():
        setattr(model.generation_config, name, value)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"task.options.model={folder}"


def run(folder, task, *words):
    """Train in a fork whose exports load in forks; return the run's directory."""

    def use():
        fork_reloads()
        return fit(folder, *words, task=task)["directory"]

    (directory,) = on_ranks(1, use)
    return directory


def export(folder, task, directory, out, *words, **options):
    """Write a folder of a finished run, in a fork; return the lines about it."""

    def use():
        fork_reloads()
        config = compose(folder, *words, f"run.resume={directory}")
        return write_pretrained(task(config), config, FolderExport(out, "out", **options))[0]

    (lines,) = on_ranks(1, use)
    return lines


def ends_of(folder):
    stop = build_tokenizer().convert_tokens_to_ids(END)
    settings = [
        json.loads((folder / f"{n}.json").read_text()) for n in ("generation_config", "config")
    ]
    return stop, [each["eos_token_id"] for each in settings]


# Language models -------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["lm", "dpo"])
def test_an_exported_model_stops_where_the_chats_of_the_run_end(task, tmp_path):
    """transformers' generate() read the base's end of a text, and never stopped."""
    words = [*write_chats(tmp_path, task), EXPORT, write_base(tmp_path / "base")]
    folder = run(tmp_path, {"lm": LM, "dpo": DPO}[task], *words) / "export"
    stop, ends = ends_of(folder)
    assert ends == [[stop, OF_TEXT]] * 2


def test_a_forced_stop_ends_a_plain_generate_of_an_export(tmp_path):
    """Weights that say the stop at once: `generate` without settings ends there."""
    words = [*write_chats(tmp_path), EXPORT, write_base(tmp_path / "base")]
    folder = run(tmp_path, LM, *words) / "export"
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    stop, _ = ends_of(folder)
    model.lm_head.register_forward_hook(lambda *call: torch.eye(259)[stop].expand(1, 1, -1))
    assert model.generate(torch.tensor([[3, 4]]), max_new_tokens=9).tolist() == [[3, 4, stop]]


class OneEnd:
    """A config that takes one token only, as some of transformers do."""

    eos_token_id = property(lambda self: 5, lambda self, value: self.refuse(value))

    def refuse(self, value):
        raise TypeError(f"{value} is no integer")

    def get_text_config(self, decoder):
        return self


@pytest.mark.parametrize("ends", [None, 5, [5, 6], [5, 258], 258])
def test_the_token_that_ends_answers_is_added_once_and_no_other_is_lost(ends):
    settings = SimpleNamespace(eos_token_id=ends)
    model = SimpleNamespace(generation_config=settings, config=OneEnd())
    task_exports.end_answers(model, None)
    assert settings.eos_token_id == ends
    for _ in range(2):
        task_exports.end_answers(model, 258)
    wanted = {None: 258, 258: 258, 5: [258, 5]}
    listed = [5, 258] if ends == [5, 258] else [258, 5, 6]
    assert settings.eos_token_id == (listed if isinstance(ends, list) else wanted[ends])


def test_an_export_that_would_not_stop_is_refused(tmp_path, monkeypatch):
    """A generation_config without the token, and one that forbids it for some tokens."""
    line = "pipeline('text-generation', FOLDER) does not stop at token 258, which ends"
    words = [*write_chats(tmp_path), write_base(tmp_path / "base", min_new_tokens=20)]
    directory = run(tmp_path, LM, *words)
    with pytest.raises(AssertionError, match=f"RunError: out: {re.escape(line)}"):
        export(tmp_path, LM, directory, tmp_path / "out", *words)
    write_base(tmp_path / "base")
    monkeypatch.setattr(task_exports, "end_answers", lambda model, stop: None)
    with pytest.raises(AssertionError, match=f"RunError: out: {re.escape(line)}"):
        export(tmp_path, LM, directory, tmp_path / "out", *words)
    assert not [*tmp_path.glob("*out*"), *tmp_path.glob(".export*")]


def test_a_failed_check_of_a_pipeline_is_in_exit_json(tmp_path):
    words = [*write_chats(tmp_path), EXPORT, write_base(tmp_path / "base", min_new_tokens=20)]
    with pytest.raises(AssertionError, match="does not stop at token 258"):
        run(tmp_path, LM, *words)
    (exit_file,) = tmp_path.glob("lm/run/exit.json")
    facts = json.loads(exit_file.read_text())
    assert facts["code"] == 1 and "does not stop at token 258" in facts["reason"]
    assert not [*tmp_path.glob("lm/run/*export*")]


def test_a_prompt_that_the_folder_reads_otherwise_is_refused(tmp_path):
    """Its tokenizer begins each chat with a token that the rows of training do not have."""
    words = [*write_chats(tmp_path), write_base(tmp_path / "base")]
    directory = run(tmp_path, LM, *words)

    class Other(LM):
        def pipeline_calls(self):
            (call,) = super().pipeline_calls()
            tokens = torch.cat([torch.tensor([[1]]), call.inputs["input_ids"]], 1)
            return [replace(call, inputs={"input_ids": tokens})]

    with pytest.raises(AssertionError, match=r"reads a prompt as \[257, .*, the run as \[1, 257, "):
        export(tmp_path, Other, directory, tmp_path / "out", *words)


def test_an_adapter_is_exported_if_its_base_stops_where_the_run_does(tmp_path):
    """transformers takes generation_config.json from the base: else a merged model is needed."""
    base = tmp_path / "base"
    words = [*write_chats(tmp_path), "task.options.lora=2"]
    refused = [*words, write_base(base)]
    line = "answers end with token 258, after which its base does not stop, which the adapter's"
    with pytest.raises(AssertionError, match=f"ConfigError: checkpoint.export=hf: {line}"):
        run(tmp_path, LM, *refused, EXPORT)
    assert not [*tmp_path.rglob("checkpoints")]
    directory = run(tmp_path, LM, *refused)
    with pytest.raises(AssertionError, match=f"ConfigError: out: {line}"):
        export(tmp_path, LM, directory, tmp_path / "out", *refused)
    lines = export(tmp_path, LM, directory, tmp_path / "out", *refused, is_merged=True)
    said = "pipeline('text-generation', FOLDER) continues a prompt with the run's tokens and stops"
    assert lines[1] == f"{said} at token 258"
    assert ends_of(tmp_path / "out")[1] == [[258, OF_TEXT]] * 2
    shutil.rmtree(base)
    write_base(base, [OF_TEXT, 258])
    lines = export(tmp_path, LM, directory, tmp_path / "adapter", *refused)
    assert lines[1] == f"{said} at token 258"


# Classifiers -----------------------------------------------------------------------------------

TEXTS = ["task=finetune", *COMMON, "task.options.texts=4", "task.options.context=24"]


def write_classifier(folder, **settings):
    """Write a BERT for two classes of other names, with the tokenizer of characters above."""
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(
        **sizes, intermediate_size=32, vocab_size=len(tokenizer), **settings
    )
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return f"task.options.model={folder}"


def test_a_text_classifier_answers_in_a_pipeline_as_in_the_run(tmp_path):
    """Its base has two classes, any of which may be right at once."""
    base = write_classifier(tmp_path / "base", problem_type="multi_label_classification")
    folder = run(tmp_path, Finetune, *TEXTS, base, EXPORT) / "export"
    config = json.loads((folder / "config.json").read_text())
    names = Finetune.labels
    assert config["id2label"] == {str(number): name for number, name in enumerate(names)}
    assert config["label2id"] == {name: number for number, name in enumerate(names)}
    assert config["problem_type"] == "single_label_classification"
    pipe = transformers.pipeline("text-classification", str(folder))
    found = pipe("import this " * 40, truncation=True, top_k=None)
    assert sum(each["score"] for each in found) == pytest.approx(1)
    assert pipe.tokenizer.model_max_length == 24  # of task.options.context


def test_a_classifier_of_other_classes_is_no_adapter_but_a_merged_model(tmp_path):
    """A pipeline takes the names of classes, and their number, from an adapter's base."""
    words = [*TEXTS, write_classifier(tmp_path / "base"), "task.options.lora=2"]
    line = r"the run gives its base names of classes \(id2label\), which the adapter's folder"
    with pytest.raises(AssertionError, match=f"ConfigError: checkpoint.export=hf: {line}"):
        run(tmp_path, Finetune, *words, EXPORT)
    directory = run(tmp_path, Finetune, *words)
    lines = export(tmp_path, Finetune, directory, tmp_path / "out", *words, is_merged=True)
    assert lines[1] == "pipeline('text-classification', FOLDER) gives the run's answer"


@pytest.mark.parametrize("odd", ["names", "values"])
def test_a_classifier_whose_pipeline_answers_otherwise_is_refused(odd, tmp_path, monkeypatch):
    directory = run(tmp_path, Finetune, *TEXTS, write_classifier(tmp_path / "base"))
    save = pretrained.Pretrained.save

    def save_otherwise(self, folder):
        save(self, folder)
        names = dict(enumerate(reversed(Finetune.labels)))
        values = {"id2label": names} if odd == "names" else {"problem_type": "regression"}
        pretrained._edit(folder / "config.json", **values)

    monkeypatch.setattr(pretrained.Pretrained, "save", save_otherwise)
    line = r"RunError: out: pipeline\('text-classification', FOLDER\) gives \w+ a probability that"
    with pytest.raises(AssertionError, match=line):
        words = [*TEXTS, f"task.options.model={tmp_path / 'base'}"]
        export(tmp_path, Finetune, directory, tmp_path / "out", *words)


# Pictures --------------------------------------------------------------------------------------

SIZE = 16
SHAPES = ["task=images", *COMMON, "task.options.shapes=12", f"task.options.size={SIZE}"]
SHAPES += ["task.options.transforms=own"]
# Files of processors as models on the hub have them, and settings that few of them have.
PROCESSORS = {
    "mobilevit-small": {  # apple's: blue first, and from 0 to 1
        "image_processor_type": "MobileViTImageProcessor", "do_flip_channel_order": True,
        "do_center_crop": True, "crop_size": {"height": 256, "width": 256}, "resample": 2,
        "size": {"shortest_edge": 288},
    },
    "vit": {
        "image_processor_type": "ViTImageProcessor", "do_normalize": True, "do_resize": True,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "resample": 2, "size": 224,
    },
    "plain": {
        "image_processor_type": "ViTImageProcessor", "do_normalize": False, "do_rescale": False,
        "size": {"height": 32, "width": 32}, "resample": 0,
    },
    "rescaled": {
        "image_processor_type": "ViTImageProcessor", "rescale_factor": 0.0078, "do_resize": True,
        "image_mean": [0.1, 0.2, 0.3], "image_std": [1, 2, 4], "resample": 3, "size": 16,
    },
    "efficientnet": {
        "image_processor_type": "EfficientNetImageProcessor", "rescale_offset": True,
        "rescale_factor": 1 / 127.5, "size": {"height": 260, "width": 260}, "include_top": True,
    },
    "convnext": {
        "image_processor_type": "ConvNextImageProcessor", "crop_pct": 0.875, "resample": 3,
        "size": {"shortest_edge": 224},
    },
    "without resize of colours": {
        "image_processor_type": "CLIPImageProcessor", "crop_size": 32, "size": 48,
        "do_normalize": None, "do_convert_rgb": None,
    },
    "clip": {
        "image_processor_type": "CLIPImageProcessor", "crop_size": 224, "size": 224,
        "do_convert_rgb": True,
    },
}  # fmt: skip


def write_vit(folder, processor=None, **settings):
    """Write a ViT for pictures of 16 pixels a side, and the file of a processor."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.ViTConfig(
        **sizes, intermediate_size=32, image_size=SIZE, patch_size=8, **settings
    )
    transformers.ViTForImageClassification(config).save_pretrained(folder)
    if processor:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return f"task.options.model={folder}"


@pytest.fixture
def pictures(tmp_path):
    """Return a folder of pictures: wide, tall, grey, with a palette, and turned by a camera."""
    root = tmp_path / "pictures"
    for split in ("train", "val"):
        for name in ("blue", "red"):
            (root / split / name).mkdir(parents=True)
    noise = image.effect_noise((45, 29), 90)
    coloured = image.merge("RGB", [noise, noise.rotate(90), noise.point(lambda value: 255 - value)])
    turned = coloured.getexif()
    turned[0x0112] = 6
    for split in ("train", "val"):
        coloured.save(root / split / "blue" / "wide.png")
        coloured.save(root / split / "blue" / "turned.jpg", exif=turned)
        coloured.transpose(image.Transpose.ROTATE_90).save(root / split / "red" / "tall.png")
        noise.save(root / split / "red" / "grey.png")
        coloured.quantize(8).save(root / split / "red" / "palette.png")
    return root


@pytest.mark.parametrize("kind", PROCESSORS)
def test_a_run_has_the_pixels_of_the_models_own_processor(kind, pictures, tmp_path):
    """task=images read image_mean and image_std, and ignored what else a processor does."""
    base = write_vit(tmp_path / "base", PROCESSORS[kind])
    task = Images(compose(tmp_path, *SHAPES, base, f"task.options.data={pictures}"))
    own = transformers.AutoImageProcessor.from_pretrained(tmp_path / "base")
    exported = tmp_path / "exported"
    task.processor.save_pretrained(exported)
    read = transformers.AutoImageProcessor.from_pretrained(exported)
    rows = task.build_dataset("eval")
    for row, (path, _) in enumerate(rows.files):
        picture = transformers.image_utils.load_image(str(path))
        found, _ = task.augment(rows[row][0][None], None, None, train=False)
        assert found.shape == (1, 3, SIZE, SIZE)
        assert torch.equal(found, read(picture, return_tensors="pt")["pixel_values"])
    square = image.effect_noise((SIZE, SIZE), 90).convert("RGB").resize((SIZE, SIZE))
    square.putpixel((3, 4), (250, 130, 10))
    train = task.augment(crop_all(square), None, None, train=True)[0]
    wanted = own(square, return_tensors="pt", do_resize=False, do_center_crop=False)
    torch.testing.assert_close(train, wanted["pixel_values"].float(), rtol=1e-5, atol=1e-5)


def crop_all(picture):
    """Return a whole picture as training has it."""
    pixels = torch.frombuffer(bytearray(picture.tobytes()), dtype=torch.uint8)
    return pixels.view(1, *picture.size, 3).permute(0, 3, 1, 2)


@pytest.mark.parametrize("kind", ["mobilevit-small", "efficientnet", None])
def test_a_folder_of_task_images_is_read_by_a_plain_pipeline(kind, pictures, tmp_path):
    """There was no preprocessor_config.json; a base has classes of its own names."""
    words = [*SHAPES, write_vit(tmp_path / "base", PROCESSORS.get(kind))]
    if kind != "efficientnet":  # drawn shapes otherwise
        words.append(f"task.options.data={pictures}")
    folder = run(tmp_path, Images, *words, EXPORT) / "export"
    processor = transformers.AutoImageProcessor.from_pretrained(folder)
    pipe = transformers.pipeline("image-classification", str(folder))
    path = str(pictures / "val" / "red" / "palette.png")
    found = pipe(path, top_k=5)
    names = ("blue", "red") if kind != "efficientnet" else ("circle", "square", "triangle")
    assert {each["label"] for each in found} == {*names}
    pixels = processor(transformers.image_utils.load_image(path), return_tensors="pt")
    assert pixels["pixel_values"].shape == (1, 3, SIZE, SIZE)
    scores = pipe.model(**pixels).logits.detach().softmax(1)[0]
    for each in found:
        assert each["score"] == pytest.approx(float(scores[names.index(each["label"])]), rel=1e-5)


def test_a_folder_whose_processor_makes_other_pixels_is_refused(pictures, tmp_path):
    words = [*SHAPES, write_vit(tmp_path / "base", PROCESSORS["vit"])]
    words.append(f"task.options.data={pictures}")
    directory = run(tmp_path, Images, *words)

    class Other(Images):
        def augment(self, inputs, targets, random, train):
            return super().augment(inputs, targets, random, train)[0] * 1.001, targets

    line = r"image-classification', FOLDER\) reads other pixels than the run: \d.\de-0[34] of the"
    with pytest.raises(AssertionError, match=line):
        export(tmp_path, Other, directory, tmp_path / "out", *words)


def test_a_processor_that_training_cannot_follow_is_refused(tmp_path):
    several = {"image_processor_type": "ViTImageProcessor", "do_resize": False}
    write_vit(tmp_path / "several", several)
    line = r"size=16: the model's ViTImageProcessor\w* makes pictures of 32, 40, 48 pixels a side"
    with pytest.raises(ConfigError, match=line):
        load_processor(str(tmp_path / "several"), SIZE)
    write_vit(tmp_path / "mixed", PROCESSORS["vit"])
    processor = load_processor(str(tmp_path / "mixed"), SIZE)

    def mix(images, return_tensors):
        return {"pixel_values": prepare(images, processor)[None].mean(1, True).expand(1, 3, -1, -1)}

    with pytest.raises(ConfigError, match="changes pictures by more than a factor"):
        find_values(mix)


def test_training_scales_pictures_as_the_processor_does(pictures, tmp_path):
    """Crops had bilinear interpolation whatever the processor has."""
    data = f"task.options.data={pictures}"
    picture = image.open(pictures / "val" / "blue" / "wide.png").convert("RGB")
    found = []
    for kind in ("plain", "clip"):
        words = [*SHAPES, data, write_vit(tmp_path / kind, PROCESSORS[kind])]
        transform = Images(compose(tmp_path, *words)).build_transform(is_train=True)
        torch.manual_seed(0)
        found.append(transform(picture))
        torch.manual_seed(0)
        wanted = crop(picture, SIZE, is_train=True, resample={"plain": 0, "clip": 3}[kind])
        assert torch.equal(found[-1], wanted)
    assert not torch.equal(*found)


def test_data_of_another_processor_has_another_digest(pictures, tmp_path):
    digests = set()
    for number, kind in enumerate(("vit", "vit", "rescaled")):
        base = write_vit(tmp_path / str(number), PROCESSORS[kind])
        task = Images(compose(tmp_path, *SHAPES, base, f"task.options.data={pictures}"))
        digests.add(task.build_dataset("eval").digest)
    assert len(digests) == 2


class Pipe:
    """A pipeline that answers with given tokens, of a model that ends at token 9."""

    def __init__(self, tokens):
        self._tokens = tokens
        self.model = torch.nn.Identity()
        self.model.dtype = torch.float32
        self.model.generation_config = SimpleNamespace(eos_token_id=9)

    def __call__(self, argument, max_new_tokens, **named):
        return [{"generated_token_ids": self._tokens}]


@pytest.mark.parametrize("tokens", [[4, 5, 1, 3], [4, 5, 2, 3], [4, 5, 1], [4, 5], [4, 5, 1, 3, 3]])
def test_answers_may_differ_only_where_two_tokens_are_as_likely(tokens):
    """The run answers 1 and 3 to 4 and 5; 2 is as likely as 1, but for rounding."""
    scores = torch.tensor([[0, 8, 8 - 1e-6, 0], [0, 0, 0, 8]])
    call = {"argument": "x", "inputs": {"input_ids": torch.tensor([[4, 5]])}, "stop": None}
    call |= {"options": {}, "count": 2, "tokens": [4, 5, 1, 3], "scores": scores}
    is_right = len(tokens) == 4
    found = pipelines._check_answer(Pipe(tokens), call)
    assert found == ("" if is_right else f"answers {tokens[2:]}, the run [1, 3]")
    call["scores"] = torch.tensor([[0, 8, 7.99, 0], [0, 0, 0, 8]])
    found = pipelines._check_answer(Pipe(tokens), call)
    assert bool(found) == (tokens[2:] != [1, 3])
