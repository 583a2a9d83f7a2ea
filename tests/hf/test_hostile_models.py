"""Folders of models that mean harm, are damaged, or are half there: one line, and soon."""

import json
import os
import pickle
import shutil
import struct
import time
from pathlib import Path

import pytest
import torch
from harness.hub_server import serving_hub, use_hub

transformers = pytest.importorskip("transformers")
tqdm = pytest.importorskip("tqdm")
tqdm.tqdm.monitor_interval = 0  # it is a thread

from trainer import ConfigError  # noqa: E402
from trainer.hf import loading as hf  # noqa: E402
from trainer.hf import repository  # noqa: E402
from trainer.tasks.lm import build_tokenizer  # noqa: E402

KEY = "task.options.model"
CAUSAL = "AutoModelForCausalLM"
SIZES = {"vocab_size": 259, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"intermediate_size": 24, "max_position_embeddings": 32, "num_key_value_heads": 1}


def build_llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """Return a folder with a small Llama in three files, and its tokenizer."""
    folder = tmp_path_factory.mktemp("llama")
    build_llama().save_pretrained(folder, max_shard_size="8kB")
    build_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def copied(llama, tmp_path):
    """Return a copy of that folder, to be changed."""
    return shutil.copytree(llama, tmp_path / "copy")


@pytest.fixture
def single(tmp_path):
    """Return a folder with the same Llama in one file."""
    build_llama().save_pretrained(tmp_path / "single")
    build_tokenizer().save_pretrained(tmp_path / "single")
    return tmp_path / "single"


def refusal(call, *arguments, **options):
    begun = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **options)
    text = str(caught.value)
    assert "\n" not in text and time.monotonic() - begun < 10
    return text


def change(folder, name="config.json", **values):
    path = folder / name
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


class Evil:
    """A pickle that writes a file when it is opened by pickle itself."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (Path(self.path),)


@pytest.fixture
def opened_pickles(monkeypatch):
    """Return the files that torch.load was asked for: no reader of ours asks for one."""
    asked = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda file, *a, **k: (asked.append(file), load(file))[1])
    return asked


def put_index(folder, name, file="model.safetensors.index.json"):
    """Let an index name another file for one tensor."""
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    first = next(iter(index["weight_map"]))
    index["weight_map"][first] = name
    (folder / file).write_text(json.dumps(index))


# Which files are opened ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "pytorch_model.bin",
        "../other/model.safetensors",
        "{root}/other/model.safetensors",
        "sub/model.safetensors",
        "sub/../model-00001.safetensors",
        "model.safetensors.pt",
        "..",
        "",
    ],
)
def test_an_index_names_only_safetensors_of_its_folder(name, copied, tmp_path, opened_pickles):
    """transformers would open each of them; the check asked only whether the file is there."""
    for folder in (tmp_path / "other", copied / "sub"):
        folder.mkdir()
        shutil.copy(next(copied.glob("*.safetensors")), folder / "model.safetensors")
    torch.save({"x": torch.ones(2)}, copied / "pytorch_model.bin")
    shutil.copy(copied / "pytorch_model.bin", copied / "model.safetensors.pt")
    name = name.format(root=tmp_path)
    put_index(copied, name)
    for call in (hf.find, hf.load_tokenizer, lambda folder: hf.load_model(CAUSAL, folder)):
        assert refusal(call, str(copied)) == (
            f"{KEY}={copied}: model.safetensors.index.json names {name}: must be *.safetensors in "
            "the same folder; other files are not opened"
        )
    assert not opened_pickles


@pytest.mark.parametrize(
    "name", ["adapter_model.bin", "evil.safetensors.index.json", "../a.safetensors", ["a"]]
)
def test_weights_that_a_config_names_are_checked_too(name, single, opened_pickles):
    torch.save({"x": torch.ones(2)}, single / "adapter_model.bin")
    parts = {"weight_map": {"lm_head.weight": "adapter_model.bin"}}
    (single / "evil.safetensors.index.json").write_text(json.dumps(parts))
    change(single, transformers_weights=name)
    assert refusal(hf.load_model, CAUSAL, str(single)).startswith(f"{KEY}={single}: ")
    assert not opened_pickles
    (single / "evil.safetensors.index.json").unlink()
    shutil.copy(single / "model.safetensors", single / "own.safetensors")
    (single / "model.safetensors").write_bytes(b"")
    change(single, transformers_weights="own.safetensors")
    weight = hf.load_model(CAUSAL, str(single)).lm_head.weight
    assert torch.equal(weight, build_llama().lm_head.weight)


def test_pickles_beside_the_weights_are_not_opened(copied, opened_pickles, tmp_path):
    (copied / "pytorch_model.bin").write_bytes(pickle.dumps(Evil(str(tmp_path / "it ran"))))
    put_index(copied, "pytorch_model.bin", "pytorch_model.bin.index.json")
    model = hf.load_model(CAUSAL, str(copied))
    assert torch.equal(model.lm_head.weight, build_llama().lm_head.weight)
    assert not opened_pickles and not (tmp_path / "it ran").exists()


def test_a_library_that_opens_a_pickle_is_stopped():
    load = torch.load
    line = r"^m: a.bin is not opened, since a pickle can run any code"
    with pytest.raises(ConfigError, match=line), repository.pickles_refused("m"):
        torch.load("a.bin", weights_only=True)
    assert torch.load is load


def test_an_adapter_beside_a_gguf_file_is_refused(tmp_path):
    """transformers would take the adapter's base, wherever it is, for the file."""
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    content = {"peft_type": "LORA", "base_model_name_or_path": "evil/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    name = str(tmp_path / "x.gguf")
    assert refusal(hf.find, name) == (
        f"{KEY}={name}: has an adapter_config.json beside it, by which transformers would load "
        "evil/base instead; move the file to a folder of its own"
    )


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_link_that_leaves_the_folder_is_refused(name, single, tmp_path):
    target = (single / name).rename(tmp_path / f"elsewhere {name}")
    (single / name).symlink_to(target)
    assert refusal(hf.find, str(single)) == (
        f"{KEY}={single}: {name} is a link to {target}, which is not a file of this folder; "
        "put a copy of it there"
    )
    (single / name).unlink()
    target.rename(single / f"other {name}")
    (single / name).symlink_to(f"other {name}")
    hf.find(str(single))


def test_links_of_the_hubs_cache_are_followed_and_no_others(single, tmp_path):
    """Its snapshots are links into ../../blobs."""
    blobs, snapshot = (tmp_path / "models--a--b" / each for each in ("blobs", "snapshots/1"))
    blobs.mkdir(parents=True)
    shutil.copytree(single, snapshot)
    (snapshot / "model.safetensors").rename(blobs / "ab12")
    (snapshot / "model.safetensors").symlink_to("../../blobs/ab12")
    weight = hf.load_model(CAUSAL, str(snapshot)).lm_head.weight
    assert torch.equal(weight, build_llama().lm_head.weight)
    (snapshot / "model.safetensors").unlink()
    (snapshot / "model.safetensors").symlink_to(single / "model.safetensors")
    assert "which is not a file of this folder" in refusal(hf.find, str(snapshot))
    plain = tmp_path / "models--a--b/others/1"  # which is no cache
    shutil.copytree(single, plain)
    (plain / "model.safetensors").unlink()
    (plain / "model.safetensors").symlink_to(blobs / "ab12")
    assert "which is not a file of this folder" in refusal(hf.find, str(plain))


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "README.md", "x_config.json"])
def test_a_pipe_or_a_device_in_the_folder_is_refused_at_once(name, kind, single):
    """A reader would wait for a pipe, and read a device for ever."""
    (single / name).unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(single / name)
    else:
        (single / name).symlink_to("/dev/zero")
    assert refusal(hf.find, str(single)) == (
        f"{KEY}={single}: {name} is not a regular file; remove it"
    )


