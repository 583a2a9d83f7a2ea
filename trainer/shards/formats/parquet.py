"""Parquet files, read by row groups."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from trainer.base.errors import ConfigError
from trainer.shards.formats.shard_parts import FileBytes, Piece, join
from trainer.shards.sources import Span

SUFFIXES = (".parquet",)
MOST_GROUPS = 4  # decoded at once, of a file
MOST_OF_A_GROUP = 2**31  # bytes of a row group when it is unpacked
FREE_OF_A_GROUP = 2**28  # beyond, at most MOST_RATIO_OF_A_GROUP of its bytes in the file
MOST_RATIO_OF_A_GROUP = 1000
FREE_VALUES = 2**24  # of a column in a row group; beyond, at most 8 for each of its bytes
BYTES_AFTER_METADATA = 8  # bytes after the metadata of a file: their length, and PAR1


class ParquetShard:
    """The rows of a file, or of some of its row groups, as dicts.

    Numbers, texts and bytes are Python's, and lists lists.
    """

    def __init__(self, file: FileBytes, settings: Mapping[str, Any], rows: int, span: Span | None):
        self._columns = settings.get("columns")
        self._file = open_parquet(file.open(), self._columns)
        groups = [*_row_groups(self._file.metadata)]
        self._begin = 0
        if span is not None:
            own = [n for n, piece in enumerate(groups) if span.begin <= piece.begin < span.end]
            self._begin = own[0] if own else 0
            groups = [groups[n] for n in own]
        actual_rows = sum(piece.rows for piece in groups)
        if actual_rows != rows:
            raise ValueError(f"{file.path} has {actual_rows} rows, and {rows} in its index")
        self._ends = [*accumulate(piece.rows for piece in groups)]
        self._groups: dict[int, Any] = {}

    def __getitem__(self, row: int) -> dict[str, Any]:
        group = bisect_right(self._ends, row)
        begin = self._ends[group - 1] if group else 0
        (example,) = self._read(group).slice(row - begin, 1).to_pylist()
        return dict(example)

    def _read(self, group: int) -> Any:
        if group not in self._groups:
            if len(self._groups) == MOST_GROUPS:
                self._groups.pop(next(iter(self._groups)))
            group_in_file = self._begin + group
            self._groups[group] = self._file.read_row_group(group_in_file, self._columns)
        return self._groups[group]


def divide(path: Path, settings: Mapping[str, Any], most: int) -> list[tuple[int, Span | None]]:
    """Return rows and span of parts of at most `most` bytes, or one row group.

    The tail of each is the metadata of the file. A file is whole if groups lie in another order.
    """
    with open(path, "rb") as file:
        groups = [*_row_groups(open_parquet(file).metadata)]
    if any(one.end > other.begin for one, other in pairwise(groups)):
        return [(sum(each.rows for each in groups), None)]
    size = path.stat().st_size
    with open(path, "rb") as file:
        file.seek(size - BYTES_AFTER_METADATA)
        length = int.from_bytes(file.read(4), "little")
    return join(groups, most, (size - BYTES_AFTER_METADATA - length, size))


def open_parquet(file: Any, columns: Sequence[str] | None = None) -> Any:
    """Open a file, of which only `columns` are read. Raises ValueError for one that is small, and
    large when it is decoded.

    A value of a dictionary that many rows have stays one value: 30 kB could be 12 GB otherwise.
    """
    reader = import_pyarrow().parquet.ParquetFile
    opened = reader(file)
    metadata = opened.metadata
    shared = set()
    for position in range(metadata.num_row_groups):
        group = metadata.row_group(position)
        parts = [group.column(n) for n in range(group.num_columns)]
        used = [c for c in parts if columns is None or c.path_in_schema.split(".")[0] in columns]
        size = sum(part.total_uncompressed_size for part in used)
        packed = sum(part.total_compressed_size for part in used)
        most = min(MOST_OF_A_GROUP, max(FREE_OF_A_GROUP, MOST_RATIO_OF_A_GROUP * packed))
        if not 0 <= size <= most:
            raise ValueError(f"""its row group {position} has {size:,} bytes when it is unpacked, at
                most {most:,} are read; write smaller row groups""")
        for part in used:
            if part.num_values > max(FREE_VALUES, 8 * part.total_uncompressed_size):
                raise ValueError(f"""its column {part.path_in_schema} has {part.num_values:,} values
                    in {part.total_uncompressed_size:,} bytes; write smaller row groups""")
            if part.physical_type == "BYTE_ARRAY" and part.has_dictionary_page:
                shared.add(part.path_in_schema)
    return reader(file, read_dictionary=[*shared]) if shared else opened


def _row_groups(metadata: Any) -> Iterator[Piece]:
    for position in range(metadata.num_row_groups):
        group = metadata.row_group(position)
        columns = [group.column(n) for n in range(group.num_columns)]
        pages = (c.data_page_offset for c in columns)
        begins = [
            min(p, c.dictionary_page_offset or p) for p, c in zip(pages, columns, strict=True)
        ]
        sizes = (column.total_compressed_size for column in columns)
        ends = (begin + size for begin, size in zip(begins, sizes, strict=True))
        yield Piece(group.num_rows, min(begins), max(ends))


def import_pyarrow() -> Any:
    try:
        import pyarrow.parquet
    except ImportError:
        advice = 'pip install "lockstep-trainer[parquet]"'
        raise ConfigError(f"Parquet files need pyarrow; {advice}") from None
    return pyarrow
