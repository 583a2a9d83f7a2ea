"""Files that are there whole after a power cut, and are no link to somewhere else."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


def write_file(path: Path, data: bytes | memoryview, mode: int = 0o600) -> None:
    """Write a new file and fsync it."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(path, flags, mode)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_file(path: Path, most: int) -> tuple[int, bytes]:
    """A regular file's size and, if that is at most `most`, its bytes. A pipe is not waited for."""
    with open(path, "rb", opener=open_plain) as file:
        found = os.fstat(file.fileno())
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "is not a regular file")
        return found.st_size, file.read() if found.st_size <= most else b""


def open_plain(name: str, flags: int) -> int:
    """An opener for `open`: a link is not followed, a pipe not waited for."""
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
