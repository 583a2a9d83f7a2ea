"""Files of tensors: safetensors with a row for each example, and flat tokens."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from trainer.base.codec import DTYPES
from trainer.base.errors import ConfigError
from trainer.base.plain_files import parse_json
from trainer.shards.formats.shard_parts import FileBytes, Piece, join
from trainer.shards.sources import Span

TOKEN_TYPES = ("uint8", "uint16", "uint32", "int32", "int64")
MOST_TOKENS = 2**31  # of a sequence
MOST_OF_A_SAFETENSORS_HEADER = 100_000_000  # bytes, as in safetensors


class SafetensorsShard:
    """Rows of a safetensors file: a dict of its tensors, or a tuple if they are named 0, 1, ..."""

    def __init__(self, file: FileBytes, settings: Mapping[str, Any], rows: int, span: Span | None):
        self._data = file
        tensors = _read_header(file)
        if any(shape[:1] != [rows] for _, _, shape in tensors.values()):
            raise ValueError(f"{file.path} has tensors with other than {rows} rows")
        self._tensors = {
            name: _Rows(begin, math.prod(shape[1:]) * dtype.itemsize, dtype, torch.Size(shape[1:]))
            for name, (begin, dtype, shape) in sorted(tensors.items())
        }
        names_of_a_tuple = sorted(str(column) for column in range(len(self._tensors)))
        self._is_tuple = list(self._tensors) == names_of_a_tuple

    def __getitem__(self, row: int) -> Any:
        values = {name: self._read(tensor, row) for name, tensor in self._tensors.items()}
        return tuple(values[str(n)] for n in range(len(values))) if self._is_tuple else values

    def _read(self, rows: _Rows, row: int) -> torch.Tensor:
        if not rows.size:
            return torch.empty(rows.shape, dtype=rows.dtype)
        data = bytearray(self._data.read(rows.begin + row * rows.size, rows.size))
        return torch.frombuffer(data, dtype=torch.uint8).view(rows.dtype).view(rows.shape)


def _read_header(file: FileBytes) -> dict[str, tuple[int, torch.dtype, list[int]]]:
    """Return (first byte, dtype, shape) of each tensor. Raises an exception of any kind if they
    are not as they must be."""
    length = int.from_bytes(file.read(0, 8), "little")
    if length > MOST_OF_A_SAFETENSORS_HEADER:
        raise ValueError(f"its header has {length:,} bytes")
    header = parse_json(file.read(8, length))
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        shape = entry["shape"]
        is_right = begin >= 0 and end - begin == math.prod(shape) * dtype.itemsize
        if not is_right or min(shape, default=0) < 0 or 8 + length + end > len(file):
            raise ValueError(f"its tensor {name} does not fill its bytes")
        tensors[name] = (8 + length + begin, dtype, shape)
    return tensors


class _Rows(NamedTuple):
    """The rows of a tensor in a file: where they begin, the bytes and the form of one."""

    begin: int
    size: int
    dtype: torch.dtype
    shape: torch.Size


def find_rows(path: Path, settings: Mapping[str, Any], most: int) -> list[tuple[int, Span | None]]:
    """Return the rows of the tensors; the file is whole. Raises ValueError if they differ."""
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    rows = {shape[0] if shape else -1 for shape in shapes.values()}
    if len(rows) != 1 or -1 in rows:
        raise ValueError(f"{path}: its tensors must have as many rows, and have {shapes}")
    return [(int(rows.pop()), None)]


class TokenShard:
    """Flat tokens, in sequences of `tokens`: (inputs, targets), int64, the targets one further.

    A file of n tokens has (n - 1) // tokens sequences. `header` bytes at its start are left out.
    """

    def __init__(self, file: FileBytes, settings: Mapping[str, Any], rows: int, span: Span | None):
        self._length = settings["tokens"]
        self._data = file
        self._dtype = np.dtype(settings["dtype"])
        self._begin = settings["header"] if span is None else span.begin
        if len(self._data) < self._begin + (rows * self._length + 1) * self._dtype.itemsize:
            raise ValueError(f"{file.path} has fewer than the {rows} sequences of its index")

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = self._dtype.itemsize
        begin = self._begin + row * self._length * size
        data = self._data.read(begin, (self._length + 1) * size)
        taken = torch.from_numpy(np.frombuffer(data, self._dtype).astype(np.int64))
        return taken[:-1], taken[1:]


def check_tokens(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings of flat tokens that cannot be, such as a dtype of pointers."""
    kind, length, header = (settings.get(name) for name in ("dtype", "tokens", "header"))
    is_known = kind in TOKEN_TYPES and isinstance(length, int) and 1 <= length < MOST_TOKENS
    if not is_known or not isinstance(header, int) or header < 0:
        raise ConfigError(f"""flat tokens: tokens={length} dtype={kind} header={header}: must be
            integers above 0, and one of {", ".join(TOKEN_TYPES)}; give tokens=1024 dtype=uint16""")


def divide(path: Path, settings: Mapping[str, Any], most: int) -> list[tuple[int, Span | None]]:
    """Return sequences and span of parts of at most `most` bytes, or one sequence.

    Raises ConfigError if `settings` do not say their length.
    """
    check_tokens(settings)
    size, length, header = (
        np.dtype(settings["dtype"]).itemsize,
        settings["tokens"],
        settings["header"],
    )
    total = max(0, ((path.stat().st_size - header) // size - 1) // length)
    count = max(1, (most // size - 1) // length)
    pieces = []
    for first in range(0, total, count):
        rows = min(count, total - first)
        begin = header + first * length * size
        pieces.append(Piece(rows, begin, begin + (rows * length + 1) * size))
    return join(pieces, most)
