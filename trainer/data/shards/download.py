"""Downloads that survive a bad network: they are retried, resumed and verified."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from trainer.config.plain_files import hash_rest
from trainer.data.shards.errors import ServerError
from trainer.data.shards.sources import ResumeError, Source, Span, TemporaryError
from trainer.errors import RunError, one_line

DOWNLOADS = 8  # at once, of one process
TRIES = 8  # in a row without a new byte: about a minute
FIRST_DELAY_S = 0.25
MOST_DELAY_S = 20.0
NO_PARTS = ("the server sends no parts of files", "index them with a larger shard_mb")
CHECK = "it was changed or is damaged: python -m trainer.shards check"
_CHANCE = random.Random()  # the run's own generators are not touched  # noqa: S311


def read_whole(source: Source, name: str, most_bytes: int) -> bytes:
    """Return a small file. Raises OSError if it does not exist, RunError after eight tries."""

    def read() -> bytes:
        found = bytearray()
        for block in source.stream(name):
            found += block
            if len(found) > most_bytes:
                raise RunError(f"{source.url}/{name}: must have at most {most_bytes:,} bytes")
        return bytes(found)

    return _retried(read, f"{source.url}/{name}")


def _retried(action: Callable[[], Any], place: str) -> Any:
    for attempt in range(TRIES):
        try:
            return action()
        except TemporaryError as error:
            if attempt == TRIES - 1:
                raise _gave_up(place, error) from None
        _wait(attempt)


def _wait(attempt: int) -> None:
    delay = min(MOST_DELAY_S, FIRST_DELAY_S * 2**attempt)
    time.sleep(delay * (0.5 + _CHANCE.random()))  # not all ranks at once


def _gave_up(place: str, error: Exception) -> ServerError:
    advice = "check the server and the network, and start again: the run continues where it was"
    return ServerError(f"{place}: cannot be read after {TRIES} tries: {one_line(error)}; {advice}")


def download(
    source: Source,
    name: str,
    file: BinaryIO,
    size: int | None,
    sha256: str,
    span: Span | None = None,
) -> None:
    """Write `name` to an empty or partly written file, which may be the rest of an earlier try.

    Of a `span` the bytes are written at the places that they have in the whole file.

    Without a digest each try begins at the start, since the file may have changed in between. A
    file of another digest or size is read once more: it may have been damaged on its way. Raises
    RunError if it cannot be read, or still differs, and OSError for a full disk.
    """
    place = f"{source.url}/{name}"
    attempt = 0
    differing = 0
    farthest = 0
    while True:
        if not sha256:
            file.truncate(0)
        farthest = max(farthest, file.seek(0, os.SEEK_END))
        try:
            why = _continue(source, name, file, size, sha256, span)
            if not why:
                return
            differing += 1
            if differing == 2:
                raise RunError(f"{place}: {why}; {CHECK} {source.url}")
            file.truncate(0)
        except ResumeError:
            if span is not None and not file.seek(0, os.SEEK_END):
                raise RunError(f"{place}: {'; '.join(NO_PARTS)}") from None
            file.truncate(0)
        except TemporaryError as error:
            attempt = 0 if file.seek(0, os.SEEK_END) > farthest else attempt + 1
            if attempt == TRIES:
                raise _gave_up(place, error) from None
            _wait(attempt)
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise
            is_login = isinstance(error, PermissionError)
            advice = f"check the {'credentials' if is_login else 'address'}"
            raise RunError(f"{place}: cannot be read: {one_line(error)}; {advice}") from None


def _continue(
    source: Source, name: str, file: BinaryIO, size: int | None, sha256: str, span: Span | None
) -> str:
    """Write the rest of a file; return how the whole differs from its index, empty if it does not.

    Raises TemporaryError if it ends early.
    """
    written = file.seek(0, os.SEEK_END)
    hasher = hashlib.sha256()
    done = 0
    for begin, end in parts_of(span):
        place = max(begin, written if end is None else min(written, end))
        file.seek(begin)
        hash_rest(file, place - begin, hasher)
        done += place - begin
        if end is None and done and done == size:
            break
        for block in source.stream(name, place, end) if place != end else ():
            rest = memoryview(block)
            hasher.update(rest)
            done += len(rest)
            while rest:  # a raw file writes as much as fits
                rest = rest[file.write(rest) :]
            if size is not None and done > size:
                break
    file.flush()
    if size is not None and done < size:
        raise TemporaryError(f"it ended after {done:,} of {size:,} bytes")
    if size is not None and done > size:
        return f"has more than the {size:,} bytes of its index"
    if sha256 and hasher.hexdigest() != sha256:
        return f"has SHA-256 {hasher.hexdigest()[:12]}, and its index {sha256[:12]}"
    return ""


def parts_of(span: Span | None) -> Sequence[tuple[int, int | None]]:
    """Return (begin, end) of the bytes of a file that are a shard; end is None for a whole file."""
    if span is None:
        return [(0, None)]
    return [
        (begin, end)
        for begin, end in ((span.begin, span.end), (span.tail, span.tail_end))
        if begin < end
    ]


def digest_file(path: Path, span: Span | None = None) -> str:
    """Return the SHA-256 of a file of any size, or of a part of it."""
    hasher = hashlib.sha256()
    with open(path, "rb") as file:
        for begin, end in parts_of(span):
            file.seek(begin)
            hash_rest(file, None if end is None else end - begin, hasher)
    return hasher.hexdigest()
