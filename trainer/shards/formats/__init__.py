"""The formats of shards, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from trainer.base.errors import ConfigError, describe
from trainer.shards.formats import arrays, mds, parquet, tar
from trainer.shards.formats.shard_parts import FileBytes
from trainer.shards.sources import Span


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


def find_format(name: str, settings: Mapping[str, Any], url: str) -> Format:
    """Return the format of an index. Raises ConfigError for one that is not read."""
    try:
        FORMATS[name].check(settings)
        return FORMATS[name]
    except ConfigError:
        raise
    except Exception as error:  # the one who wrote the index may mean harm
        raise ConfigError(f"""{url}: has shards of form {name!r} that are not read:
            {describe(error)}; write its index again""") from None


FORMATS = {
    "mds": Format(mds.SUFFIXES, mds.MdsShard, None, mds.check_columns),  # its index has the rows
    "tar": Format(tar.SUFFIXES, tar.TarShard, tar.divide),
    "parquet": Format(parquet.SUFFIXES, parquet.ParquetShard, parquet.divide),
    "safetensors": Format((".safetensors",), arrays.SafetensorsShard, arrays.find_rows),
    "bin": Format(
        (".bin",),
        arrays.TokenShard,
        arrays.divide,
        arrays.check_tokens,
    ),
}
