"""Files that survive a power cut, and digests of files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer.base.plain_files import hash_rest, open_regular

Buffer = bytes | memoryview


@contextmanager
def open_new(path: Path, mode: int = 0o600) -> Iterator[Callable[[Buffer], None]]:
    """Create a file, yield a function that appends bytes to it, and fsync it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(path, flags, mode)

    def write(data: Buffer) -> None:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]

    try:
        yield write
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(path: Path, data: Buffer, mode: int = 0o600) -> None:
    """Write a new file and fsync it."""
    with open_new(path, mode) as write:
        write(data)


def replace_file(path: Path, content: str | bytes) -> None:
    """Replace a file as a whole, or not at all. Links with its name are not followed."""
    staged = path.with_name(f".{path.name}.new")
    staged.unlink(missing_ok=True)
    data = content.encode() if isinstance(content, str) else content
    write_file(staged, data, 0o666)
    os.replace(staged, path)


def read_sized(path: Path, most: int) -> tuple[int, bytes]:
    """Return a regular file's size, and its bytes up to a size of `most`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        return size, file.read(size) if size <= most else b""


def digest_file(path: Path, most: int) -> tuple[int, str]:
    """Return a regular file's size and SHA-256, read block by block up to a size of `most`."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        digest = hash_rest(file) if size <= most else hashlib.sha256()
        return size, digest.hexdigest()


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
