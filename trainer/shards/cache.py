"""A node's copies of shards: one download for all its processes, within a number of bytes."""

from __future__ import annotations

import bz2
import errno
import fcntl
import gzip
import mmap
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from trainer.base.errors import ConfigError, RunError, ServerError, one_line
from trainer.shards.download import digest_file, download
from trainer.shards.eviction import (
    FREE,
    PART_ENDING,
    RAW_ENDING,
    CacheRoom,
    Grow,
    NextUse,
    bytes_at,
    create,
    delete,
    is_at,
    is_own,
    name_in_cache,
    open_folder,
    open_to_lock,
    open_to_read,
)
from trainer.shards.formats.shard_parts import FileBytes, stamp_of
from trainer.shards.index import ShardIndex
from trainer.shards.sources import SOURCE_CHUNK_BYTES, LocalSource, Source, is_lasting, lock

CACHE_TRIES = 10  # while others delete the folder or its files
OPENERS: dict[str, Callable[[BinaryIO], Any]] = {"gz": gzip.open, "bz2": bz2.open}
NO_ROOM_ERRORS = (errno.ENOSPC, errno.EDQUOT)


class ShardCache:
    """The shards as files of this machine. A local folder is read in place.

    Processes on a node agree by locks of files, which the kernel releases if one is killed, so
    any number of runs may share a folder. Each process hashes a file before its first use, once
    for all that it forks; one that differs, or that is not its own and has no digest in the index,
    is fetched again. A finished file bears a digest in its time of modification.
    """

    def __init__(self, source: Source, index: ShardIndex, folder: Path, most_bytes: int):
        """Raise ConfigError if `folder` cannot be written, or the largest shard does not fit."""
        self._source = source
        self._index = index
        self.most_bytes = most_bytes
        self._compression = str(index.settings.get("compression") or "").partition(":")[0]
        if self._compression not in ("", "zstd", *OPENERS):
            raise ConfigError(f"""{source.url}: compression {self._compression}:
                must be gz, bz2 or zstd; write the shards again, or decompress them""")
        # stamps of verified files by shard, which forked processes share
        self._verified = np.frombuffer(mmap.mmap(-1, 8 * len(index)), np.int64)
        has_sizes = not self._compression and int(index.sizes.min()) >= 0
        # then no download looks at all files, which takes 1 s for 10**5
        holds_all = has_sizes and int(index.sizes.sum()) <= most_bytes
        self._is_in_place = isinstance(source, LocalSource) and not self._compression
        if isinstance(source, LocalSource) and self._is_in_place:
            self.folder = source.folder
            return
        largest = int(index.sizes.max())
        if largest > most_bytes:
            raise ConfigError(f"""cache_bytes={most_bytes}:
                must hold the largest shard, {largest:,} bytes""")
        try:
            root = folder.expanduser().absolute()
        except RuntimeError:  # a user without a home, as in containers
            raise ConfigError(f"""cache={folder}: must be a folder, as this user has no home;
                give cache=/tmp/shards""") from None
        self.folder = root / index.digest
        self._room = CacheRoom(self.folder, index, most_bytes, holds_all)
        try:
            _check_link(root)
            with open_folder(self.folder) as descriptor:
                os.close(open_to_lock(descriptor, FREE))
        except OSError as error:
            raise ConfigError(f"""cache={folder}: {error.strerror};
                give another folder, such as cache=/tmp/shards""") from None

    @property
    def is_in_place(self) -> bool:
        """Return True if the shards are read where they lie."""
        return self._is_in_place

    def size(self, shard: int) -> int:
        """Return the bytes of a shard as it is stored, 0 if they are unknown."""
        return self._index.size(shard) or 0

    def path(self, shard: int) -> Path:
        """Return where a shard lies, or would lie once it is fetched."""
        return self.folder / self._name(shard)

    def _name(self, shard: int) -> str:
        is_own = self._is_in_place
        return self._index.name(shard) if is_own else name_in_cache(self._index, shard)

    def is_ready(self, shard: int) -> bool:
        """Return True if a shard can probably be opened at once."""
        return bool(self._verified[shard]) and (self._is_in_place or self.path(shard).exists())

    def is_stale(self, shard: int, file: FileBytes) -> bool:
        """Return True if an open file must be opened again, which verifies it.

        One that was deleted to make room is read to its end; a folder has another in its place.
        """
        if not file.is_changed:
            return False
        if self._is_in_place or not file.is_deleted:
            return True
        file.accept()
        return not self._is_right(shard, file)

    def fetch(self, shard: int, next_use: NextUse | None = None) -> Path:
        """Have a shard on this node, verified; return its path. See `open`."""
        self.open(shard, next_use).close()
        return self.path(shard)

    def open(self, shard: int, next_use: NextUse | None = None) -> FileBytes:
        """Return the open file of a shard, downloaded if this node does not have it.

        `next_use` decides which others go if there is no room; what is open can be read to its
        end. Raises RunError if the shard cannot be read or differs from the index, and ServerError
        if the server does not answer or the cache cannot be written.
        """
        if self._is_in_place:
            return self._open_in_place(shard)
        try:
            return self._open_or_download(shard, next_use)
        except OSError as error:
            raise self._no_room(shard, error) from None

    def _open_or_download(self, shard: int, next_use: NextUse | None) -> FileBytes:
        """Delete all other shards if the disk is full."""
        is_full = False
        for attempt in range(CACHE_TRIES):
            try:
                with open_folder(self.folder) as folder:
                    if is_full:
                        self._room.evict(folder, shard, float("inf"), next_use)
                    file = self._open_finished(folder, shard)
                    if file is None:
                        file = self._download(folder, shard, next_use)
                    return file
            except FileNotFoundError:  # somebody deletes the folder
                if attempt == CACHE_TRIES - 1:
                    raise
            except OSError as error:
                if is_full or error.errno not in NO_ROOM_ERRORS:
                    raise
                is_full = True
        raise AssertionError

    def _open_finished(self, folder: int, shard: int) -> FileBytes | None:
        """Return the open file of a shard; None, and no file is left, if it is not sound."""
        name = self._name(shard)
        descriptor = open_to_read(folder, name)
        if descriptor is None:
            return None
        file = FileBytes(self.folder / name, descriptor)
        if self._is_sound(shard, file):
            return file
        file.close()
        delete(folder, name)
        return None

    def _is_sound(self, shard: int, file: FileBytes) -> bool:
        stamp = stamp_of(file.status)
        is_sound = self._verified[shard] == stamp or self._is_right(shard, file)
        if is_sound:
            self._verified[shard] = stamp
        return is_sound

    def _is_right(self, shard: int, file: FileBytes) -> bool:
        """Return True if a file has the bytes of its shard: it is read to its end."""
        span = self._index.span(shard)
        sha256 = self._sha256(shard)
        size = self._index.size(shard) if span is None else span.tail_end
        status = file.status
        is_as_long = status.st_size == size
        if self._compression or size is None:
            is_as_long = status.st_size <= self.most_bytes
        if not is_as_long:
            return False
        with file.open() as stream:
            digest = digest_file(stream, span)
        if sha256:
            return digest == sha256
        return status.st_uid == os.geteuid() and status.st_mtime_ns == _time_of(digest)

    def _sha256(self, shard: int) -> str:
        """Return the digest of a finished file, as far as the index has it."""
        return "" if self._compression else self._index.sha256(shard)

    def _open_in_place(self, shard: int) -> FileBytes:
        """Open a file, and verify one that was not verified since it was last written."""
        path = self.path(shard)
        size = self._index.size(shard)
        span = self._index.span(shard)
        sha256 = self._sha256(shard)
        try:
            file = FileBytes(path)
            is_new = self._verified[shard] != stamp_of(file.status)
            why = ""
            if size is not None and span is None and len(file) != size:
                why = f"has {len(file):,} bytes, and {size:,} in its index"
            elif sha256 and is_new:
                with file.open() as stream:
                    is_same = digest_file(stream, span) == sha256
                why = "" if is_same else "has another SHA-256 than in its index"
        except OSError as error:
            if is_lasting(error):
                raise RunError(f"shard {path}: {error.strerror}; restore it") from None
            raise ServerError(f"""shard {path}: {error.strerror};
                check the disk and the limits (ulimit -a), and start again""") from None
        if why:
            raise RunError(f"""shard {path}: {why};
                restore it: python -m trainer.shards check {self._source.url}""")
        self._verified[shard] = stamp_of(file.status)
        return file

    def _download(self, folder: int, shard: int, next_use: NextUse | None) -> FileBytes:
        name = self._name(shard)
        with self._locked_part(folder, name) as part:
            file = self._open_finished(folder, shard)
            if file is not None:  # another process was faster
                delete(folder, name + PART_ENDING)
                return file
            try:
                return self._write(folder, shard, part, next_use)
            except BaseException:
                with suppress(OSError):
                    delete(folder, name + RAW_ENDING)
                    if not self._index.sha256(shard):  # the next try begins at the start
                        delete(folder, name + PART_ENDING)
                raise

    def _write(
        self, folder: int, shard: int, part: BinaryIO, next_use: NextUse | None
    ) -> FileBytes:
        """Download a shard into its part; return the finished file."""
        index = self._index
        name = self._name(shard)
        self._room.evict(folder, shard, self.size(shard), next_use)
        download(
            self._source,
            index.name(shard),
            part,
            index.size(shard),
            index.sha256(shard),
            index.span(shard),
            self._room.grower(folder, shard, next_use),
        )
        if not self._compression:
            return self._publish(folder, shard, part, name + PART_ENDING, next_use)
        with open(create(folder, name + RAW_ENDING), "w+b") as raw:
            self._decompress(shard, part, raw, self._room.grower(folder, shard, next_use))
            file = self._publish(folder, shard, raw, name + RAW_ENDING, next_use)
        delete(folder, name + PART_ENDING)
        return file

    @contextmanager
    def _locked_part(self, folder: int, name: str) -> Iterator[BinaryIO]:
        """Open the unfinished download of a file, when no other process writes it any more.

        A process that is killed leaves its part, which the next one of its user continues.
        """
        part = name + PART_ENDING
        written = partial(bytes_at, folder, (part, name + RAW_ENDING))
        foreign = 0
        while foreign < CACHE_TRIES:
            descriptor = open_to_lock(folder, part)
            # unbuffered: a full disk is met at each write
            with open(descriptor, "r+b" if is_own(descriptor) else "rb", buffering=0) as file:
                lock(descriptor, str(self.folder / part), written)
                if not is_at(folder, part, descriptor):
                    continue  # the process before has finished it
                if file.writable():
                    yield file
                    return
                delete(folder, part)
                foreign += 1
        raise OSError(errno.EBUSY, f"another user writes {part} again and again")

    def _decompress(self, shard: int, part: BinaryIO, raw: BinaryIO, grow: Grow) -> None:
        name = self._index.name(shard)
        part.seek(0)
        done = 0
        try:
            with _decompressed(part, self._compression) as stream:
                while block := stream.read(SOURCE_CHUNK_BYTES):
                    done += len(block)
                    grow(done)
                    raw.write(block)
            raw.flush()
        except Exception as error:  # each format has its own kinds
            if isinstance(error, RunError) or getattr(error, "errno", None):
                raise
            raise RunError(f"""{self._source.url}/{name}: cannot be decompressed
                as {self._compression}: {one_line(error)}; restore it""") from None

    def _no_room(self, shard: int, error: OSError) -> ServerError:
        need = f"shard {self._index.name(shard)} cannot be written: {error.strerror}"
        advice = {errno.EFBIG: "raise ulimit -f, or give"}.get(error.errno or 0, "give")
        if error.errno in NO_ROOM_ERRORS:
            advice = "make room, or give"
        return ServerError(f"{self.folder}: {need}; {advice} another cache= folder")

    def _publish(
        self, folder: int, shard: int, file: BinaryIO, name: str, next_use: NextUse | None
    ) -> FileBytes:
        """Give a finished file its name; all finished ones have at most the bytes of the cache."""
        digest = self._sha256(shard) or digest_file(file, self._index.span(shard))
        os.utime(file.fileno(), ns=(_time_of(digest),) * 2)
        self._room.publish(folder, shard, file.fileno(), name, next_use)
        fcntl.flock(file, fcntl.LOCK_UN)  # else it is locked as long as it is open
        finished = FileBytes(self.path(shard), os.dup(file.fileno()))
        self._verified[shard] = stamp_of(finished.status)
        return finished


def default_folder() -> Path:
    """Return the folder of all caches: LOCKSTEP_CACHE, or lockstep in the user's cache folder."""
    if folder := os.environ.get("LOCKSTEP_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lockstep"


def _check_link(root: Path) -> None:
    """Raise OSError if another user has made the folder of all caches a link."""
    with suppress(FileNotFoundError):
        status = root.lstat()
        if stat.S_ISLNK(status.st_mode) and status.st_uid not in (0, os.geteuid()):
            raise OSError(errno.ELOOP, "it is another user's link")


def _time_of(digest: str) -> int:
    """Return the time in ns, before 1988, that marks a finished file.

    It is a whole number of seconds, and even: some file systems keep no other times.
    """
    return int(digest[:7], 16) * 2 * 10**9


@contextmanager
def _decompressed(file: BinaryIO, compression: str) -> Iterator[BinaryIO]:
    if compression in OPENERS:
        with OPENERS[compression](file) as stream:
            yield stream
        return
    try:
        import zstandard
    except ImportError:
        raise ServerError("""compression zstd: zstandard is not installed;
            pip install zstandard""") from None
    with zstandard.ZstdDecompressor().stream_reader(file) as stream:
        yield stream
