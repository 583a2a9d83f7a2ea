"""Parquet files, read by row groups."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

from trainer.errors import ConfigError

SUFFIXES = (".parquet",)
MOST_GROUPS = 4  # decoded at once, of a file


class ParquetShard:
    """The rows of one file as dicts; numbers, texts and bytes are Python's, and lists lists."""

    def __init__(self, path: Path, settings: Mapping[str, Any], rows: int):
        self._file = _parquet().ParquetFile(path, memory_map=True)
        meta = self._file.metadata
        if meta.num_rows != rows:
            raise ValueError(f"{path} has {meta.num_rows} rows, and {rows} in its index")
        self._ends = [*accumulate(meta.row_group(g).num_rows for g in range(meta.num_row_groups))]
        self._columns = settings.get("columns")
        self._groups: dict[int, Any] = {}

    def __getitem__(self, row: int) -> dict[str, Any]:
        group = bisect_right(self._ends, row)
        begin = self._ends[group - 1] if group else 0
        (found,) = self._read(group).slice(row - begin, 1).to_pylist()
        return dict(found)

    def _read(self, group: int) -> Any:
        if group not in self._groups:
            if len(self._groups) == MOST_GROUPS:
                self._groups.pop(next(iter(self._groups)))
            self._groups[group] = self._file.read_row_group(group, self._columns)
        return self._groups[group]


def count_rows(path: Path, settings: Mapping[str, Any]) -> int:
    return int(_parquet().read_metadata(path).num_rows)


def _parquet() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        advice = 'pip install "lockstep-trainer[parquet]"'
        raise ConfigError(f"Parquet files need pyarrow; {advice}") from None
    return pyarrow.parquet
