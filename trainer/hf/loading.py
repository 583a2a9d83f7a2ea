"""Models of Hugging Face: fetched once per node, found and loaded offline, adapted by LoRA.

A name is a folder that save_pretrained has written, a GGUF file, or a name on the hub: owner/name,
owner/name@revision, owner/name/file.gguf. Files of a repository are data: its code is never run,
and weights in pickles, which are programs, are never opened.
"""

import hashlib
import json
import os
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer import ConfigError
from trainer.base.errors import did_you_mean
from trainer.hf import repository
from trainer.hf.hub import (
    OF_TOKENS,
    fetch_repository,
    import_packages,
    parse,
    siblings,
    snapshot,
)
from trainer.hf.library import quiet_transformers
from trainer.hf.lora import adapt, in_one_line
from trainer.hf.repository import (
    ModelFiles,
    check,
    check_kind,
    check_loaded,
    limited_by_files,
    pickles_refused,
)
from trainer.shards.long_work import watched

MODEL_KEY = "task.options.model"
# of a config, beside settings of generation: what decides no output
OF_NO_OUTPUT = ("architectures", "dtype", "id2label", "label2id", "return_dict", "torch_dtype")
__all__ = [
    "ModelFiles",
    "adapt",
    "blocks_of",
    "digest_config",
    "fetch",
    "find",
    "find_weights",
    "load_config",
    "load_model",
    "load_tokenizer",
]


def fetch(name: str | None, key: str = MODEL_KEY, beside: Sequence[str] = OF_TOKENS) -> None:
    """Download the files of a name on the hub unless this machine has them. For `prepare()`.

    Asks the hub only for what is not in its cache, so a run that starts again has the same weights.
    A GGUF file is unpacked into a folder once: it takes a minute (SmolLM2, 135 million parameters),
    and would take it on each rank. A copy without weights, or without a file of `beside`, is not
    whole, and completed.
    """
    if name is None:
        return
    if (hub_name := parse(name, key)) is not None:
        fetch_repository(name, hub_name, key, beside)
    source = find(name, key)
    if source.gguf:
        _unpack(source, key)


def find(name: str, key: str = MODEL_KEY) -> ModelFiles:
    """Return where the files of a model are on this machine, checked; asks no server.

    Raises ConfigError if there are none, if they want code of their own to be run, or if the
    weights are pickles.
    """
    if (hub_name := parse(name, key)) is None:
        path = Path(name).expanduser()
        mode = path.stat().st_mode
        if not stat.S_ISDIR(mode) and not stat.S_ISREG(mode):
            raise ConfigError(f"{key}={name}: must be a folder, or a GGUF file")
        source = (
            ModelFiles(name, path)
            if stat.S_ISDIR(mode)
            else ModelFiles(name, path.parent, path.name)
        )
    else:
        folder = snapshot(hub_name)
        if folder is None:
            close = did_you_mean(Path(name).name, siblings(name))
            raise ConfigError(f"""{key}={name}:
                is neither a folder nor in the cache of the hub{close};
                give a folder, or call fetch({name!r}) of trainer.hf.loading in prepare()""")
        source = ModelFiles(name, folder, hub_name.gguf, folder.name)
    check(source, f"{key}={name}")
    if source.gguf and (unpacked := _unpacked(source)).is_dir():
        return replace(source, folder=unpacked, gguf=None)
    return source


def find_weights(name: str, key: str = MODEL_KEY) -> list[Path]:
    """Return the files whose weights `load_model` loads, in the order of their names."""
    return repository.find_weights(find(name, key), f"{key}={name}")


def load_model(
    kind: str,
    name: str,
    key: str = MODEL_KEY,
    say: Callable[[str], object] | None = None,
    dtype: torch.dtype | str = torch.float32,
    **options: Any,
) -> nn.Module:
    """Return a model of transformers with the weights of `name`, by an Auto class such as
    AutoModelForCausalLM.

    `dtype="auto"` keeps that of the file. `options` go to `from_pretrained`. Weights that the files
    lack are drawn anew, and named by `say`: that is a new head of a classifier; for other models
    it is refused.
    """
    source = find(name, key)
    check_kind(source, kind, f"{key}={name}")
    if not source.gguf:
        load_config(name, key)  # its errors are told as its own
    transformers = import_packages("transformers", *(["gguf"] if source.gguf else []))
    setting = f"{key}={name}"
    with (
        _quiet(source),
        in_one_line(f"{setting}: {kind} cannot load it"),
        pickles_refused(setting),
        limited_by_files(source, setting),
    ):
        model, report = getattr(transformers, kind).from_pretrained(
            source.folder,
            **_place(source),
            dtype=dtype,
            output_loading_info=True,
            **({} if source.gguf else {"use_safetensors": True}),
            **({"ignore_mismatched_sizes": True} | options),  # check_loaded names them
        )
    if source.gguf:
        _make_ordinary(model)
    model.config._name_or_path = model.name_or_path = name.partition("@")[0]
    model.config._commit_hash = source.revision
    model.digest = digest_config(model.config)
    model.new_modules = check_loaded(model, kind, report, setting, say)
    return model


