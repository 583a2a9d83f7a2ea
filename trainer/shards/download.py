"""Downloads that survive a bad network: they are retried, resumed and verified."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

from trainer.base.errors import RunError, ServerError, one_line
from trainer.base.plain_files import hash_rest
from trainer.shards.sources import (
    SOURCE_CHUNK_BYTES,
    ResumeError,
    Source,
    Span,
    TemporaryError,
    Wait,
    check_wait,
    is_lasting,
)

DOWNLOADS = 8  # at once, of one process
DOWNLOAD_TRIES = 8  # in a row without a new byte: about a minute
FIRST_DELAY_S = 0.25
MOST_DELAY_S = 20.0
CHECK = "it was changed or is damaged: python -m trainer.shards check"
_CHANCE = random.Random()  # the run's own generators are not touched  # noqa: S311


def read_whole(
    source: Source, name: str, most_bytes: int, check: Callable[[bytes], None] = lambda head: None
) -> bytes:
    """Return a small file. Raises OSError if it does not exist, RunError after eight tries.

    `check` gets its first bytes, and may raise ConfigError before the rest is read.
    """
    url = f"{source.url}/{name}"

    def read() -> bytes:
        content = bytearray()
        try:
            for block in source.stream(name):
                check_wait(f"reading {url}")
                if not content:
                    check(bytes(block[:SOURCE_CHUNK_BYTES]))
                content += block
                if len(content) > most_bytes:
                    raise RunError(f"{url}: must have at most {most_bytes:,} bytes")
        except ResumeError as error:
            raise FileNotFoundError(str(error)) from None
        return bytes(content)

    with Wait(f"reading {url}") as wait:
        return _retried(read, url, wait)


def _retried(action: Callable[[], Any], url: str, wait: Wait) -> Any:
    for attempt in range(DOWNLOAD_TRIES):
        try:
            return action()
        except TemporaryError as error:
            if attempt == DOWNLOAD_TRIES - 1:
                raise _gave_up(url, one_line(error)) from None
        wait.pause(_delay(attempt))


def _delay(attempt: int) -> float:
    """Return seconds to wait: not all ranks try again at once."""
    delay = min(MOST_DELAY_S, FIRST_DELAY_S * 2**attempt)
    return delay * (0.5 + _CHANCE.random())


def _gave_up(url: str, why: str) -> ServerError:
    return ServerError(f"""{url}: cannot be read after {DOWNLOAD_TRIES} tries: {why};
        check the server and the network, and start again: the run continues where it was""")


def download(
    source: Source,
    name: str,
    file: BinaryIO,
    size: int | None,
    sha256: str,
    span: Span | None = None,
    grow: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Write `name` to an empty or partly written file, which may be the rest of an earlier try.

    Of a `span` the bytes are written at the places that they have in the whole file. `grow` is
    called with the bytes of a file of unknown `size` before they are written; it may raise.

    Without a digest each try begins at the start, since the file may have changed in between. A
    file is damaged if it differs in the same way twice in a row: bytes that change on their way
    differ each time. Raises RunError if it is damaged or cannot be read, ServerError after eight
    tries without a new byte, and OSError for an error of the disk.
    """
    with Wait(f"downloading {source.url}/{name}") as wait:
        _download(source, name, file, size, sha256, span, grow, wait)


def _download(
    source: Source,
    name: str,
    file: BinaryIO,
    size: int | None,
    sha256: str,
    span: Span | None,
    grow: Callable[[int], None],
    wait: Wait,
) -> None:
    url = f"{source.url}/{name}"
    attempt = 0
    farthest = 0
    before = ""
    most = size if span is None else span.tail_end
    while True:
        if not sha256 or file.seek(0, os.SEEK_END) > (most or 0):
            file.truncate(0)
        farthest = max(farthest, file.seek(0, os.SEEK_END))
        try:
            why = _continue(source, name, file, size, sha256, span, grow)
            if not why:
                return
            if why == before:
                raise RunError(f"{url}: {why}; {CHECK} {source.url}")
            before = why
            file.truncate(0)
        except ResumeError as error:
            if not file.seek(0, os.SEEK_END):  # else it is read from its start
                raise RunError(f"{url}: cannot be read: {one_line(error)}") from None
            file.truncate(0)
            continue
        except TemporaryError as error:
            why = one_line(error)
        attempt = 0 if file.seek(0, os.SEEK_END) > farthest else attempt + 1
        if attempt == DOWNLOAD_TRIES:
            raise _gave_up(url, why) from None
        wait.pause(_delay(attempt))


def _continue(
    source: Source,
    name: str,
    file: BinaryIO,
    size: int | None,
    sha256: str,
    span: Span | None,
    grow: Callable[[int], None],
) -> str:
    """Write the rest of a file; return how the whole differs from its index, empty if it does not.

    Raises TemporaryError if it ends early.
    """
    written = file.seek(0, os.SEEK_END)
    hasher = hashlib.sha256()
    done = 0
    for begin, end in parts_of(span):
        offset = max(begin, written if end is None else min(written, end))
        file.seek(begin)
        hash_rest(file, offset - begin, hasher)
        done += offset - begin
        if end is None and done and done == size:
            break
        for block in _blocks(source, name, offset, end) if offset != end else ():
            check_wait(f"downloading {name}")
            done += len(block)
            if size is None:
                grow(done)
            elif done > size:
                return f"has more than the {size:,} bytes of its index"
            hasher.update(block)
            rest = memoryview(block)
            while rest:  # a raw file writes as much as fits
                rest = rest[file.write(rest) :]
    file.flush()
    if size is not None and done < size:
        return f"has {done:,} bytes, and {size:,} in its index"
    if sha256 and hasher.hexdigest() != sha256:
        return f"has SHA-256 {hasher.hexdigest()[:12]}, and its index {sha256[:12]}"
    return ""


def _blocks(source: Source, name: str, begin: int, end: int | None) -> Iterator[bytes]:
    """Yield the bytes of a file. Raises RunError for an error of the source that will come again.

    An OSError is thus one of the disk.
    """
    try:
        yield from source.stream(name, begin, end)
    except OSError as error:
        if not is_lasting(error):
            raise TemporaryError(one_line(error)) from None
        raise RunError(f"""{source.url}/{name}: cannot be read: {one_line(error)}; check
            the {"credentials" if isinstance(error, PermissionError) else "address"}""") from None


def parts_of(span: Span | None) -> Sequence[tuple[int, int | None]]:
    """Return (begin, end) of the bytes of a file that are a shard; end is None for a whole file."""
    if span is None:
        return [(0, None)]
    return [
        (begin, end)
        for begin, end in ((span.begin, span.end), (span.tail, span.tail_end))
        if begin < end
    ]


def digest_file(file: BinaryIO, span: Span | None = None) -> str:
    """Return the SHA-256 of a file of any size, or of a part of it."""
    hasher = hashlib.sha256()
    for begin, end in parts_of(span):
        file.seek(begin)
        hash_rest(file, None if end is None else end - begin, hasher)
    return hasher.hexdigest()
