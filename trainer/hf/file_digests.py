"""Digests of files that are read once: data, and weights of a model."""

import hashlib
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from trainer.shards.cache import default_folder
from trainer.shards.long_work import watched
from trainer.shards.sources import open_file

DIGEST_BLOCK_BYTES = 2**20


def digest_files(paths: Sequence[Path], is_verified: bool = False) -> str:
    """Return the SHA-256 of the names and contents of files.

    It is noted in the cache for their places, sizes and times, also that of the last change of
    their facts, which no copy and no `touch` keeps; so each rank and each start reads the note, and
    only one that `is_verified` the files. Raises OSError for one that is not a regular file.
    """
    stamp = hashlib.sha256()
    for path in paths:
        status = path.stat()
        facts = (status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        stamp.update(repr((str(path.resolve()), *facts)).encode(errors="replace"))
    folder = default_folder().expanduser() / "digests"
    note = folder / f"{stamp.hexdigest()[:40]}.sha256"
    if not is_verified:
        with suppress(OSError):
            return note.read_text()
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode(errors="replace") + _digest(path))
    with suppress(OSError):  # then each rank reads the files
        write_whole(note, lambda staged: staged.write_text(digest.hexdigest()))
    return digest.hexdigest()


def _digest(path: Path) -> bytes:
    digest = hashlib.sha256()
    with open_file(path) as file:
        blocks = iter(lambda: file.read(DIGEST_BLOCK_BYTES), b"")
        for block in watched(blocks, f"reading {path}", "MiB"):
            digest.update(block)
    return digest.digest()


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Have `write` make a file beside, then rename it: another process may write the same.

    A failure, such as a full disk, leaves nothing. Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        write(staged)
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)
