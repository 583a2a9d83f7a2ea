"""A folder in which other users may plant files: no link is followed, nothing foreign is written.

All operations take the descriptor of the folder, so one that is renamed and replaced by a link in
between is not entered.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # to open a pipe would wait
# What an open says of a link, a socket, a folder, and a file of another user
_FOREIGN = (errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.EACCES, errno.EPERM)
_TRIES = 100  # while somebody plants anew


@contextmanager
def open_folder(path: Path) -> Iterator[int]:
    """Yield the descriptor of a folder, which is made. Raises OSError if it is a link."""
    path.mkdir(parents=True, exist_ok=True)
    if path.is_symlink():
        raise OSError(errno.ELOOP, f"{path.name} in it is a link")
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield folder
    finally:
        os.close(folder)


def open_to_read(folder: int, name: str) -> int | None:
    """Return the descriptor of a regular file; None if there is none.

    Anything else, and a file that may not be read, is deleted.
    """
    try:
        file = os.open(name, os.O_RDONLY | _FLAGS, dir_fd=folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in _FOREIGN:
            raise
    else:
        if is_regular(file):
            return file
        os.close(file)
    delete(folder, name)
    return None


def open_to_lock(folder: int, name: str) -> int:
    """Return the descriptor of a regular file, made if there is none; anything else is deleted.

    It can be written only if `is_own`.
    """
    for _ in range(_TRIES):
        try:
            file = os.open(name, os.O_RDWR | os.O_CREAT | _FLAGS, 0o666, dir_fd=folder)
        except OSError as error:
            if error.errno not in _FOREIGN:
                raise
            if error.errno in (errno.EACCES, errno.EPERM):
                found = open_to_read(folder, name)  # another user's, which can be locked
                if found is not None:
                    return found
                _check_writable(folder, error)
                continue
        else:
            if is_regular(file):
                return file
            os.close(file)
        delete(folder, name)
    raise OSError(errno.EBUSY, f"{name} is replaced all the time")


def _check_writable(folder: int, error: OSError) -> None:
    if not os.access(".", os.W_OK | os.X_OK, dir_fd=folder, effective_ids=True):
        raise error


def is_regular(file: int) -> bool:
    return stat.S_ISREG(os.fstat(file).st_mode)


def is_own(file: int) -> bool:
    """Return True if this user made an open file, which can be written and has no second name."""
    status = os.fstat(file)
    mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
    is_alone = status.st_uid == os.geteuid() and status.st_nlink == 1
    return is_alone and mode == os.O_RDWR


def is_at(folder: int, name: str, file: int) -> bool:
    """Return True if an open file still bears this name."""
    try:
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(file))


def create(folder: int, name: str) -> int:
    """Return the descriptor of a new file; one of this name is deleted."""
    delete(folder, name)
    return os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS, 0o666, dir_fd=folder)


def delete(folder: int, name: str) -> None:
    """Delete a file, a link or an empty folder. Raises OSError, which names it, for others."""
    is_folder = False
    try:
        is_folder = stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode)
        (os.rmdir if is_folder else os.unlink)(name, dir_fd=folder)
    except FileNotFoundError:
        pass
    except OSError as error:
        what = "a folder" if is_folder else "another user's"
        why = f"{name} is {what} and cannot be deleted ({error.strerror})"
        raise OSError(error.errno, why) from None


def bytes_at(folder: int, names: Sequence[str]) -> int:
    """Return the bytes of those of these files that are there."""
    found = 0
    for name in names:
        with suppress(OSError):
            found += os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
    return found
