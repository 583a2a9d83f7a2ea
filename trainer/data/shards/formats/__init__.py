"""The formats of shards, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.data.shards.formats import mds, parquet, tar, tensors
from trainer.data.shards.formats.parts import FileBytes
from trainer.data.shards.sources import Span
from trainer.errors import ConfigError, describe


class OpenShard(Protocol):
    """An open file of examples."""

    def __getitem__(self, row: int) -> Any: ...


@dataclass(frozen=True)
class Format:
    """`open(file, settings, rows, span)` returns the examples of a file, or of its part `span`;
    `divide(path, settings, most)` rows and span of each part of some `most` bytes, with None for
    the whole file; `check(settings)` raises ConfigError for what is not read."""

    suffixes: tuple[str, ...]
    open: Callable[[FileBytes, Mapping[str, Any], int, Span | None], OpenShard]
    divide: Callable[[Path, Mapping[str, Any], int], list[tuple[int, Span | None]]] | None
    check: Callable[[Mapping[str, Any]], None] = lambda settings: None


def find_format(name: str, settings: Mapping[str, Any], place: str) -> Format:
    """Return the format of an index. Raises ConfigError for one that is not read."""
    try:
        FORMATS[name].check(settings)
        return FORMATS[name]
    except ConfigError:
        raise
    except Exception as error:  # the one who wrote the index may mean harm
        why = f"has shards of form {name!r} that are not read: {describe(error)}"
        raise ConfigError(f"{place}: {why}; write its index again") from None


FORMATS = {
    "mds": Format(mds.SUFFIXES, mds.MdsShard, None, mds.check_columns),  # its index has the rows
    "tar": Format(tar.SUFFIXES, tar.TarShard, tar.divide),
    "parquet": Format(parquet.SUFFIXES, parquet.ParquetShard, parquet.divide),
    "safetensors": Format((".safetensors",), tensors.SafetensorsShard, tensors.find_rows),
    "bin": Format((".bin",), tensors.TokenShard, tensors.divide, tensors.check_tokens),
}
