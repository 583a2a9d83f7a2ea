"""Rows of chats from Parquet files: only the columns that chats have are converted."""

from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from trainer.base.errors import one_line
from trainer.hf.chat.flaws import Flaw, too_long
from trainer.hf.chat.forms import COLUMNS_OF_CHATS
from trainer.shards.formats.parquet import import_pyarrow, open_parquet
from trainer.shards.sources import open_file

BATCH = 256  # rows that are decoded at the same time


def read_parquet(path: Path, most: int) -> Iterator[tuple[str, int, dict[str, Any] | Flaw]]:
    """Yield place, bytes and values of each row, of at most `most` bytes.

    Raises OSError for a damaged file.
    """
    with open_file(path) as stream:
        yield from _read(stream, path, most)


def _read(stream: Any, path: Path, most: int) -> Iterator[tuple[str, int, dict[str, Any] | Flaw]]:
    pyarrow = import_pyarrow()
    try:
        file = open_parquet(stream, COLUMNS_OF_CHATS)
        counts = Counter(file.schema_arrow.names)
        used = [name for name in COLUMNS_OF_CHATS if counts[name]]
        if twice := [name for name in used if counts[name] > 1]:
            raise OSError(f"it has {counts[twice[0]]} columns named {twice[0]}")
        others = dict.fromkeys(counts - Counter(used), "not read")  # an error names them
        row_number = 0
        # a batch of two row groups could have two dictionaries, which pyarrow cannot join
        groups = range(file.metadata.num_row_groups)
        batches = (file.iter_batches(BATCH, row_groups=[each], columns=used) for each in groups)
        for batch in chain.from_iterable(batches):
            sizes = sum(map(sizes_of, batch.columns), np.zeros(len(batch), np.int64))
            for row, size in enumerate(sizes.tolist()):
                row_number += 1
                values = too_long(most) if size > most else _take(batch, row, others)
                yield f"{path} row {row_number}", size, values
    except (pyarrow.ArrowException, ValueError) as error:
        raise OSError(one_line(error)) from None


def sizes_of(values: Any) -> np.ndarray:
    """Return how many bytes of text and elements of lists each value of an Arrow array has.

    It is counted before a value becomes Python's: one that many rows share, or a list of nulls,
    takes nearly no room until then. Raises ValueError for a type that chats do not have.
    """
    import pyarrow
    import pyarrow.compute as compute
    from pyarrow import types

    kind = values.type
    if types.is_dictionary(kind):
        sizes = sizes_of(values.dictionary)
        return np.append(sizes, 0)[np.asarray(values.indices.fill_null(len(sizes)))]
    if types.is_struct(kind):
        return sum(map(sizes_of, values.flatten()), np.zeros(len(values), np.int64))
    if types.is_map(kind):
        pair = pyarrow.struct([("key", kind.key_type), ("value", kind.item_type)])
        return sizes_of(values.cast(pyarrow.list_(pair)))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        totals = np.cumsum(1 + sizes_of(compute.list_flatten(values)))
        ends = np.cumsum(np.asarray(compute.list_value_length(values).fill_null(0), np.int64))
        return np.diff(np.append(0, totals)[ends], prepend=0)
    if kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.binary(), pyarrow.large_binary()):
        return np.asarray(compute.binary_length(values).fill_null(0), np.int64)
    if kind.num_fields or not (types.is_primitive(kind) or types.is_null(kind)):
        raise ValueError(f"it has values of the type {kind}, which is not read")
    return np.full(len(values), 8, np.int64)


def without_nulls(value: Any) -> Any:
    """Return a value without the fields that Parquet gives a struct since other rows have them."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _take(batch: Any, row: int, others: dict[str, str]) -> dict[str, Any] | Flaw:
    columns = {}
    for name in batch.schema.names:
        try:
            columns[name] = without_nulls(batch.column(name)[row].as_py())
        except UnicodeDecodeError:
            return Flaw("not in UTF-8", "convert the file to UTF-8")
        except (ValueError, OverflowError) as error:  # of Arrow too
            problem = f"whose column {name} cannot be converted ({one_line(error)})"
            return Flaw(problem, "must be strings, lists and structs; write the column again")
    return others | columns
