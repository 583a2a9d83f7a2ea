"""The formats of shards, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.data.shards.formats import mds, parquet, tar, tensors


class OpenShard(Protocol):
    """An open file of examples."""

    def __getitem__(self, row: int) -> Any: ...


@dataclass(frozen=True)
class Format:
    """`open(path, settings, rows)` returns the examples of a file; `count_rows(path, settings)`
    their number; `check(settings)` raises ConfigError for what is not read."""

    suffixes: tuple[str, ...]
    open: Callable[[Path, Mapping[str, Any], int], OpenShard]
    count_rows: Callable[[Path, Mapping[str, Any]], int]
    check: Callable[[Mapping[str, Any]], None] = lambda settings: None


FORMATS = {
    "mds": Format(mds.SUFFIXES, mds.MdsShard, mds.count_rows, mds.check_columns),
    "tar": Format(tar.SUFFIXES, tar.TarShard, tar.count_rows),
    "parquet": Format(parquet.SUFFIXES, parquet.ParquetShard, parquet.count_rows),
    "safetensors": Format((".safetensors",), tensors.SafetensorsShard, tensors.count_safetensors),
    "bin": Format((".bin",), tensors.TokenShard, tensors.count_sequences),
}
