"""Safe reading of untrusted files: only regular files, within limits, and without blocking.

The files of a run directory are input, and JSON. A small file must not take minutes or the memory:
not with nesting, long numbers or endless lines. What breaks a limit is an OSError or a ValueError
with a reason of one line. YAML is the user's own.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import stat
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import yaml

from trainer.base.errors import ConfigError

BYTES_READ_AT_ONCE = 2**22  # bytes read at once
MOST_DEPTH = 64  # of nested values
MOST_INTEGER_DIGITS = 20  # of an integer: 2**64 has as many
MOST_CONFIG_VALUES = 20_000  # of a user's YAML file: 1 s in OmegaConf
MOST_OF_YAML = 2**18  # bytes: 2 s
MOST_OF_TOML = 2**20
MOST_OF_JSON = 2**26
MOST_OF_A_METRICS_LINE = 2**20
MOST_OF_LINES = 2**29  # bytes of metrics.jsonl


def open_plain(name: str, flags: int) -> int:
    """Open a file, as the opener of `open`, without following a link or waiting for a pipe."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def open_regular(path: Path, most: int | None = None) -> BinaryIO:
    """Open a regular file to read its bytes. Raises OSError for others, and for more than `most`
    bytes."""
    file = open(path, "rb", opener=open_plain)  # noqa: SIM115
    status = os.fstat(file.fileno())
    why = ""
    if not stat.S_ISREG(status.st_mode):
        why = "is not a regular file"
    elif most is not None and status.st_size > most:
        why = f"has {status.st_size:,} bytes, at most {most:,} are read"
    if why:
        file.close()
        raise OSError(errno.EINVAL, why, str(path))
    return file


def read_file(path: Path, most: int) -> bytes:
    """Return the bytes of a regular file of at most `most` bytes. Raises OSError otherwise."""
    with open_regular(path, most) as file:
        return file.read(most)


def read_of_user(path: Path, most: int) -> bytes:
    """Return what `read_file` does of a user's own file, which may be a link."""
    return read_file(Path(os.path.realpath(path)), most)  # resolve() raises other errors for a loop


def hash_rest(
    file: BinaryIO, most: int | None = None, digest: hashlib._Hash | None = None
) -> hashlib._Hash:
    """Return the SHA-256 of a file from its position on, at most of `most` bytes.

    It is read block by block. `digest`: that of what comes before.
    """
    digest = digest or hashlib.sha256()
    rest = float("inf") if most is None else most
    while block := file.read(int(min(BYTES_READ_AT_ONCE, rest))):
        digest.update(block)
        rest -= len(block)
    return digest


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a regular file, without their ends; skip those that are too long.

    Raises OSError for a file that is too large.
    """
    with open_regular(path, MOST_OF_LINES) as file:
        is_inside = False  # of a line that is too long
        while line := file.readline(MOST_OF_A_METRICS_LINE):
            is_whole = line.endswith(b"\n")
            if not is_inside and (is_whole or len(line) < MOST_OF_A_METRICS_LINE):
                yield line.decode(errors="replace").rstrip("\r\n")
            is_inside = not is_whole


def read_json(path: Path, most: int = MOST_OF_JSON) -> Any:
    """Return the value of a JSON file. Raises OSError, and ValueError as `parse_json` does."""
    return parse_json(read_file(path, most))


def parse_json(data: bytes | str) -> Any:
    """Parse JSON. Raises ValueError for what a run does not write.

    That is a name given twice, deep nesting, a long number, or text that cannot be encoded.
    """
    text = data if isinstance(data, str) else data.decode()
    try:
        # a hook for each integer takes longer, and digests may have as many digits in a row
        parse = _parse_int if re.search(rf"\d{{{MOST_INTEGER_DIGITS + 1}}}", text) else None
        value = json.loads(text, object_pairs_hook=_refuse_repeated, parse_int=parse)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    pending = [[value]]
    for _ in range(MOST_DEPTH):
        below = [part for parts in pending for part in parts if isinstance(part, (dict, list))]
        pending = [[*part.values()] if isinstance(part, dict) else part for part in below]
        if not pending:
            break
    else:
        raise ValueError(_TOO_DEEP)
    if r"\u" in text:
        json.dumps(value, ensure_ascii=False).encode()  # half of a surrogate pair is no character
    return value


def digest_json(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of values as JSON, in any order of their names."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def strict(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace numbers that JSON does not have by None, in nested mappings too."""
    plain = {k: strict(v) if isinstance(v, Mapping) else v for k, v in values.items()}
    for key, value in plain.items():
        if isinstance(value, float) and not math.isfinite(value):
            plain[key] = None
    return plain


