"""Files of a model: what of them is loaded, and what is refused as code or as a program."""

import fnmatch
import json
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_parameter_registration_hook,
)

from trainer import ConfigError
from trainer.base.errors import one_line
from trainer.base.plain_files import read_file
from trainer.shards.sources import open_file

MOST_FILES = 10_000  # of a folder
MOST_OF_JSON = 2**26  # bytes of a file
MOST_OF_A_HEADER = 10**8  # bytes: the limit of safetensors too
MOST_REPEATED = 100_000  # layers, experts or labels, for each of which a config makes an entry
NAMES_OF_REPEATED = re.compile("layer|label|depth|expert")  # in names of such numbers
# the same in the metadata of a GGUF file: a name, a type, a value of 4 bytes, or 8 for two types
GGUF_COUNTS = re.compile(rb"((?:block|expert)_count)(.{4})(.{4,8})", re.DOTALL)
GGUF_LONG = (10, 11)
MOST_OF_METADATA = 2**26  # bytes
BYTES_OF_A_TENSOR = 32  # in a GGUF file, at least
WEIGHT_FILE = "model.safetensors"
PARTS_INDEX = "model.safetensors.index.json"
# A model may have more than its files: tied weights, a new head, tables of positions; and a tensor
# of a file, such as all experts of a layer, may become several.
MORE_TENSORS = 16  # times those of the files
MORE_ELEMENTS = 2
FREE_TENSORS = 10_000
FREE_ELEMENTS = 2**27
NEW_HEADS = ("Classification", "Regression", "QuestionAnswering", "Segmentation", "Detection")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.h5", "*.msgpack")


@dataclass(frozen=True)
class ModelFiles:
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


def look_at(name: str | Path, setting: str) -> int | None:
    """Return the mode of what has this name on the disk, None if nothing has.

    Raises ConfigError for a name that no file system takes, and for what cannot be looked at.
    """
    try:
        return Path(name).expanduser().stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        why = error.strerror or one_line(error)
    except (ValueError, RuntimeError) as error:  # of a NUL, of ~nobody
        why = one_line(error)
    raise ConfigError(f"{setting}: cannot be read ({why}); give another name")


def check(source: ModelFiles, setting: str) -> None:
    """Raise ConfigError unless all that transformers may open are files of this model, without
    code of their own, and its weights are no pickles."""
    if source.gguf and not source.gguf.endswith(".gguf"):
        raise ConfigError(f"{setting}: must be a folder, or a GGUF file")
    files = _list_files(source, setting)
    if "adapter_config.json" in files:
        base = _read(source.folder / "adapter_config.json", setting).get("base_model_name_or_path")
        if source.gguf:
            raise ConfigError(f"""{setting}: has an adapter_config.json beside it, by which
                transformers would load {base} instead; move the file to a folder of its own""")
        raise ConfigError(f"{setting}: is an adapter of peft, not a model; give its base, {base}")
    if source.gguf is None and "config.json" not in files and not matching(files, ["*.gguf"]):
        must = "must be a folder that save_pretrained of transformers has written"
        raise ConfigError(f"{setting}: {must}")
    for name in matching(files, ["config.json", "*_config.json"]):
        _check_config(_read(source.folder / name, setting), name, setting)
    if source.gguf is None:
        find_weights(source, setting)
        return
    with open_file(source.folder / source.gguf) as file:
        for name, kind, value in GGUF_COUNTS.findall(file.read(MOST_OF_METADATA)):
            size = 8 if int.from_bytes(kind, "little") in GGUF_LONG else 4
            _check_count(name.decode(), int.from_bytes(value[:size], "little"), setting)


def _list_files(source: ModelFiles, setting: str) -> list[str]:
    """Return the names of all files in a model's folder, sorted.

    Raises ConfigError for a pipe or a device, which could block or have no end, and for a link that
    leaves the folder, unless to the blobs of the hub's cache.
    """
    folder = source.folder.resolve()
    roots = [folder, *([folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else [])]
    names = []
    with os.scandir(folder) as entries:
        for entry in islice(entries, MOST_FILES + 1):
            mode = look_at(entry.path, f"{setting}: {entry.name}")
            if mode is None or stat.S_ISDIR(mode):
                continue
            if source.gguf and not entry.name.endswith(".json") and entry.name != source.gguf:
                continue  # of a folder of downloads
            if not stat.S_ISREG(mode):
                raise ConfigError(f"{setting}: {entry.name} is not a regular file; remove it")
            target = Path(entry.path).resolve()
            if not any(target.is_relative_to(root) for root in roots):
                raise ConfigError(f"""{setting}: {entry.name} is a link to {target}, which is not a
                    file of this folder; put a copy of it there""")
            names.append(entry.name)
    if len(names) > MOST_FILES:
        raise ConfigError(f"{setting}: has more than {MOST_FILES:,} files; must be of one model")
    return sorted(names)


def check_kind(source: ModelFiles, kind: str, setting: str) -> None:
    """Refuse an encoder-decoder where a decoder is wanted: half of it would be loaded, or none."""
    path = source.folder / "config.json"
    if kind != "AutoModelForCausalLM" or source.gguf or not path.is_file():
        return
    config = _read(path, setting)
    if config.get("is_encoder_decoder"):
        family = config.get("model_type")
        raise ConfigError(f"""{setting}: is an encoder-decoder (model_type={family}); must be a
            decoder-only model, such as a Llama or a Qwen, which {kind} loads whole""")


def _read(path: Path, setting: str) -> dict[str, Any]:
    try:
        content = json.loads(read_file(path.resolve(), MOST_OF_JSON))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{setting}: {path.name} is not readable ({one_line(error)}); take another"
        ) from None
    if path.name == "config.json" and not isinstance(content, dict):
        raise ConfigError(f"{setting}: {path.name} must be a JSON object, and is a list or a value")
    return content if isinstance(content, dict) else {}  # others have one of their own kind


