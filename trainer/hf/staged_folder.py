"""A folder that is written beside its place, and put there as a whole.

A process that is killed at any moment leaves the old folder or the new one in its place, and a
scratch folder beside it, which the next one for the same place removes.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.base.durable_files import sync_directory
from trainer.base.errors import ConfigError

FULL_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
PROBE_BYTES = 2**20
LOCK_TRIES = 100  # to lock a folder that other processes remove
RENAME_EXCHANGE = 2
AT_FDCWD = -100


@contextmanager
def open_scratch(target: Path) -> Iterator[Path]:
    """Yield an empty folder beside `target` and remove it afterwards, with parents it has needed.

    What a killed process has left there for the same place is removed first. Raises ConfigError if
    another process writes there now.
    """
    missing = [each for each in target.absolute().parents if not each.exists()]
    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = _scratch_of(target)
    lock = -1
    try:
        lock = _lock(scratch, target)
        if (old := scratch / "old").exists() and not os.path.lexists(target):
            old.rename(target)  # a process was killed between two renames
        for left in scratch.iterdir():
            _remove(left)
        yield scratch
    finally:
        if lock >= 0:
            _remove(scratch)
            os.close(lock)
        for folder in missing:
            with suppress(OSError):  # it is not empty
                folder.rmdir()


def _scratch_of(target: Path) -> Path:
    name = hashlib.sha256(os.fsencode(target.name)).hexdigest()[:12]
    return target.parent / f".export-{name}"


def _lock(scratch: Path, target: Path) -> int:
    """Create a folder and lock it, as long as the descriptor that is returned is open."""
    taken = ConfigError(f"{target}: another process writes it; wait for its end")
    for _ in range(LOCK_TRIES):
        with suppress(FileExistsError):
            scratch.mkdir(0o700)
        lock = os.open(scratch, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            status = os.fstat(lock)
            if status.st_uid != os.geteuid():
                raise ConfigError(f"{scratch}: is another user's; give another place")
            with _without_locks():
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            with suppress(FileNotFoundError):
                if os.path.samestat(status, os.lstat(scratch)):
                    return lock
        except BlockingIOError:
            os.close(lock)
            raise taken from None
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # the process before has removed it since
    raise taken


@contextmanager
def _without_locks() -> Iterator[None]:
    """Pass over a file system that has no locks."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def publish(scratch: Path, new: Path, target: Path) -> None:
    """Put the folder `new` into its place. A folder that is there comes into `scratch`."""
    if not os.path.lexists(target):
        new.rename(target)
    elif not _exchange(new, target):
        target.rename(scratch / "old")
        try:
            new.rename(target)
        except BaseException:
            (scratch / "old").rename(target)
            raise
    sync_directory(target.parent)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders at one moment; False where the system or its files cannot."""
    if sys.platform != "linux":
        return False
    library = ctypes.CDLL(None, use_errno=True)
    if not hasattr(library, "renameat2"):
        return False
    names = [os.fsencode(path) for path in (one, other)]
    call = library.renameat2
    return int(call(AT_FDCWD, names[0], AT_FDCWD, names[1], RENAME_EXCHANGE)) == 0


def why_full(error: BaseException, folder: Path) -> str:
    """Return that the disk is full, in the system's words, if that is why `error` was raised.

    Libraries raise their own types for it, some without the reason; then a write shows it.
    """
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    for each in causes:
        for code in FULL_DISK_ERRORS:
            text = os.strerror(code)
            if getattr(each, "errno", None) == code or text in str(each):
                return text
    probe = folder / "probe"
    try:
        with open(probe, "wb", buffering=0) as file:
            rest = PROBE_BYTES
            while rest > 0:
                rest -= file.write(bytes(rest))
            os.fsync(file.fileno())
    except OSError as failed:
        return os.strerror(failed.errno) if failed.errno in FULL_DISK_ERRORS else ""
    finally:
        _remove(probe)
    return ""
