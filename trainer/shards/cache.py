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
    is_at,
    open_to_lock,
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
    any number of runs of a user may share a folder, which only this user can write to. Each
    process hashes a file before its first use, once for all that it forks; one that differs is
    fetched again. A finished file has its digest in its time of modification.
    """

    def __init__(self, source: Source, index: ShardIndex, folder: Path, most_bytes: int):
        """Raise ConfigError if `folder` cannot be written or is open to other users, or if the
        largest shard does not fit."""
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
            self.folder = _open_root(folder) / index.digest
            self._room = CacheRoom(self.folder, index, most_bytes, holds_all)
            self._make_folder()
            os.close(open_to_lock(self.folder / FREE))
        except OSError as error:
            raise ConfigError(f"""cache={folder}: {error.strerror};
                give another folder, such as cache=/tmp/shards-{os.geteuid()}""") from None

    @property
    def is_in_place(self) -> bool:
        """Return True if the shards are read where they lie."""
        return self._is_in_place

    def size(self, shard: int) -> int:
        """Return the bytes of a shard as it is stored, 0 if they are unknown."""
        return self._index.size(shard) or 0

    def path(self, shard: int) -> Path:
        """Return where a shard lies, or would lie once it is fetched."""
        in_place = self.folder / self._index.name(shard)
        return in_place if self._is_in_place else self._room.path(shard)

    def is_ready(self, shard: int) -> bool:
        """Return True if a shard can probably be opened at once."""
        return bool(self._verified[shard]) and (self._is_in_place or self.path(shard).exists())

    def is_stale(self, shard: int, file: FileBytes) -> bool:
        """Return True if an open file must be opened again, which verifies it.

        One that was deleted, to make room or since it is damaged, is read to its end if it is
        sound. A folder has another in its place.
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

    def _make_folder(self) -> None:
        """Make the folder of these shards, which may be deleted by hand at any time."""
        for folder in (self.folder.parent, self.folder):  # `parents` have another mode
            folder.mkdir(0o700, parents=True, exist_ok=True)

    def _open_or_download(self, shard: int, next_use: NextUse | None) -> FileBytes:
        """Delete all other shards if the disk is full."""
        is_full = False
        for attempt in range(CACHE_TRIES):
            try:
                self._make_folder()
                if is_full:
                    self._room.evict(shard, float("inf"), next_use)
                file = self._open_finished(shard)
                return self._download(shard, next_use) if file is None else file
            except FileNotFoundError:  # somebody deletes the folder
                if attempt == CACHE_TRIES - 1:
                    raise
            except OSError as error:
                if is_full or error.errno not in NO_ROOM_ERRORS:
                    raise
                is_full = True
        raise AssertionError

    def _open_finished(self, shard: int) -> FileBytes | None:
        """Return the open file of a shard; None, and no file is left, if it is not sound."""
        path = self.path(shard)
        try:
            file = FileBytes(path)
        except FileNotFoundError:
            return None
        if self._is_sound(shard, file):
            return file
        file.close()
        path.unlink(missing_ok=True)
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
        is_as_long = file.status.st_size == size
        if self._compression or size is None:
            is_as_long = file.status.st_size <= self.most_bytes
        if not is_as_long:
            return False
        with file.open() as stream:
            digest = digest_file(stream, span)
        return digest == sha256 if sha256 else file.status.st_mtime_ns == _time_of(digest)

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

    def _download(self, shard: int, next_use: NextUse | None) -> FileBytes:
        with self._locked_part(shard) as part:
            file = self._open_finished(shard)
            if file is not None:  # another process was faster
                self._delete(shard, PART_ENDING)
                return file
            try:
                return self._write(shard, part, next_use)
            except BaseException:
                with suppress(OSError):
                    # else the folder was deleted, and another run has made it again
                    if is_at(self._room.path(shard, PART_ENDING), part.fileno()):
                        self._delete(shard, RAW_ENDING)
                        if not self._index.sha256(shard):  # the next try begins at the start
                            self._delete(shard, PART_ENDING)
                raise

    def _delete(self, shard: int, ending: str) -> None:
        self._room.path(shard, ending).unlink(missing_ok=True)

    def _write(self, shard: int, part: BinaryIO, next_use: NextUse | None) -> FileBytes:
        """Download a shard into its part; return the finished file."""
        index = self._index
        self._room.evict(shard, self.size(shard), next_use)
        grow = self._room.grower(shard, next_use)
        sizes = (index.size(shard), index.sha256(shard), index.span(shard))
        download(self._source, index.name(shard), part, *sizes, grow)
        if not self._compression:
            return self._publish(shard, part, PART_ENDING, next_use)
        self._delete(shard, RAW_ENDING)
        with open(self._room.path(shard, RAW_ENDING), "x+b") as raw:
            self._decompress(shard, part, raw, self._room.grower(shard, next_use))
            file = self._publish(shard, raw, RAW_ENDING, next_use)
        self._delete(shard, PART_ENDING)
        return file

    @contextmanager
    def _locked_part(self, shard: int) -> Iterator[BinaryIO]:
        """Open the unfinished download of a file, when no other process writes it any more.

        A process that is killed leaves its part, which the next one continues.
        """
        part = self._room.path(shard, PART_ENDING)
        written = partial(bytes_at, (part, self._room.path(shard, RAW_ENDING)))
        while True:
            # unbuffered: a full disk is met at each write
            with open(open_to_lock(part), "r+b", buffering=0) as file:
                lock(file.fileno(), str(part), written)
                if is_at(part, file.fileno()):  # else the process before has finished it
                    yield file
                    return

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
        self, shard: int, file: BinaryIO, ending: str, next_use: NextUse | None
    ) -> FileBytes:
        """Give a finished file its name; all finished ones have at most the bytes of the cache."""
        digest = self._sha256(shard) or digest_file(file, self._index.span(shard))
        os.utime(file.fileno(), ns=(_time_of(digest),) * 2)
        self._room.publish(shard, file.fileno(), ending, next_use)
        fcntl.flock(file, fcntl.LOCK_UN)  # else it is locked as long as it is open
        finished = FileBytes(self.path(shard), os.dup(file.fileno()))
        self._verified[shard] = stamp_of(finished.status)
        return finished


def default_folder() -> Path:
    """Return the folder of all caches: LOCKSTEP_CACHE, or lockstep in the user's cache folder."""
    if folder := os.environ.get("LOCKSTEP_CACHE"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "lockstep"


def _open_root(folder: Path) -> Path:
    """Return the folder of all caches, which is made if there is none.

    Raises ConfigError if another user owns it or may write to it, since nothing else protects its
    files, and OSError if it cannot be made.
    """
    try:
        root = folder.expanduser().absolute()
    except RuntimeError:  # a user without a home, as in containers
        raise ConfigError(f"""cache={folder}: must be a folder, as this user has no home;
            give cache=/tmp/shards-{os.geteuid()}""") from None
    root.mkdir(0o700, parents=True, exist_ok=True)
    status = root.stat()
    user = os.geteuid()
    if status.st_uid != user:
        raise ConfigError(f"""cache={folder}: belongs to user {status.st_uid}, and must belong to
            user {user}, who runs this; give another folder, such as cache=/tmp/shards-{user}""")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"""cache={folder}: has mode {stat.S_IMODE(status.st_mode):o}, so other
            users may write to it, and must be private; chmod 700 {root}, or give another folder,
            such as cache={root / "mine"}""")
    return root


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
