"""The folder of a cache, its sizes, and the eviction of shards when it is full.

All operations take the descriptor of the folder, so one that is renamed and replaced by a link in
between is not entered.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.base.errors import ServerError
from trainer.shards.index import ShardIndex
from trainer.shards.sources import check_wait, lock

_OPEN_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # to open a pipe would wait
# What an open says of a link, a socket, a folder, and a file of another user
_FOREIGN_FILE_ERRORS = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EACCES, errno.EPERM)
_LOCK_TRIES = 100  # while somebody plants anew


@contextmanager
def open_folder(path: Path) -> Iterator[int]:
    """Yield the descriptor of a folder, which is made. Raises OSError if it is a link."""
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, f"{path.name} in it is a link")
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


def open_to_read(folder: int, name: str) -> int | None:
    """Return the descriptor of a regular file; None if there is none.

    Anything else, and a file that may not be read, is deleted.
    """
    try:
        file = os.open(name, os.O_RDONLY | _OPEN_FLAGS, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in _FOREIGN_FILE_ERRORS:
            raise
    else:
        if is_regular(file):
            return file
        os.close(file)
    delete(folder, name)
    return None


def open_to_lock(folder: int, name: str) -> int:
    """Return the descriptor of a regular file, made if there is none; anything else is deleted.

    It can be written only if `is_own`.
    """
    for _ in range(_LOCK_TRIES):
        try:
            file = os.open(name, os.O_RDWR | os.O_CREAT | _OPEN_FLAGS, 0o666, dir_fd=folder)
        except OSError as error:
            if error.errno not in _FOREIGN_FILE_ERRORS:
                raise
            if error.errno in (errno.EACCES, errno.EPERM):
                foreign_file = open_to_read(folder, name)  # another user's, which can be locked
                if foreign_file is not None:
                    return foreign_file
                _check_writable(folder, error)
                continue
        else:
            if is_regular(file):
                return file
            os.close(file)
        delete(folder, name)
    raise OSError(errno.EBUSY, f"{name} is replaced all the time")


def _check_writable(folder: int, error: OSError) -> None:
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder, effective_ids=True):
        raise error


def is_regular(file: int) -> bool:
    return stat.S_ISREG(os.fstat(file).st_mode)


def is_own(file: int) -> bool:
    """Return True if this user made an open file, which can be written and has no second name."""
    status = os.fstat(file)
    mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
    is_alone = status.st_uid == os.geteuid() and status.st_nlink == 1
    return is_alone and mode == os.O_RDWR


def is_at(folder: int, name: str, file: int) -> bool:
    """Return True if an open file still bears this name."""
    try:
        status = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(status, os.fstat(file))


def create(folder: int, name: str) -> int:
    """Return the descriptor of a new file; one of this name is deleted."""
    delete(folder, name)
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _OPEN_FLAGS, 0o666, dir_fd=folder)


def delete(folder: int, name: str) -> None:
    """Delete a file, a link or an empty folder. Raises OSError, which names it, for others."""
    is_folder = False
    try:
        is_folder = stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        (os.rmdir if is_folder else os.unlink)(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        what = "a folder" if is_folder else "another user's"
        why = f"{name} is {what} and cannot be deleted ({error.strerror})"
        raise OSError(error.errno, why) from None


def bytes_at(folder: int, names: Sequence[str]) -> int:
    """Return the bytes of those of these files that are there."""
    num_bytes = 0
    for name in names:
        with suppress(OSError):
            num_bytes += os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
    return num_bytes


PART_ENDING = ".part"  # an unfinished download, locked by the process that writes it
RAW_ENDING = ".raw"  # what has been decompressed of it
FREE = "free"  # the lock of whoever makes room
MOST_OF_A_CACHED_NAME = 60  # characters: a file's name has at most 255 bytes
MOST_DIGITS_OF_A_SHARD = 18
STRIDE = 2**24  # bytes of a file of unknown size, after which room is made for it again
NextUse = Callable[[int], float]  # the step at which a shard is next needed; inf: not known
Grow = Callable[[int], None]


def name_in_cache(index: ShardIndex, shard: int) -> str:
    return f"{shard:08d}-{index.name(shard).replace('/', '_')[-MOST_OF_A_CACHED_NAME:]}"


class CacheRoom:
    """The files of a cache, whose folder is given by its descriptor; at most `most_bytes`."""

    def __init__(self, path: Path, index: ShardIndex, most_bytes: int, holds_all: bool):
        self._path = path
        self._index = index
        self._most_bytes = most_bytes
        self._holds_all = holds_all

    def evict(self, folder: int, shard: int, need: float, next_use: NextUse | None) -> None:
        """Delete other shards until `need` bytes fit for this one.

        Its unfinished download already counts for other processes.
        """
        if self._holds_all and need < float("inf"):
            return
        with self.locked(folder):
            self._make_room(folder, self._survey(folder, shard), need, next_use)

    def publish(
        self, folder: int, shard: int, file: int, name: str, next_use: NextUse | None
    ) -> None:
        """Give a finished file its name; all finished ones have at most the bytes of the cache."""
        with self.locked(folder):
            if not self._holds_all:
                finished = [each for each in self._survey(folder, shard) if not each.ending]
                need = self._on_disk(shard, os.fstat(file))
                self._make_room(folder, finished, need, next_use)
            final = name_in_cache(self._index, shard)
            os.rename(name, final, src_dir_fd=folder, dst_dir_fd=folder)

    def grower(self, folder: int, shard: int, next_use: NextUse | None) -> Grow:
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
                self.evict(folder, shard, num_bytes, next_use)

        return grow

    @contextmanager
    def locked(self, folder: int) -> Iterator[None]:
        descriptor = open_to_lock(folder, FREE)
        try:
            lock(descriptor, str(self._path / FREE))
            yield
        finally:
            os.close(descriptor)

    def _make_room(
        self, folder: int, files: list[_CachedFile], need: float, next_use: NextUse | None
    ) -> None:
        room = self._most_bytes - need - sum(each.num_bytes for each in files)
        when = next_use or (lambda _: float("inf"))
        # downloads that nobody finishes; then the farthest use first, of equals the oldest
        order = sorted(files, key=lambda e: (not e.ending, -when(e.shard), e.time_ns))
        for each in order:
            if room >= 0:
                break
            if each.ending:
                room += each.num_bytes if self._drop_part(folder, each.shard) else 0
            else:
                with suppress(OSError):  # that of another user
                    delete(folder, name_in_cache(self._index, each.shard))
                    room += each.num_bytes

    def _drop_part(self, folder: int, shard: int) -> bool:
        """Delete an unfinished download that a killed process has left; return True if it was."""
        name = name_in_cache(self._index, shard)
        with suppress(OSError), open(open_to_lock(folder, name + PART_ENDING), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(folder, name + PART_ENDING, file.fileno()):
                delete(folder, name + RAW_ENDING)
                delete(folder, name + PART_ENDING)
                return True
        return False

    def _on_disk(self, shard: int, status: os.stat_result) -> int:
        """Return the bytes of a file; one with a part of another has holes."""
        return status.st_size if self._index.span(shard) is None else self._size(shard)

    def _survey(self, folder: int, but: int) -> list[_CachedFile]:
        """Return the files of other shards; unfinished downloads count as if they were finished."""
        files = []
        for entry in os.scandir(folder):
            word = entry.name.partition("-")[0]
            shard = int(word) if word.isdecimal() and len(word) < MOST_DIGITS_OF_A_SHARD else but
            if shard == but or shard >= len(self._index):
                continue
            name = name_in_cache(self._index, shard)
            ending = entry.name.removeprefix(name)
            if not entry.name.startswith(name) or ending not in ("", PART_ENDING, RAW_ENDING):
                continue  # somebody else's
            with suppress(FileNotFoundError):
                status = entry.stat(follow_symlinks=False)
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
