"""Parts of files: those that are shards of their own, and those that an example needs."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainer.data.shards.sources import Span
from trainer.errors import RunError


class FileBytes:
    """The bytes of an open file, read when they are asked for.

    A file that is mapped into memory and becomes shorter ends the process with SIGBUS.
    """

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_RDONLY)
        self._path = path
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return os.fstat(self._file).st_size

    def read(self, begin: int, size: int) -> bytes:
        """Return `size` bytes. Raises RunError if the file has fewer by now."""
        data = os.pread(self._file, size, begin)
        if len(data) < size:
            raise RunError(f"shard {self._path}: became shorter while it was read; restore it")
        return data


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