def _check_config(content: dict[str, Any], name: str, setting: str) -> None:
    """Refuse a config that wants foreign code to be run, packed weights, or what cannot be."""
    for key, value in _entries(content):
        if key == "auto_map":
            raise ConfigError(f"""{setting}:
                {name} has auto_map: it wants code of the repository to be run, which never happens
                here; take a model whose code is in transformers, or remove auto_map from a copy of
                the folder if this one's is""")
        if key.endswith(("attn_implementation", "experts_implementation")) and "/" in str(value):
            raise ConfigError(f"""{setting}:
                {name} has {key}={value}: it wants a kernel of the hub to be run, which never
                happens here; remove {key} from a copy of the folder""")
        if key == "quantization_config":
            method = value.get("quant_method") if isinstance(value, dict) else value
            raise ConfigError(f"""{setting}: its weights are quantized ({method}), which cannot be
                trained here; give the model as it was before, or a GGUF file, which is unpacked""")
        if name == "config.json" and key in ("dtype", "torch_dtype") and not _is_dtype(value):
            raise ConfigError(f"""{setting}: {name} has {key}={value!r:.40}:
                must be a dtype of torch, such as bfloat16""")
        if name == "config.json" and isinstance(value, int) and NAMES_OF_REPEATED.search(key):
            _check_count(key, value, f"{setting}: {name}")


def _check_count(name: str, value: int, setting: str) -> None:
    if value > MOST_REPEATED:
        raise ConfigError(f"""{setting} has {name}={value:,}, at most {MOST_REPEATED:,} are read;
            must be the config that the weights were saved with""")


def _is_dtype(value: Any) -> bool:
    if not isinstance(value, str):
        return value is None or isinstance(value, dict)  # one for each part of a model
    plain = value.removeprefix("torch.")
    return plain == "auto" or isinstance(getattr(torch, plain, None), torch.dtype)


def _entries(content: Any) -> Iterator[tuple[str, Any]]:
    """Yield each name with its value, also of objects inside; an element has the list's name."""
    pending: list[tuple[str, Any]] = [("", content)]
    while pending:
        name, value = pending.pop()
        if isinstance(value, dict):
            inner = [(str(key), each) for key, each in value.items()]
        elif isinstance(value, list):
            inner = [(name, each) for each in value]
        else:
            continue
        yield from inner
        pending += inner


def find_weights(source: ModelFiles, setting: str) -> list[Path]:
    """Return the files of a folder's weights, in the order of their names.

    Raises ConfigError unless all are *.safetensors in the folder itself: an index, or a config, can
    name any file, a pickle too.
    """
    folder = source.folder
    if source.gguf:
        return [folder / source.gguf]
    files = _list_files(source, setting)
    config = _read(folder / "config.json", setting) if "config.json" in files else {}
    indexes = matching(files, ["*.safetensors.index.json"])
    parts = {name: _parts_of(folder / name, setting) for name in indexes}
    chosen = config.get("transformers_weights") or (
        WEIGHT_FILE if WEIGHT_FILE in files else PARTS_INDEX
    )
    if not isinstance(chosen, str) or (chosen not in files and chosen != PARTS_INDEX):
        raise ConfigError(f"{setting}: has no {chosen!r:.80}, which its config.json names; add it")
    if chosen in parts:
        return [folder / name for name in parts[chosen]]
    if chosen == PARTS_INDEX:
        if weights := matching(files, ["*.safetensors"]):
            raise ConfigError(
                f"{setting}: has {weights[0]}; one of {WEIGHT_FILE} and {PARTS_INDEX} must be there"
            )
        raise ConfigError(f"{setting}: {without_weights(files, source.name)}")
    if not chosen.endswith(".safetensors"):
        raise ConfigError(f"""{setting}: its config.json names {chosen} as the weights;
            must be *.safetensors, since a pickle can run any code""")
    return [folder / chosen]


