"""Reading files that may come from somebody else: plain ones only, within limits, without waiting.

The files of a run directory are input. A small file must not take minutes or the memory: not with
aliases, nesting, long numbers or endless lines. What breaks a limit is an OSError or a ValueError
with a reason of one line.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import stat
from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, ClassVar

import yaml

from trainer.errors import ConfigError

BLOCK = 2**22  # bytes read at once
MOST_DEPTH = 64  # of nested values
MOST_DIGITS = 20  # of an integer: 2**64 has as many
MOST_VALUES = 20_000  # of a YAML file, with those that its aliases repeat: 1 s in OmegaConf
MOST_OF_YAML = 2**18  # bytes: 2 s
MOST_OF_JSON = 2**26
MOST_OF_A_LINE = 2**20
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


def hash_rest(
    file: BinaryIO, most: int | None = None, digest: hashlib._Hash | None = None
) -> hashlib._Hash:
    """Return the SHA-256 of a file from its position on, at most of `most` bytes.

    It is read block by block. `digest`: that of what comes before.
    """
    digest = digest or hashlib.sha256()
    rest = float("inf") if most is None else most
    while block := file.read(int(min(BLOCK, rest))):
        digest.update(block)
        rest -= len(block)
    return digest


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a regular file, without their ends; skip those that are too long.

    Raises OSError for a file that is too large.
    """
    with open_regular(path, MOST_OF_LINES) as file:
        is_inside = False  # of a line that is too long
        while line := file.readline(MOST_OF_A_LINE):
            is_whole = line.endswith(b"\n")
            if not is_inside and (is_whole or len(line) < MOST_OF_A_LINE):
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
        parse = _parse_int if re.search(rf"\d{{{MOST_DIGITS + 1}}}", text) else None
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


_TOO_DEEP = f"values are nested more than {MOST_DEPTH} deep"


def _refuse_repeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        raise ValueError("a name is given twice")
    return values


def _parse_int(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise ValueError(f"a number has {len(text):,} digits")
    return int(text)


_TAG = "tag:yaml.org,2002:"
_FLOAT = r"""^(?:[-+]?[0-9]+(?:_[0-9]+)*\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?:[eE][-+]?[0-9]+)
    |\.[0-9]+(?:_[0-9]+)*(?:[eE][-+][0-9]+)?
    |[-+]?[0-9]+(?:_[0-9]+)*(?::[0-5]?[0-9])+\.[0-9_]*
    |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"""  # as OmegaConf's


class Loader(yaml.SafeLoader):
    """A loader of plain values within limits; numbers and dates are read as OmegaConf reads them.

    It raises yaml.YAMLError. PyYAML composes while it scans, so that a limit ends the scan too.
    """

    most_values = MOST_VALUES

    def __init__(self, stream: Any):
        super().__init__(stream)
        self._depth = 0
        self._num_values = 0
        self._sizes: dict[str, int] = {}  # values below an anchor

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Count the node, an alias as all values that it repeats."""
        event: Any = self.peek_event()
        before = self._num_values
        self._depth += 1
        self._num_values += 1
        anchor = event.anchor
        if isinstance(event, yaml.AliasEvent) and anchor in self.anchors:
            if anchor not in self._sizes:
                raise yaml.YAMLError(f"the alias *{anchor} is part of itself")
            self._num_values += self._sizes[anchor]
        if self._depth > MOST_DEPTH:
            raise yaml.YAMLError(_TOO_DEEP)
        if self._num_values > self.most_values:
            raise yaml.YAMLError(f"it has more than {self.most_values:,} values")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if anchor is not None:
            self._sizes[anchor] = self._num_values - before
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        """Build a dict. Refuse a name that is given twice."""
        names = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise yaml.YAMLError(f"the name {twice} is given twice")
        return super().construct_mapping(node, deep)

    def construct_yaml_int(self, node: Any) -> int:
        """Build an integer of a few digits."""
        if len(node.value) <= 4 * MOST_DIGITS:  # in base 2, or with underscores
            value = super().construct_yaml_int(node)
            if abs(value) < 10**MOST_DIGITS:
                return int(value)
        raise yaml.YAMLError(f"a number has {len(node.value):,} digits")

    yaml_implicit_resolvers: ClassVar = {
        first: [(tag, form) for tag, form in known if not tag.endswith((":timestamp", ":float"))]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors: ClassVar[dict[Any, Any]] = {
        None: yaml.SafeLoader.construct_undefined,
        **{
            f"{_TAG}{kind}": yaml.SafeLoader.yaml_constructors[f"{_TAG}{kind}"]
            for kind in ("null", "bool", "float", "str", "seq", "map")
        },
        f"{_TAG}int": construct_yaml_int,
    }


_FIRST = list("-+0123456789.")
Loader.add_implicit_resolver(f"{_TAG}float", re.compile(_FLOAT, re.VERBOSE), _FIRST)


def read_yaml(path: Path, most: int = MOST_OF_YAML) -> Any:
    """Return the values of a YAML file. Raises OSError, and ValueError as `parse_yaml` does."""
    return parse_yaml(read_file(path, most))


def parse_yaml(data: bytes | str) -> Any:
    """Parse YAML. Raises ValueError for what is no YAML, and beyond the limits."""
    text = data if isinstance(data, str) else data.decode()
    try:
        return Loader(text).get_single_data()
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


_CDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)  # PyYAML may lack libyaml


class _Dumper(_CDumper):
    """A dumper that quotes each text that this module's loader, or PyYAML's, reads as something
    else."""

    yaml_implicit_resolvers: ClassVar = {
        first: [
            *yaml.SafeLoader.yaml_implicit_resolvers.get(first, ()),
            *Loader.yaml_implicit_resolvers.get(first, ()),
        ]
        for first in {*yaml.SafeLoader.yaml_implicit_resolvers, *Loader.yaml_implicit_resolvers}
    }

    def ignore_aliases(self, data: Any) -> bool:
        """Write a value out wherever it is."""
        return True


def format_yaml(values: Any) -> str:
    """Return plain values as YAML, in their order."""
    options: dict[str, Any] = {"sort_keys": False, "allow_unicode": True}
    return str(yaml.dump(values, Dumper=_Dumper, default_flow_style=False, **options))


def check_yaml(path: Path) -> None:
    """Raise ConfigError if the aliases of a user's YAML file repeat more than can be composed.

    Also for what is not UTF-8, and for a byte order mark, behind which Hydra finds no `# @package`.
    """
    data = path.read_bytes()
    if data.startswith(BOM_UTF8):
        raise ConfigError(f"{path}: begins with a byte order mark; save it as UTF-8 without one")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        why = f"byte {data[error.start]:#04x} at position {error.start:,} is not UTF-8"
        raise ConfigError(f"{path}: {why}; save it as UTF-8") from None
    if b"&" in data and b"*" in data:
        try:
            Loader(data).get_single_node()
        except yaml.YAMLError as error:
            raise ConfigError(f"{path}: {' '.join(str(error).split())}") from None
