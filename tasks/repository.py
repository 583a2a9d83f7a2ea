"""Files of a model: what of them is loaded, and what is refused as code or as a program."""

import fnmatch
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import ConfigError
from trainer.errors import one_line

NEW_HEADS = ("Classification", "Regression", "QuestionAnswering", "Segmentation", "Detection")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack")


@dataclass(frozen=True)
class Source:
    """Files of a model on this machine: a folder, the GGUF file in it, the commit on the hub."""

    name: str
    folder: Path
    gguf: str | None = None
    revision: str | None = None


def matching(names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(fnmatch.fnmatch(name, each) for each in patterns)]


def without_weights(files: Sequence[str], name: str) -> str:
    if ggufs := matching(files, ["*.gguf"]):
        return f"has its weights as GGUF files; give one of them, such as {name}/{ggufs[0]}"
    if pickles := matching(files, PICKLES):
        return f"""has no *.safetensors; {pickles[0]} is not opened, since a pickle can run any
            code; take a model with *.safetensors, or convert it where nothing can be harmed:
            load it there and save_pretrained(FOLDER)"""
    return "has no weights: must hold *.safetensors, as save_pretrained of transformers writes them"


def check(source: Source, given: str) -> None:
    if source.gguf:
        if not (source.folder / source.gguf).is_file() or not source.gguf.endswith(".gguf"):
            raise ConfigError(f"{given}: must be a folder, or a GGUF file")
        return
    files = sorted(path.name for path in source.folder.iterdir())
    if "adapter_config.json" in files:
        base = _read(source.folder / "adapter_config.json", given).get("base_model_name_or_path")
        raise ConfigError(f"{given}: is an adapter of peft, not a model; give its base, {base}")
    if "config.json" not in files and not matching(files, ["*.gguf"]):
        must = "must be a folder that save_pretrained of transformers has written"
        raise ConfigError(f"{given}: {must}")
    for name in matching(files, ["config.json", "*_config.json"]):
        _check_config(_read(source.folder / name, given), name, given)
    _check_weights(source, files, given)


def check_kind(source: Source, kind: str, given: str) -> None:
    """Refuse an encoder-decoder where a decoder is wanted: half of it would be loaded, or none."""
    path = source.folder / "config.json"
    if kind != "AutoModelForCausalLM" or source.gguf or not path.is_file():
        return
    config = _read(path, given)
    if config.get("is_encoder_decoder"):
        family = config.get("model_type")
        raise ConfigError(f"""{given}: is an encoder-decoder (model_type={family}); must be a
            decoder-only model, such as a Llama or a Qwen, which {kind} loads whole""")


def _read(path: Path, given: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{given}: {path.name} is not readable ({one_line(error)})") from None
    return content if isinstance(content, dict) else {}  # others have one of their own kind


def _check_config(content: dict[str, Any], name: str, given: str) -> None:
    """Refuse a config that wants foreign code to be run, or packed weights."""
    for key, value in _entries(content):
        if key == "auto_map":
            raise ConfigError(f"""{given}:
                {name} has auto_map: it wants code of the repository to be run, which never happens
                here; take a model whose code is in transformers, or remove auto_map from a copy of
                the folder if this one's is""")
        if key.endswith(("attn_implementation", "experts_implementation")) and "/" in str(value):
            raise ConfigError(f"""{given}:
                {name} has {key}={value}: it wants a kernel of the hub to be run, which never
                happens here; remove {key} from a copy of the folder""")
        if key == "quantization_config":
            method = value.get("quant_method") if isinstance(value, dict) else value
            raise ConfigError(f"""{given}: its weights are quantized ({method}), which cannot be
                trained here; give the model as it was before, or a GGUF file, which is unpacked""")


def _entries(content: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(content, dict):
        for key, value in content.items():
            yield key, value
            yield from _entries(value)


def _check_weights(source: Source, files: Sequence[str], given: str) -> None:
    weights = matching(files, ["*.safetensors"])
    if not weights:
        raise ConfigError(f"{given}: {without_weights(files, source.name)}")
    index = source.folder / "model.safetensors.index.json"
    if index.is_file():
        parts = _read(index, given).get("weight_map")
        named = {str(part) for part in parts.values()} if isinstance(parts, dict) else set()
        if absent := sorted(part for part in named if not (source.folder / part).is_file()):
            raise ConfigError(f"{given}: has no {absent[0]}, which {index.name} names")


def check_loaded(
    model: Any,
    kind: str,
    report: Any,
    given: str,
    say: Callable[[str], object] | None,
) -> tuple[str, ...]:
    """Return the modules whose weights the files lack.

    Raises ConfigError unless the model takes all weights of its layers from the files.
    """
    if surplus := _find_surplus(model, report["unexpected_keys"]):
        raise ConfigError(f"""{given}: its files have {surplus[0]}{", ..." * (len(surplus) > 1)},
            which its config.json leaves out; must be the config that they were saved with""")
    new = sorted({*report["missing_keys"], *(entry[0] for entry in report["mismatched_keys"])})
    if not new:
        return ()
    named = f"{', '.join(new[:3])}{', ...' * (len(new) > 3)}"
    may_be_new = any(part in kind for part in NEW_HEADS)
    body = f"{model.base_model_prefix}."
    mismatched = [e for e in report["mismatched_keys"] if not may_be_new or e[0].startswith(body)]
    if mismatched:
        name, there, here = min(mismatched)
        raise ConfigError(f"""{given}: {name} has shape {tuple(there)} in its files and
            {tuple(here)} by its config.json; must be the config that they were saved with""")
    if not may_be_new or 2 * len(new) > len(list(model.parameters())):
        raise ConfigError(f"""{given}: has no {named} of {type(model).__name__};
            must be a model that {kind} loads whole""")
    if say:
        say(f"new weights, not in {given.partition('=')[2]}: {named}")
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name in new))


def _find_surplus(model: Any, names: Iterable[str]) -> list[str]:
    """Return those of weights that the model's layers take by another config: of more layers, or a
    bias. Layers that predict further tokens, which follow the others, are none of its own."""
    config = model.config.get_text_config()
    count = getattr(config, "num_hidden_layers", None) or 0
    further = range(count, count + (getattr(config, "num_nextn_predict_layers", None) or 0))
    layers = {_without_numbers(name): each for name, each in model.named_modules()}
    known = model.state_dict().keys()
    found = []
    for name in names:
        owner, _, last = name.rpartition(".")
        layer = layers.get(_without_numbers(owner))
        takes = layer is not None and last in layer._parameters
        if takes and name not in known and not {*map(int, re.findall(r"\d+", owner))} & {*further}:
            found.append(name)
    return sorted(found)


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "0", name)
