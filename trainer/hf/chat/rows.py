"""Rows of chats in TRL's forms, from JSONL, Parquet, shards or Python's standard library."""

import glob
import gzip
import json
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import ConfigError, ShardedDataset
from trainer.base.errors import did_you_mean, one_line, visible
from trainer.hf.chat.flaws import Flaw, too_long
from trainer.hf.chat.function_chats import describe_functions
from trainer.hf.chat.parquet_rows import read_parquet, without_nulls
from trainer.hf.file_digests import digest_files
from trainer.hf.hub import siblings
from trainer.hf.library import read_library
from trainer.hf.repository import look_at
from trainer.shards.long_work import Tell, run_apart
from trainer.shards.sources import open_file

MOST_BYTES_OF_A_ROW = 2**21  # while tokens are made, up to 250 bytes are needed for a character
FREE_UNPACKED_BYTES = 2**30  # that a file may have; beyond, MOST_UNPACKED_RATIO of its size
MOST_UNPACKED_RATIO = 200
BYTES_OF_A_ROW = 64  # beside its content
MOST_FOUND = 100_000  # names that a folder or a glob has
DATA_SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
INDEXES = ("lockstep.index", "index.json")  # of a folder of shards
UNREADABLE = (OSError, EOFError, zlib.error)


Found = Iterator[tuple[str, "dict[str, Any] | Flaw"]]  # the place of each row, and its values


@dataclass(frozen=True)
class RowSource:
    """Where rows come from: words for the start of a run, a digest of the content, the rows."""

    name: str
    digest: str
    read: Callable[[], Found]
    empty: int = 0  # files without a byte


def open_source(data: str | None, setting: str, files: int, is_verified: bool) -> RowSource:
    """Find the rows of `data`. Raises ConfigError, which begins with `setting`.

    `is_verified`: files are read for their digest, even if the cache has it for their times.

    None: functions of the first `files` files of Python's standard library. A folder of shards or
    an address is read by ShardedDataset; else a file, a folder of files or a glob of them.
    """
    if data is None:
        texts, digest = read_library(files)
        name = f"functions in {len(texts)} files of Python's standard library"
        return RowSource(name, digest, lambda: iter(describe_functions(texts)))
    path = Path(data)
    if "://" in data or any(look_at(path / name, setting) is not None for name in INDEXES):
        shards = ShardedDataset(data)
        return RowSource(shards.source, shards.digest, lambda: _read_shards(shards, data))
    paths = _find_files(data, setting)
    name = data if len(paths) == 1 else f"{len(paths):,} files of {data}"
    try:
        digest = digest_files(paths, is_verified)
    except OSError as error:
        raise _unreadable(setting, Path(error.filename or paths[0]), error) from None
    empty = sum(not each.stat().st_size for each in paths)
    return RowSource(name, digest, lambda: _read_files(paths, setting), empty)


def _find_files(data: str, setting: str) -> list[Path]:
    must = f"must be a file, folder or glob of {', '.join(DATA_SUFFIXES)}"
    path = Path(data)
    mode = look_at(path, setting)
    if not data.strip():
        raise ConfigError(
            f"{setting}: must be a file, a folder or a glob; null is the default data"
        )
    if mode is not None and not stat.S_ISDIR(mode):
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{setting}: is a pipe or a device; {must}")
        if not data.endswith(DATA_SUFFIXES):
            raise ConfigError(
                f"{setting}: must end with {', '.join(DATA_SUFFIXES)}; rename or convert it"
            )
        return [path]

    def find(tell: Tell) -> list[str]:
        if mode is not None:
            return _list_fitting(map(str, path.rglob("*")), setting, tell)
        return _list_fitting(glob.iglob(data, recursive=True), setting, tell)  # noqa: PTH207

    advice = "give a narrower glob"
    names = run_apart(find, "looking for its files", "names", setting, advice)
    if not names:
        near = did_you_mean(path.name, siblings(data))
        problem = "has no such files" if mode is not None else f"does not exist{near}"
        raise ConfigError(f"{setting}: {problem}; {must}, or a folder of shards")
    return sorted(map(Path, names), key=Path.as_posix)


