"""Parts of a large file that are shards of their own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from trainer.data.shards.sources import Span


@dataclass(frozen=True)
class Piece:
    """Bytes [begin, end) of a file, with so many rows, that are not divided further."""

    rows: int
    begin: int
    end: int


def join(pieces: Iterable[Piece], most: int, tail: tuple[int, int]) -> Iterator[tuple[int, Span]]:
    """Yield rows and span of parts of at most `most` bytes, or one piece; each has the `tail`."""
    rows, begin, end = 0, 0, 0
    for piece in pieces:
        if rows and piece.end - begin > most:
            yield rows, (begin, end, *tail)
            rows = 0
        if not rows:
            begin = piece.begin
        rows, end = rows + piece.rows, piece.end
    if rows:
        yield rows, (begin, end, *tail)