def parse_safetensors(data: bytes) -> tuple[dict[str, str], dict[str, Any]]:
    """Return (metadata, tensors) of the bytes of a safetensors file; its library reads no metadata
    of bytes. Raises an exception of any kind for others."""
    from safetensors.torch import load

    length = int.from_bytes(data[:8], "little")
    return parse_json(data[8 : 8 + length])["__metadata__"], load(data)


_TOO_DEEP = f"values are nested more than {MOST_DEPTH} deep"


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name is given twice")
    return values


def _parse_int(text: str) -> int:
    if len(text) > MOST_INTEGER_DIGITS:
        raise ValueError(f"a number has {len(text):,} digits")
    return int(text)


class _Loader(yaml.SafeLoader):
    """A loader that refuses a name given twice, and reads 1e-3 as a number, as OmegaConf does."""

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise yaml.YAMLError(f"the name {twice} is given twice")
        return super().construct_mapping(node, deep)


_POWER = re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$")
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _POWER, list("-+0123456789"))


def read_yaml(path: Path) -> Any:
    """Return the values of a user's YAML file. Raises OSError, and ValueError as `parse_yaml`."""
    return parse_yaml(read_file(path, MOST_OF_YAML))


def parse_yaml(data: bytes | str) -> Any:
    """Parse a user's YAML. Raises ValueError for what is no YAML, and for too many values."""
    try:
        loader = _Loader(data)
        node = _compose(loader)
        return None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _compose(loader: yaml.SafeLoader) -> yaml.Node | None:
    """Return the nodes of a file. Raises YAMLError for more values than can be built, with those
    that aliases repeat: merges and OmegaConf copy them."""
    try:
        node = loader.get_single_node()
        if _count(node, {}) > MOST_CONFIG_VALUES:
            raise yaml.YAMLError(f"it has more than {MOST_CONFIG_VALUES:,} values")
    except RecursionError:
        raise yaml.YAMLError("values are nested too deep") from None
    return node


def _count(node: Any, counts: dict[int, float]) -> float:
    """Return the number of values of a node; infinity for one that is part of itself."""
    if id(node) not in counts:
        counts[id(node)] = math.inf
        parts = node.value if isinstance(node, yaml.CollectionNode) else ()
        below = [each for part in parts for each in (part if isinstance(part, tuple) else (part,))]
        counts[id(node)] = 1 + sum(_count(each, counts) for each in below)
    return counts[id(node)]


def check_yaml(path: Path) -> None:
    """Raise ConfigError if Hydra could not compose a user's YAML file, or not soon.

    That is for its size and aliases, for what is not UTF-8, and for a byte order mark, behind which
    Hydra finds no `# @package`.
    """
    try:
        data = read_of_user(path, MOST_OF_YAML)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; read long values in the task") from None
    if data.startswith(BOM_UTF8):
        raise ConfigError(f"{path}: begins with a byte order mark; save it as UTF-8 without one")
    try:
        text = data.decode()
        if "&" in text and "*" in text:
            _compose(yaml.SafeLoader(text))
    except UnicodeDecodeError as error:
        why = f"byte {data[error.start]:#04x} at position {error.start:,} is not UTF-8"
        raise ConfigError(f"{path}: {why}; save it as UTF-8") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