def load_tokenizer(name: str, key: str = MODEL_KEY) -> Any:
    """Return the tokenizer of a model, from the same files."""
    source = find(name, key)
    if (source.folder / "config.json").is_file():
        load_config(name, key)  # which the tokenizer's class may follow from
    transformers = import_packages("transformers", *(["gguf"] if source.gguf else []))
    with (
        _quiet(source),
        in_one_line(f"{key}={name}: has no tokenizer that can be loaded"),
    ):
        return transformers.AutoTokenizer.from_pretrained(source.folder, **_place(source))


def load_config(name: str, key: str = MODEL_KEY, **options: Any) -> Any:
    """Return the config of a model, with `options` in it."""
    source = find(name, key)
    transformers = import_packages("transformers", *(["gguf"] if source.gguf else []))
    with (
        _quiet(source),
        in_one_line(f"{key}={name}: has no config that can be loaded"),
    ):
        return transformers.AutoConfig.from_pretrained(source.folder, **_place(source), **options)


def digest_config(config: Any) -> str:
    """Return a digest of what decides outputs in a config of transformers.

    Without defaults: a later version of transformers has more of them.
    """
    transformers = import_packages("transformers")
    left_out = {*transformers.GenerationConfig().to_dict(), *OF_NO_OUTPUT}

    def kept(value: Any) -> Any:
        if not isinstance(value, dict):
            return value
        names = (each for each in value if each not in left_out and not str(each).startswith("_"))
        return {str(name): kept(value[name]) for name in names}

    content = json.dumps(kept(config.to_diff_dict()), sort_keys=True, default=str)
    return hashlib.sha256(content.encode()).hexdigest()


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the layers that a model of transformers names as indivisible, in their order.

    Looks through wrappers such as peft's. Embeddings that it names too are left out.
    """
    kinds: set[str] = set()
    for module in model.modules():
        kinds.update(getattr(module, "_no_split_modules", None) or ())
    layers = [
        layer
        for module in model.modules()
        if isinstance(module, nn.ModuleList)
        for layer in module
        if type(layer).__name__ in kinds
    ]
    return list(dict.fromkeys(layers))


def _unpacked(source: ModelFiles) -> Path:
    """Return the folder that holds, or will hold, what is in a GGUF file."""
    hub, transformers = import_packages("huggingface_hub"), import_packages("transformers")
    path = (source.folder / str(source.gguf)).resolve()
    state = path.stat()
    facts = (str(path), state.st_size, state.st_mtime_ns, transformers.__version__)
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:16]
    return Path(hub.constants.HF_HOME, "unpacked", f"{Path(source.name).stem}-{digest}")


def _unpack(source: ModelFiles, key: str) -> None:
    target = _unpacked(source)
    print(f"unpacking {source.name} into {target}", file=sys.stderr)
    model: Any = load_model("AutoModelForCausalLM", source.name, key)
    tokenizer = load_tokenizer(source.name, key)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".unpacking") as folder:
            with _quiet(source):
                model.save_pretrained(folder)
                tokenizer.save_pretrained(folder)
            os.rename(folder, target)
            Path(folder).mkdir()  # the context removes it
    except OSError as error:
        if not target.is_dir():  # else another run was faster
            raise ConfigError(
                f"{key}={source.name}: cannot be unpacked ({error}); make room"
            ) from None


@contextmanager
def _quiet(source: ModelFiles) -> Iterator[None]:
    if source.gguf:
        from transformers import modeling_gguf_pytorch_utils as unpacking

        # in the place of a bar that cannot be switched off (5.23)
        unpacking.tqdm = lambda tensors, **_: watched(
            tensors, f"unpacking {source.gguf}", "tensors"
        )
    with quiet_transformers():
        yield


def _place(source: ModelFiles) -> dict[str, Any]:
    options = {"local_files_only": True, "trust_remote_code": False}
    return options | {"gguf_file": source.gguf} if source.gguf else options


def _make_ordinary(model: Any) -> None:
    """Forget that a model was unpacked from a GGUF file: save_pretrained refuses it otherwise."""
    model.hf_quantizer = None
    model.is_quantized = False
    for owner, name in ((model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(owner, name):
            delattr(owner, name)