def _parts_of(path: Path, setting: str) -> list[str]:
    """Return the files that an index of weights names, sorted. Raises ConfigError."""
    parts = _read(path, setting).get("weight_map")
    if not isinstance(parts, dict) or not parts:
        raise ConfigError(f"{setting}: {path.name} has no weight_map; write the folder again")
    names = sorted({str(name) for name in parts.values()})
    for name in names:
        if name != Path(name).name or not name.endswith(".safetensors"):
            raise ConfigError(f"""{setting}: {path.name} names {name:.200}: must be *.safetensors in
                the same folder; other files are not opened""")
        if not (path.parent / name).is_file():
            raise ConfigError(f"{setting}: has no {name}, which {path.name} names; add it")
    return names


@contextmanager
def limited_by_files(source: ModelFiles, setting: str) -> Iterator[None]:
    """Raise ConfigError if a model is built meanwhile that is far larger than its files: a config
    of 200 bytes can ask for any memory, and for any number of layers."""
    paths = find_weights(source, setting)
    tensors = sum(_count_tensors(path) for path in paths)
    # at most one element for a bit of GGUF, and for a byte of others
    elements = sum(path.stat().st_size for path in paths) * (8 if source.gguf else 1)
    left = [
        MORE_TENSORS * tensors + FREE_TENSORS,
        MORE_ELEMENTS * elements + FREE_ELEMENTS,
    ]

    def count(module: Any, name: str, tensor: Any) -> None:
        left[0] -= 1
        left[1] -= 0 if tensor is None else tensor.numel()
        if min(left) < 0:
            size = sum(path.stat().st_size for path in paths)
            raise ConfigError(f"""{setting}: asks for far more weights than its files have
                ({tensors:,} tensors in {size:,} bytes); must be the config that they were saved
                with""")

    handles = [
        register_module_parameter_registration_hook(count),
        register_module_buffer_registration_hook(count),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _count_tensors(path: Path) -> int:
    """Return how many tensors a file has; 0 for a damaged one, which its reader names."""
    with open(path, "rb") as file:
        if path.name.endswith(".gguf"):
            # each has a name, a shape and a place; the number itself may be anything
            most = path.stat().st_size // BYTES_OF_A_TENSOR
            return min(int.from_bytes(file.read(16)[8:], "little"), most)
        length = int.from_bytes(file.read(8), "little")
        with suppress(ValueError, TypeError, RecursionError):
            names = json.loads(file.read(length) if length <= MOST_OF_A_HEADER else b"")
            return len({*names} - {"__metadata__"})
    return 0


@contextmanager
def pickles_refused(setting: str) -> Iterator[None]:
    """Have torch.load raise ConfigError meanwhile, whatever a library would open by it."""
    load = torch.load

    def refuse(file: Any, *_: Any, **__: Any) -> Any:
        raise ConfigError(f"""{setting}: {file} is not opened, since a pickle can run any code;
            take another model""")

    torch.load = refuse  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.load = load


def check_loaded(
    model: Any,
    kind: str,
    report: Any,
    setting: str,
    say: Callable[[str], object] | None,
) -> tuple[str, ...]:
    """Return the modules whose weights the files lack.

    Raises ConfigError unless the model takes all weights of its layers from the files.
    """
    if surplus := _find_surplus(model, report["unexpected_keys"]):
        raise ConfigError(f"""{setting}: its files have {surplus[0]}{", ..." * (len(surplus) > 1)},
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
        raise ConfigError(f"""{setting}: {name} has shape {tuple(there)} in its files and
            {tuple(here)} by its config.json; must be the config that they were saved with""")
    if not may_be_new or 2 * len(new) > len(list(model.parameters())):
        raise ConfigError(f"""{setting}: has no {named} of {type(model).__name__};
            must be a model that {kind} loads whole""")
    if say:
        say(f"new weights, not in {setting.partition('=')[2]}: {named}")
    return tuple(dict.fromkeys(name.rpartition(".")[0] for name in new))


def _find_surplus(model: Any, names: Iterable[str]) -> list[str]:
    """Return those of weights that the model's layers take by another config: of more layers, or a
    bias. Layers that predict further tokens, which follow the others, are none of its own."""
    config = model.config.get_text_config()
    count = getattr(config, "num_hidden_layers", None) or 0
    further = range(count, count + (getattr(config, "num_nextn_predict_layers", None) or 0))
    layers = {_without_numbers(name): each for name, each in model.named_modules()}
    state = model.state_dict().keys()
    surplus = []
    for name in names:
        owner, _, last = name.rpartition(".")
        layer = layers.get(_without_numbers(owner))
        takes = layer is not None and last in layer._parameters
        if takes and name not in state and not {*map(int, re.findall(r"\d+", owner))} & {*further}:
            surplus.append(name)
    return sorted(surplus)


def _without_numbers(name: str) -> str:
    return re.sub(r"\d+", "0", name)
