"""A node's copies of shards: one download for all its processes, within a number of bytes."""

from __future__ import annotations

import bz2
import errno
import fcntl
import gzip
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trainer.data.shards.download import digest_file, download
from trainer.data.shards.errors import ServerError
from trainer.data.shards.index import ShardIndex
from trainer.data.shards.sources import CHUNK, LocalSource, Source
from trainer.errors import ConfigError, RunError, one_line

PART = ".part"  # an unfinished download, locked by the process that writes it
RAW = ".raw"  # what has been decompressed of it
TRIES = 10  # while others delete the folder or its files
OPENERS: dict[str, Callable[[BinaryIO], Any]] = {"gz": gzip.open, "bz2": bz2.open}
VERIFIED = "verified"  # stamps of files that are read in place, by shard
FREE = "free"  # the lock of whoever makes room
MOST_OF_A_NAME = 60  # characters: a file's name has at most 255 bytes
NextUse = Callable[[int], float]  # the step at which a shard is next needed; inf: not known


class ShardCache:
    """The shards as files of this machine. A local folder is read in place.

    Processes on a node agree by locks of files, which the kernel releases if one is killed, so
    any number of runs may share a folder. A finished file bears its digest in its time of
    modification: one that somebody wrote to is verified or fetched again before it is used.
    """

    def __init__(self, source: Source, index: ShardIndex, folder: Path, most_bytes: int):
        """Raise ConfigError if `folder` cannot be written, or the largest shard does not fit."""
        self._source = source
        self._index = index
        self.most_bytes = most_bytes
        self._compression = str(index.settings.get("compression") or "").partition(":")[0]
        if self._compression not in ("", "zstd", *OPENERS):
            must = "must be gz, bz2 or zstd; write the shards again, or decompress them"
            raise ConfigError(f"{source.url}: compression {self._compression}: {must}")
        self._is_in_place = False
        self._verified = np.zeros(0, np.int64)
        has_sizes = not self._compression and int(index.sizes.min()) >= 0
        # then no download looks at all files, which takes 1 s for 10**5
        self._holds_all = has_sizes and int(index.sizes.sum()) <= most_bytes
        self.folder = folder.expanduser().absolute() / index.digest
        if isinstance(source, LocalSource) and not self._compression:
            self._is_in_place = True
            self._verified = _open_table(self.folder / VERIFIED, len(index))
            self.folder = source.folder
            return
        largest = int(index.sizes.max())
        if largest > most_bytes:
            need = f"must hold the largest shard, {largest:,} bytes"
            raise ConfigError(f"cache_bytes={most_bytes}: {need}")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / FREE).touch()
        except OSError as error:
            advice = "give another folder, such as cache=/tmp/shards"
            raise ConfigError(f"cache={folder}: {error.strerror}; {advice}") from None

    @property
    def is_in_place(self) -> bool:
        """Return True if the shards are read where they lie."""
        return self._is_in_place

    def size(self, shard: int) -> int:
        """Return the bytes of a shard as it is stored, 0 if they are unknown."""
        return self._index.size(shard) or 0

    def path(self, shard: int) -> Path:
        """Return where a shard lies, or would lie once it is fetched."""
        name = self._index.name(shard)
        if self._is_in_place:
            return self.folder / name
        return self.folder / f"{shard:08d}-{name.replace('/', '_')[-MOST_OF_A_NAME:]}"

    def fetch(self, shard: int, next_use: NextUse | None = None) -> Path:
        """Return the file of a shard, downloaded if this node does not have it.

        `next_use` decides which others go if there is no room. Raises RunError if the shard cannot
        be read or differs from the index, or if the disk is full.
        """
        path = self.path(shard)
        if self._is_in_place:
            return self._check_in_place(shard, path)
        try:
            if not self._is_sound(shard, path):
                self._download_with_room(shard, path, next_use)
        except OSError as error:
            raise self._no_room(shard, error) from None
        return path

    def _download_with_room(self, shard: int, path: Path, next_use: NextUse | None) -> None:
        """Download a shard; delete all others if the disk is full."""
        for attempt in range(TRIES):
            try:
                return self._download(shard, path, next_use)
            except FileNotFoundError:  # somebody deletes the folder
                if attempt == TRIES - 1:
                    raise
            except OSError as error:
                if attempt or error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                self._evict(shard, float("inf"), next_use)

    def _download(self, shard: int, path: Path, next_use: NextUse | None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with _locked_part(path) as part:
            if self._is_sound(shard, path):  # another process was faster
                Path(part.name).unlink()
            else:
                self._evict(shard, self.size(shard), next_use)
                self._write(shard, part, path, next_use)

    def _check_in_place(self, shard: int, path: Path) -> Path:
        """Verify a file that was not verified since it was last written."""
        size, span = self._index.size(shard), self._index.span(shard)
        try:
            status = path.stat()
        except OSError as error:
            raise RunError(f"shard {path}: {error.strerror}; restore it") from None
        why = ""
        if size is not None and span is None and status.st_size != size:
            why = f"has {status.st_size:,} bytes, and {size:,} in its index"
        stamp = hash((status.st_mtime_ns, status.st_size, status.st_ino, status.st_dev))
        sha256 = self._index.sha256(shard)
        if not why and sha256 and self._verified[shard] != stamp:
            if digest_file(path, span) == sha256:
                self._verified[shard] = stamp
            else:
                why = "has another SHA-256 than in its index"
        if why:
            advice = f"restore it: python -m trainer.shards check {self._source.url}"
            raise RunError(f"shard {path}: {why}; {advice}")
        return path

    def _is_sound(self, shard: int, path: Path) -> bool:
        """Return True if a finished file is there that nobody has written to since."""
        try:
            status = path.stat()
        except FileNotFoundError:
            return False
        span = self._index.span(shard)
        size = self._index.size(shard) if span is None else span.tail_end
        # a power cut may leave an empty file with the time of a whole one
        is_as_long = self._compression or size in (None, status.st_size)
        if is_as_long and status.st_mtime_ns == self._stamp(shard):
            return True
        sha256 = self._index.sha256(shard)
        with suppress(FileNotFoundError):
            is_whole = sha256 and not self._compression
            if is_whole and digest_file(path, span) == sha256:
                self._seal(shard, path)
                return True
            path.unlink()
        return False

    def _write(self, shard: int, part: BinaryIO, path: Path, next_use: NextUse | None) -> None:
        index = self._index
        facts = (index.size(shard), index.sha256(shard), index.span(shard))
        download(self._source, index.name(shard), part, *facts)
        if self._compression:
            self._decompress(shard, part, path, next_use)
            Path(part.name).unlink()
            return
        self._publish(shard, Path(part.name), path, next_use)

    def _decompress(self, shard: int, part: BinaryIO, path: Path, next_use: NextUse | None) -> None:
        raw = path.with_name(path.name + RAW)
        part.seek(0)
        try:
            with open(raw, "wb") as file, _decompressed(part, self._compression) as stream:
                shutil.copyfileobj(stream, file, CHUNK)
        except Exception as error:  # each format has its own kinds
            if isinstance(error, RunError) or getattr(error, "errno", None):
                raise
            place = f"{self._source.url}/{self._index.name(shard)}"
            why = f"cannot be decompressed as {self._compression}: {one_line(error)}"
            raise RunError(f"{place}: {why}; restore it") from None
        size = raw.stat().st_size
        if size > self.most_bytes:
            need = f"must hold shard {self._index.name(shard)}, {size:,} bytes"
            raw.unlink()
            raise ServerError(f"cache_bytes={self.most_bytes}: {need}")
        self._publish(shard, raw, path, next_use)

    def _seal(self, shard: int, path: Path) -> None:
        """Mark a finished file; one of another user is verified at each start instead."""
        with suppress(PermissionError):
            os.utime(path, ns=(self._stamp(shard), self._stamp(shard)))

    def _stamp(self, shard: int) -> int:
        """Return a time in ns, before 1988, for the digest of a shard, or else of the index.

        It is a whole number of seconds, and even: some file systems keep no other times.
        """
        digest = self._index.sha256(shard) or self.folder.name
        return int(digest[:7], 16) * 2 * 10**9

    def _no_room(self, shard: int, error: OSError) -> ServerError:
        need = f"shard {self._index.name(shard)} cannot be written: {error.strerror}"
        return ServerError(f"{self.folder}: {need}; make room, or give another cache= folder")

    def _evict(self, shard: int, need: float, next_use: NextUse | None) -> None:
        """Delete other shards until `need` bytes fit for this one.

        Its unfinished download already counts for other processes.
        """
        if self._holds_all and need < float("inf"):
            return
        with self._locked():
            self._make_room(self._survey(shard), need, next_use)

    def _publish(self, shard: int, file: Path, path: Path, next_use: NextUse | None) -> None:
        """Give a finished file its name; all finished ones have at most the bytes of the cache."""
        self._seal(shard, file)
        with self._locked():
            if not self._holds_all:
                finished = [each for each in self._survey(shard) if not each.ending]
                self._make_room(finished, self._on_disk(shard, file.stat()), next_use)
            os.replace(file, path)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with open(self.folder / FREE, "ab") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_room(self, files: list[_CachedFile], need: float, next_use: NextUse | None) -> None:
        room = self.most_bytes - need - sum(each.num_bytes for each in files)
        when = next_use or (lambda _: float("inf"))
        # downloads that nobody finishes; then the farthest use first, of equals the oldest
        order = sorted(files, key=lambda e: (e.ending != PART, -when(e.shard), e.time_ns))
        for each in order:
            if room >= 0:
                break
            if each.ending == PART:
                room += each.num_bytes if self._drop_part(each.shard) else 0
            elif not each.ending:
                self.path(each.shard).unlink(missing_ok=True)
                room += each.num_bytes

    def _drop_part(self, shard: int) -> bool:
        """Delete an unfinished download that a killed process has left; return True if it was."""
        path = self.path(shard)
        part = path.with_name(path.name + PART)
        with suppress(OSError), open(part, "rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.with_name(path.name + RAW).unlink(missing_ok=True)
            part.unlink()
            return True
        return False

    def _on_disk(self, shard: int, status: os.stat_result) -> int:
        """Return the bytes of a file; one with a part of another has holes."""
        return status.st_size if self._index.span(shard) is None else self.size(shard)

    def _survey(self, but: int) -> list[_CachedFile]:
        """Return the files of other shards; unfinished downloads count as if they were finished."""
        found = []
        for entry in os.scandir(self.folder):
            word = entry.name.partition("-")[0]
            shard = int(word) if word.isdecimal() else but
            if shard == but or shard >= len(self._index):
                continue
            ending = Path(entry.name).suffix if entry.name.endswith((PART, RAW)) else ""
            with suppress(FileNotFoundError):
                status = entry.stat()
                size = self.size(shard) if ending == PART else self._on_disk(shard, status)
                found.append(_CachedFile(shard, ending, size, status.st_ctime_ns))
        return found


@dataclass(frozen=True)
class _CachedFile:
    """A file of the cache: a finished shard, an unfinished one (PART), or one of RAW."""

    shard: int
    ending: str
    num_bytes: int
    time_ns: int


def default_folder() -> Path:
    """Return the folder of all caches: LOCKSTEP_CACHE, or lockstep in the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("LOCKSTEP_CACHE") or Path(base) / "lockstep")


def _open_table(path: Path, length: int) -> np.ndarray:
    """Return int64 (length,), shared by the processes of this node, or own if it cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "ab") as file:
            file.truncate(8 * length)
            os.posix_fallocate(file.fileno(), 0, max(1, 8 * length))  # else a full disk is SIGBUS
        return np.memmap(path, np.int64, "r+", shape=(length,))
    except (OSError, AttributeError):  # macOS does not have posix_fallocate
        return np.zeros(length, np.int64)


@contextmanager
def _locked_part(path: Path) -> Iterator[BinaryIO]:
    """Open the unfinished download of a file, when no other process writes it any more.

    A process that is killed leaves its part, which the next one continues.
    """
    name = f"{path}{PART}"
    while True:
        # unbuffered: a full disk is met at each write
        with open(name, "r+b", buffering=0, opener=_create) as part:
            fcntl.flock(part, fcntl.LOCK_EX)
            try:
                is_current = Path(name).stat().st_ino == os.fstat(part.fileno()).st_ino
            except FileNotFoundError:
                is_current = False
            if is_current:  # the process before has not finished it
                yield part
                return
        time.sleep(0)


def _create(path: str, flags: int) -> int:
    """Open a file, or make it, as the opener of `open`; mode "a" would write at its end alone."""
    return os.open(path, flags | os.O_CREAT, 0o666)


@contextmanager
def _decompressed(file: BinaryIO, compression: str) -> Iterator[BinaryIO]:
    if compression in OPENERS:
        with OPENERS[compression](file) as stream:
            yield stream
        return
    try:
        import zstandard
    except ImportError:
        advice = "pip install zstandard"
        raise ServerError(f"compression zstd: zstandard is not installed; {advice}") from None
    with zstandard.ZstdDecompressor().stream_reader(file) as stream:
        yield stream
