"""Rows of chats from Parquet files: only the columns that chats have are converted."""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer import ConfigError
from trainer.errors import one_line
from trainer.tasks.chat.flaws import Flaw
from trainer.tasks.chat.forms import COLUMNS

BATCH = 256  # rows that are Python's at the same time


def read_parquet(path: Path) -> Iterator[tuple[str, dict[str, Any] | Flaw]]:
    """Yield the place and the values of each row. Raises OSError for a damaged file."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        advice = 'pip install "lockstep-trainer[parquet]"'
        raise ConfigError(f"Parquet files need pyarrow; {advice}") from None
    try:
        with parquet.ParquetFile(path) as file:
            counts = Counter(file.schema_arrow.names)
            used = [name for name in COLUMNS if counts[name]]
            if twice := [name for name in used if counts[name] > 1]:
                raise OSError(f"it has {counts[twice[0]]} columns named {twice[0]}")
            others = dict.fromkeys(counts - Counter(used), "not read")  # an error names them
            number = 0
            for batch in file.iter_batches(BATCH, columns=used):
                for row in range(len(batch)):
                    number += 1
                    yield f"{path} row {number}", _take(batch, row, others)
    except pyarrow.ArrowException as error:
        raise OSError(one_line(error)) from None


def without_nulls(value: Any) -> Any:
    """Return a value without the fields that Parquet gives a struct since other rows have them."""
    if isinstance(value, dict):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _take(batch: Any, row: int, others: dict[str, str]) -> dict[str, Any] | Flaw:
    found = {}
    for name in batch.schema.names:
        try:
            found[name] = without_nulls(batch.column(name)[row].as_py())
        except UnicodeDecodeError:
            return Flaw("not in UTF-8", "convert the file to UTF-8")
        except (ValueError, OverflowError) as error:  # of Arrow too
            problem = f"whose column {name} cannot be converted ({one_line(error)})"
            return Flaw(problem, "must be strings, lists and structs; write the column again")
    return others | found
