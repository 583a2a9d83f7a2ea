"""The files of a cache, their sizes, and the eviction of shards when it is full."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.base.errors import ServerError
from trainer.shards.index import ShardIndex
from trainer.shards.sources import check_wait, lock


def open_to_lock(path: Path) -> int:
    """Return the descriptor of a file, which is made if there is none."""
    return os.open(path, os.O_RDWR | os.O_CREAT, 0o600)


def is_at(path: Path, file: int) -> bool:
    """Return True if an open file still has this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file))
    except FileNotFoundError:
        return False


def bytes_at(paths: Sequence[Path]) -> int:
    """Return the bytes of those of these files that exist."""
    num_bytes = 0
    for path in paths:
        with suppress(OSError):
            num_bytes += path.stat().st_size
    return num_bytes


PART_ENDING = ".part"  # an unfinished download, locked by the process that writes it
RAW_ENDING = ".raw"  # what has been decompressed of it
FREE = "free"  # the lock of whoever makes room
MOST_OF_A_CACHED_NAME = 60  # characters: a file's name has at most 255 bytes
STRIDE = 2**24  # bytes of a file of unknown size, after which room is made for it again
NextUse = Callable[[int], float]  # the step at which a shard is next needed; inf: not known
Grow = Callable[[int], None]


class CacheRoom:
    """The files of a cache, at most `most_bytes`."""

    def __init__(self, folder: Path, index: ShardIndex, most_bytes: int, holds_all: bool):
        self._folder = folder
        self._index = index
        self._most_bytes = most_bytes
        self._holds_all = holds_all

    def path(self, shard: int, ending: str = "") -> Path:
        """Return where a shard is, or the unfinished file of it that has this ending."""
        name = self._index.name(shard).replace("/", "_")[-MOST_OF_A_CACHED_NAME:]
        return self._folder / f"{shard:08d}-{name}{ending}"

    def evict(self, shard: int, need: float, next_use: NextUse | None) -> None:
        """Delete other shards until `need` bytes fit for this one.

        Its unfinished download already counts for other processes.
        """
        if self._holds_all and need < float("inf"):
            return
        with self.locked():
            self._make_room(self._survey(shard), need, next_use)

    def publish(self, shard: int, file: int, ending: str, next_use: NextUse | None) -> None:
        """Give a finished file its name; all finished ones have at most the bytes of the cache.

        Raises FileNotFoundError if the file was deleted by hand, perhaps for that of another run.
        """
        unfinished = self.path(shard, ending)
        with self.locked():
            if not self._holds_all:
                finished = [each for each in self._survey(shard) if not each.ending]
                need = self._on_disk(shard, os.fstat(file))
                self._make_room(finished, need, next_use)
            if not is_at(unfinished, file):
                raise FileNotFoundError(errno.ENOENT, "its folder was deleted", str(unfinished))
            unfinished.rename(self.path(shard))

    def grower(self, shard: int, next_use: NextUse | None) -> Grow:
        """Return what makes room for a file of unknown size, and ends one without end."""
        name = self._index.name(shard)
        step = min(STRIDE, self._most_bytes // 64)
        reserved = 0

        def grow(num_bytes: int) -> None:
            nonlocal reserved
            check_wait(f"fetching shard {name}")
            if num_bytes > self._most_bytes:
                raise ServerError(f"""cache_bytes={self._most_bytes}:
                    must hold shard {name}, which has more bytes""")
            if num_bytes > reserved:
                reserved = num_bytes + step
                self.evict(shard, num_bytes, next_use)

        return grow

    @contextmanager
    def locked(self) -> Iterator[None]:
        path = self._folder / FREE
        descriptor = open_to_lock(path)
        try:
            lock(descriptor, str(path))
            yield
        finally:
            os.close(descriptor)

    def _make_room(self, files: list[_CachedFile], need: float, next_use: NextUse | None) -> None:
        room = self._most_bytes - need - sum(each.num_bytes for each in files)
        when = next_use or (lambda _: float("inf"))
        # downloads that nobody finishes; then the farthest use first, of equals the oldest
        order = sorted(files, key=lambda e: (not e.ending, -when(e.shard), e.time_ns))
        for each in order:
            if room >= 0:
                break
            if each.ending:
                room += each.num_bytes if self._drop_part(each.shard) else 0
            else:
                self.path(each.shard).unlink(missing_ok=True)
                room += each.num_bytes

    def _drop_part(self, shard: int) -> bool:
        """Delete an unfinished download that a killed process has left; return True if it was."""
        part = self.path(shard, PART_ENDING)
        with suppress(OSError), open(open_to_lock(part), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(part, file.fileno()):
                self.path(shard, RAW_ENDING).unlink(missing_ok=True)
                part.unlink(missing_ok=True)
                return True
        return False

    def _on_disk(self, shard: int, status: os.stat_result) -> int:
        """Return the bytes of a file; one with a part of another has holes."""
        return status.st_size if self._index.span(shard) is None else self._size(shard)

    def _survey(self, but: int) -> list[_CachedFile]:
        """Return the files of other shards; unfinished downloads count as if they were finished."""
        files = []
        for entry in os.scandir(self._folder):
            word = entry.name.partition("-")[0]
            shard = int(word) if word.isdecimal() else but
            if shard == but or shard >= len(self._index):
                continue
            name = self.path(shard).name
            ending = entry.name.removeprefix(name)
            if not entry.name.startswith(name) or ending not in ("", PART_ENDING, RAW_ENDING):
                continue  # not of Lockstep
            with suppress(FileNotFoundError):
                status = entry.stat()
                size = self._on_disk(shard, status)
                if ending == PART_ENDING:
                    size = self._size(shard) or size
                files.append(_CachedFile(shard, ending, size, status.st_ctime_ns))
        return files

    def _size(self, shard: int) -> int:
        return self._index.size(shard) or 0


@dataclass(frozen=True)
class _CachedFile:
    """A file of the cache: a finished shard, an unfinished one (PART_ENDING), or a raw one."""

    shard: int
    ending: str
    num_bytes: int
    time_ns: int
