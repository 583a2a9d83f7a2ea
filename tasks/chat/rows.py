"""Rows of chats in TRL's forms, from JSONL, Parquet, shards or Python's standard library."""

import glob
import gzip
import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import ConfigError, ShardedDataset
from trainer.config.plain_files import hash_rest
from trainer.errors import did_you_mean, one_line, visible
from trainer.shards.cache import default_folder
from trainer.tasks.chat.flaws import Flaw
from trainer.tasks.chat.library import describe_functions
from trainer.tasks.chat.parquet import read_parquet, without_nulls
from trainer.tasks.hub import siblings
from trainer.tasks.text import read_library

MOST_BYTES = 2**21  # of a row: while tokens are made, up to 250 bytes are needed for a character
SUFFIXES = (".jsonl", ".jsonl.gz", ".parquet")
INDEXES = ("lockstep.index", "index.json")  # of a folder of shards
UNREADABLE = (OSError, EOFError, zlib.error)


Found = Iterator[tuple[str, "dict[str, Any] | Flaw"]]  # the place of each row, and its values


@dataclass(frozen=True)
class Source:
    """Where rows come from: words for the start of a run, a digest of the content, the rows."""

    name: str
    digest: str
    read: Callable[[], Found]
    empty: int = 0  # files without a byte


def open_source(data: str | None, given: str, files: int, is_verified: bool) -> Source:
    """Find the rows of `data`. Raises ConfigError, which begins with `given`.

    `is_verified`: files are read for their digest, even if the cache has it for their times.

    None: functions of the first `files` files of Python's standard library. A folder of shards or
    an address is read by ShardedDataset; else a file, a folder of files or a glob of them.
    """
    if data is None:
        texts, digest = read_library(files)
        name = f"functions in {len(texts)} files of Python's standard library"
        return Source(name, digest, lambda: iter(describe_functions(texts)))
    path = Path(data)
    if "://" in data or any((path / name).is_file() for name in INDEXES):
        shards = ShardedDataset(data)
        return Source(shards.source, shards.digest, lambda: _read_shards(shards, data))
    paths = _find_files(data, given)
    name = data if len(paths) == 1 else f"{len(paths):,} files of {data}"
    digest = _digest(paths, given, is_verified)
    empty = sum(not each.stat().st_size for each in paths)
    return Source(name, digest, lambda: _read_files(paths, given), empty)


def _digest(paths: list[Path], given: str, is_verified: bool) -> str:
    """Return the digest of files' content.

    One rank of a node verifies it, and the others take what it notes for sizes and times.
    """
    stamp = hashlib.sha256()
    for path in paths:
        status = path.stat()
        now = (str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino)
        stamp.update(repr(now).encode(errors="replace"))
    note = default_folder().expanduser() / "chat" / f"{stamp.hexdigest()[:40]}.sha256"
    if not is_verified:
        with suppress(OSError):
            return note.read_text()
    digest = hashlib.sha256()
    for path in paths:
        try:
            with open(path, "rb") as file:
                digest.update(path.name.encode(errors="replace") + hash_rest(file).digest())
        except UNREADABLE as error:
            raise _unreadable(given, path, error) from None
    with suppress(OSError):  # then each rank reads the files
        note.parent.mkdir(parents=True, exist_ok=True)
        staged = note.with_suffix(f".{os.getpid()}")
        staged.write_text(digest.hexdigest())
        os.replace(staged, note)
    return digest.hexdigest()


def _find_files(data: str, given: str) -> list[Path]:
    path = Path(data)
    if "\0" in data or not data.strip():
        raise ConfigError(f"{given}: must be a file, a folder or a glob; null is the default data")
    if path.is_file():
        if not data.endswith(SUFFIXES):
            raise ConfigError(f"{given}: must end with {', '.join(SUFFIXES)}; rename or convert it")
        return [path]
    given_names = glob.iglob(data, recursive=True)  # noqa: PTH207
    found = path.rglob("*") if path.is_dir() else map(Path, given_names)
    fitting = (each for each in found if each.name.endswith(SUFFIXES) and each.is_file())
    paths = sorted(fitting, key=Path.as_posix)
    if not paths:
        near = did_you_mean(path.name, siblings(data))
        problem = "has no such files" if path.is_dir() else f"does not exist{near}"
        must = f"must be a file, folder or glob of {', '.join(SUFFIXES)}"
        raise ConfigError(f"{given}: {problem}; {must}, or a folder of shards")
    return paths


def _unreadable(given: str, path: Path, error: Exception) -> ConfigError:
    reason = visible(one_line(error)) or type(error).__name__
    return ConfigError(f"{given}: {path} cannot be read ({reason}); write the file again")


def _read_files(paths: Iterable[Path], given: str) -> Found:
    for path in paths:
        read = read_parquet if path.name.endswith(".parquet") else _read_lines
        try:
            yield from read(path)
        except UNREADABLE as error:
            raise _unreadable(given, path, error) from None


def _read_lines(path: Path) -> Found:
    """Yield the rows of JSON lines. No more than MOST_BYTES of a line are ever in memory."""
    with (gzip.open if path.name.endswith(".gz") else open)(path, "rb") as file:
        number = 0
        while line := file.readline(MOST_BYTES + 1):
            number += 1
            place = f"{path}:{number}"
            if len(line) > MOST_BYTES:
                while line and not line.endswith(b"\n"):
                    line = file.readline(MOST_BYTES)
                yield place, Flaw(f"longer than {MOST_BYTES:,} bytes", "divide or remove it")
            elif line.strip():
                yield place, _parse(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line)


def _parse(line: bytes) -> dict[str, Any] | Flaw:
    try:
        row = json.loads(line.decode())
    except UnicodeDecodeError:
        return Flaw("not in UTF-8", "convert the file to UTF-8")
    except (ValueError, RecursionError):
        return Flaw("not JSON", "each line must be one JSON object")
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
