"""Files that are complete after a power cut; links are not followed."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

Buffer = bytes | memoryview
BLOCK = 2**22  # bytes read at once


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


def replace_file(path: Path, text: str) -> None:
    """Replace a file as a whole, or not at all. Links with its name are not followed."""
    staged = path.with_name(f".{path.name}.new")
    staged.unlink(missing_ok=True)
    write_file(staged, text.encode(), 0o666)
    os.replace(staged, path)


def read_file(path: Path, most: int) -> tuple[int, bytes]:
    """Return a regular file's size, and its bytes up to a size of `most`. A pipe does not block."""
    with open(path, "rb", opener=open_plain) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        return status.st_size, file.read() if status.st_size <= most else b""


def digest_file(path: Path, most: int) -> tuple[int, str]:
    """Return a regular file's size and SHA-256, read block by block up to a size of `most`."""
    with open(path, "rb", buffering=0, opener=open_plain) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        digest = hashlib.sha256()
        while status.st_size <= most and (block := file.read(BLOCK)):
            digest.update(block)
        return status.st_size, digest.hexdigest()


def open_plain(name: str, flags: int) -> int:
    """Open a file, as the opener of `open`, without following a link or waiting for a pipe."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