def _list_fitting(walk: Iterable[str], setting: str, tell: Tell) -> list[str]:
    """Return the names that end as data do. Raises ConfigError for a pipe, and for too many."""
    names = []
    for count, name in enumerate(walk):
        tell(name)
        if count == MOST_FOUND:
            raise ConfigError(f"""{setting}: has more than {MOST_FOUND:,} names; give a folder or a
                glob of fewer""")
        mode = look_at(name, f"{setting}: {name}") if name.endswith(DATA_SUFFIXES) else None
        if mode is None or stat.S_ISDIR(mode):
            continue
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{setting}: {visible(name)} is a pipe or a device; remove it")
        names.append(name)
    return names


def _unreadable(setting: str, path: Path, error: Exception) -> ConfigError:
    reason = visible(one_line(error)) or type(error).__name__
    return ConfigError(f"{setting}: {path} cannot be read ({reason}); write the file again")


def _read_files(paths: Iterable[Path], setting: str) -> Found:
    for path in paths:
        is_parquet = path.name.endswith(".parquet")
        rows = read_parquet(path, MOST_BYTES_OF_A_ROW) if is_parquet else _read_lines(path)
        left = max(FREE_UNPACKED_BYTES, MOST_UNPACKED_RATIO * path.stat().st_size)
        try:
            for location, size, values in rows:
                left -= size + BYTES_OF_A_ROW
                if left < 0:
                    raise OSError(f"it unpacks to more than {MOST_UNPACKED_RATIO:,} times its size")
                if values is not None:
                    yield location, values
        except UNREADABLE as error:
            raise _unreadable(setting, path, error) from None


def _read_lines(path: Path) -> Iterator[tuple[str, int, dict[str, Any] | Flaw | None]]:
    """Yield place, bytes and values of JSON lines, None for what is no row.

    No more than MOST_BYTES_OF_A_ROW of a line are ever in memory.
    """
    with ExitStack() as stack:
        file: Any = stack.enter_context(open_file(path))
        if path.name.endswith(".gz"):
            file = stack.enter_context(gzip.GzipFile(fileobj=file))
        line_number = 0
        while line := file.readline(MOST_BYTES_OF_A_ROW + 1):
            line_number += 1
            location = f"{path}:{line_number}"
            if len(line) > MOST_BYTES_OF_A_ROW:
                while line and not line.endswith(b"\n"):
                    line = file.readline(MOST_BYTES_OF_A_ROW)
                    yield location, len(line), None
                yield location, 0, too_long(MOST_BYTES_OF_A_ROW)
            elif line.strip():
                values = _parse(line.removeprefix(b"\xef\xbb\xbf") if line_number == 1 else line)
                yield location, len(line), values
            else:
                yield location, len(line), None


def _parse(line: bytes) -> dict[str, Any] | Flaw:
    twice: list[str] = []

    def make(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            names = [name for name, _ in pairs]
            twice.append(next(name for name in names if names.count(name) > 1))
        return values

    try:
        row = json.loads(line.decode(), object_pairs_hook=make)
    except UnicodeDecodeError:
        return Flaw("not in UTF-8", "convert the file to UTF-8")
    except (ValueError, RecursionError):
        return Flaw("not JSON", "each line must be one JSON object")
    if twice:
        return Flaw(f"with the name {twice[0]!r:.40} twice in an object", "keep one of both values")
    if not isinstance(row, dict):
        return Flaw("not a JSON object", 'each line must be like {"messages": [...]}')
    return row


def _read_shards(shards: ShardedDataset, data: str) -> Found:
    for index in range(len(shards)):
        row = shards[index]
        if isinstance(row, Mapping) and isinstance(row.get("json"), Mapping):
            row = row["json"]  # of a tar file
        else:
            row = without_nulls(row)  # of Parquet
        is_row = isinstance(row, Mapping)
        flaw = Flaw(f"of type {type(row).__name__}", "a shard must hold rows with names")
        yield f"{data} row {index + 1}", dict(row) if is_row else flaw