# Names --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a" * 300, "cannot be read (File name too long); give another name"),
        ("/" + "b/" * 2500, "cannot be read (File name too long); give another name"),
        ("a\0b", "cannot be read (embedded null byte); give another name"),
        ("~nobody-has-this-name/m", "cannot be read (Could not determine home directory.); give"),
        ("/dev/zero", "must be a folder, or a GGUF file"),
        ("{file}/model", "does not exist"),
        ("{loop}", "cannot be read (Too many levels of symbolic links); give another name"),
    ],
)
def test_a_name_that_is_no_model_is_one_line(name, why, tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").touch()
    name = name.format(file=tmp_path / "file", loop=tmp_path / "loop")
    for call in (hf.fetch, hf.find):
        text = refusal(call, name)
        assert text.startswith(f"{KEY}={name}: {why}"), text


# Configs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"num_attention_heads": 0}, "has no config that can be loaded (ZeroDivisionError: "),
        ({"dtype": "evil"}, "config.json has dtype='evil': must be a dtype of torch, such as bfl"),
        ({"torch_dtype": "load"}, "config.json has torch_dtype='load': must be a dtype of torch,"),
        ({"text": {"dtype": 5}}, "config.json has dtype=5: must be a dtype of torch, such as bfl"),
    ],
)
def test_an_error_of_the_config_is_told_as_one(values, why, single):
    """They were told as errors of the tokenizer, whose class transformers takes from the config."""
    change(single, **values)
    for call in (hf.load_tokenizer, lambda folder: hf.load_model(CAUSAL, folder)):
        assert refusal(call, str(single)).startswith(f"{KEY}={single}: {why}")


@pytest.mark.parametrize("content", ["[1]", '"llama"', "5", "null"])
def test_a_config_that_is_no_object_is_refused(content, single):
    (single / "config.json").write_text(content)
    for call in (hf.find, hf.load_tokenizer):
        assert refusal(call, str(single)) == (
            f"{KEY}={single}: config.json must be a JSON object, and is a list or a value"
        )


