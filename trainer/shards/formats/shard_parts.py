"""Parts of files: the byte ranges that act as shards, and those that an example needs."""

from __future__ import annotations

import io
import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trainer.base.errors import RunError
from trainer.shards.sources import SOURCE_CHUNK_BYTES, Span, open_file


class FileBytes:
    """The bytes of an open file, read when they are asked for.

    A file that is mapped into memory and becomes shorter ends the process with SIGBUS; one that is
    opened by name a second time may be another one.
    """

    def __init__(self, path: Path, file: int | None = None):
        """Raise OSError if `path` cannot be opened. `file`: the descriptor, if it is open."""
        if file is None:
            with open_file(path) as opened:
                file = os.dup(opened.fileno())
        self._file = file
        self._close = weakref.finalize(self, os.close, file)
        self.path = path
        self.status = os.fstat(file)

    def __len__(self) -> int:
        return os.fstat(self._file).st_size

    def read(self, begin: int, size: int) -> bytes:
        """Return `size` bytes. Raises RunError if the file has fewer by now."""
        data = os.pread(self._file, size, begin)
        if len(data) < size:
            raise RunError(f"shard {self.path}: became shorter while it was read; restore it")
        return data

    def open(self) -> BinaryIO:
        """Return the bytes as a stream, at its begin; it is usable as long as this object."""
        return io.BufferedReader(_Stream(self), SOURCE_CHUNK_BYTES)

    def close(self) -> None:
        self._close()

    @property
    def is_deleted(self) -> bool:
        return os.fstat(self._file).st_nlink == 0

    @property
    def is_changed(self) -> bool:
        """True if somebody may have written to the file since it was opened, or has deleted it.

        Nobody can set its time of change, unlike that of its modification.
        """
        return stamp_of(self.status) != stamp_of(os.fstat(self._file))

    def accept(self) -> None:
        """Take the file as it is now for unchanged."""
        self.status = os.fstat(self._file)


def stamp_of(status: os.stat_result) -> int:
    """Return 64 bits that are others after the content of a file was changed."""
    times = (status.st_mtime_ns, status.st_ctime_ns)
    return hash((*times, status.st_size, status.st_ino, status.st_dev))


class _Stream(io.RawIOBase):
    """A stream with a position of its own: forked processes share that of a descriptor."""

    def __init__(self, file: FileBytes):
        self._bytes = file
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: len(self._bytes)}
        self._place = max(0, origin[whence] + offset)
        return self._place

    def readinto(self, buffer: Any) -> int:
        size = min(len(buffer), max(0, len(self._bytes) - self._place))
        data = self._bytes.read(self._place, size)
        buffer[:size] = data
        self._place += size
        return size


@dataclass(frozen=True)
class Piece:
    """Bytes [begin, end) of a file, with so many rows, that are not divided further."""

    rows: int
    begin: int
    end: int


def join(
    pieces: Iterable[Piece], most: int, tail: tuple[int, int] | None = None
) -> list[tuple[int, Span | None]]:
    """Return rows and span of parts of at most `most` bytes, or one piece, each with the `tail`.

    One part is the whole file, whose span is None.
    """
    parts: list[Piece] = []
    for piece in pieces:
        if parts and piece.end - parts[-1].begin <= most:
            last = parts.pop()
            piece = Piece(last.rows + piece.rows, last.begin, piece.end)
        parts.append(piece)
    if len(parts) < 2:
        return [(sum(part.rows for part in parts), None)]
    return [(p.rows, Span(p.begin, p.end, *(tail or (p.end, p.end)))) for p in parts]