@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": 10**9},
        {"num_labels": 10**9},
        {"text_config": {"deep": [{"n_layers": 10**12}]}},
        {"depths": [2, 10**9]},
    ],
)
def test_a_config_with_any_number_of_layers_is_refused_before_it_is_read(values, single):
    change(single, **values)
    for call in (hf.load_tokenizer, lambda folder: hf.load_model(CAUSAL, folder)):
        assert ", at most 100,000 are read; must be the config" in refusal(call, str(single))


@pytest.mark.parametrize(
    "values",
    [
        {"num_hidden_layers": 90_000},
        {"intermediate_size": 10**9},
        {"vocab_size": 10**12},
        {"head_dim": 10**8},
    ],
)
def test_a_model_far_larger_than_its_files_is_refused_while_it_is_built(values, single):
    """It would take all memory, or hours."""
    change(single, **values)
    size = (single / "model.safetensors").stat().st_size
    assert refusal(hf.load_model, CAUSAL, str(single)) == (
        f"{KEY}={single}: asks for far more weights than its files have (21 tensors in {size:,} "
        "bytes); must be the config that they were saved with"
    )
    module = torch.nn.modules.module
    assert not module._global_parameter_registration_hooks
    assert not module._global_buffer_registration_hooks


def write_gguf(path, architecture=b"llama", **numbers):
    """Write the metadata of a GGUF file without tensors."""

    def text(value):
        return struct.pack("<Q", len(value)) + value

    values = text(b"general.architecture") + struct.pack("<I", 8) + text(architecture)
    for name, (kind, value) in numbers.items():
        form = {4: "<II", 10: "<IQ"}[kind]
        values += text(architecture + b"." + name.encode()) + struct.pack(form, kind, value)
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1 + len(numbers)) + values)


@pytest.mark.parametrize("number", [(4, 10**9), (10, 10**12)])
def test_a_gguf_file_with_any_number_of_layers_is_refused_before_it_is_read(number, tmp_path):
    """A config of Qwen3 has an entry for each of them."""
    path = tmp_path / "x.gguf"
    write_gguf(path, b"qwen3", block_count=number)
    assert refusal(hf.find, str(path)) == (
        f"{KEY}={path} has block_count={number[1]:,}, at most 100,000 are read; must be the config "
        "that the weights were saved with"
    )
    write_gguf(path, b"qwen3", block_count=(number[0], 28), expert_count=(4, 8))
    hf.find(str(path))


def test_a_gguf_file_with_a_name_alone_builds_no_model(tmp_path, monkeypatch):
    """Its defaults are those of a Llama of 7 billion weights."""
    pytest.importorskip("gguf")
    use_hub("http://127.0.0.1:9", tmp_path / "home", monkeypatch.setattr)
    path = tmp_path / "x.gguf"
    write_gguf(path)
    text = refusal(hf.load_model, CAUSAL, str(path))
    assert text.startswith(f"{KEY}={path}: asks for far more weights than its files have (0 tensor")


def test_a_config_of_many_levels_is_one_line(single):
    deep = '{"a": ' * 900 + "1" + "}" * 900
    (single / "config.json").write_text('{"model_type": "llama", "x": ' + deep + "}")
    assert refusal(hf.load_model, CAUSAL, str(single)).startswith(f"{KEY}={single}: ")


# Half a download ----------------------------------------------------------------------------------


@pytest.fixture
def hub(llama, tmp_path, monkeypatch):
    with serving_hub(llama=llama) as server:
        use_hub(server.url, tmp_path / "home", monkeypatch.setattr)
        yield server


def break_off(monkeypatch, hub, tmp_path, missing):
    """Fetch a model file by file, as transformers does, but for one part of its weights."""
    from huggingface_hub import hf_hub_download

    for path in sorted(hub.folders["hub/llama"].iterdir()):
        if path.name != missing:
            hf_hub_download("hub/llama", path.name)


def test_a_half_downloaded_model_is_completed_by_its_index(hub, llama, monkeypatch, tmp_path):
    """Any one file of weights was taken for the whole, and the hub was asked nothing."""
    parts = sorted(path.name for path in llama.glob("*.safetensors"))
    assert len(parts) > 2
    break_off(monkeypatch, hub, tmp_path, parts[1])
    assert f"has no {parts[1]}, which" in refusal(hf.find, "hub/llama")
    use_hub(hub.url, tmp_path / "home", monkeypatch.setattr, is_offline=True)
    text = refusal(hf.fetch, "hub/llama")
    assert text.startswith(f"{KEY}=hub/llama: is in the cache of the hub without {parts[1]} (")
    assert str(tmp_path / "home") in text and "HF_HUB_OFFLINE forbids to fetch it" in text
    use_hub(hub.url, tmp_path / "home", monkeypatch.setattr)
    hub.status = 503
    text = refusal(hf.fetch, "hub/llama")
    assert f"without {parts[1]} ({tmp_path}" in text and "(it answers 503); try again" in text
    hub.status = 0
    hf.fetch("hub/llama")
    weight = hf.load_model(CAUSAL, "hub/llama").lm_head.weight
    assert torch.equal(weight, build_llama().lm_head.weight)
    num_asked = len(hub.asked)
    hf.fetch("hub/llama")
    assert len(hub.asked) == num_asked
