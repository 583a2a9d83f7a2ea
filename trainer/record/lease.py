"""One writer per run directory, however many processes believe that they are it."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.errors import CheckpointError, ConfigError

NAME = ".writer"
_MOST = 2**16  # bytes of it
_NO_LOCKS = (
    errno.ENOLCK,
    errno.ENOSYS,
    errno.ENOTSUP,
)  # some cluster file systems: the token alone protects there


class Lease:
    """Held by rank 0 while it writes.

    A POSIX record lock: the kernel drops it when the process dies, and unlike flock's it is not handed to data workers,
    which outlive a killed parent by seconds. Beside it stands a token. A process that was frozen, and whose lock file
    somebody removed, finds another token when it wakes, so `check` before a rename keeps it from publishing.
    """

    def __init__(self, directory: Path, facts: Mapping[str, Any] | None = None):
        """`facts` are kept beside the token. Raises ConfigError, naming host and pid, where another process writes."""
        self.path = directory / NAME
        self._descriptor = _lock(self.path)
        who = {"token": secrets.token_hex(8), "host": socket.gethostname(), "pid": os.getpid()}
        self._held = json.dumps({**who, **(facts or {})})
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, self._held.encode(), 0)
        os.fsync(self._descriptor)
        _held.add(_identity(os.fstat(self._descriptor)))

    def check(self) -> None:
        """Raises CheckpointError if another process has taken the directory over."""
        try:
            is_ours = _identity(self.path.lstat()) == _identity(os.fstat(self._descriptor))
            if is_ours and self._read() == self._held:
                return
        except FileNotFoundError:
            pass
        raise CheckpointError(
            f"{self.path.parent}: another process has taken this run over; nothing was published"
        )

    def release(self) -> None:
        _held.discard(_identity(os.fstat(self._descriptor)))
        os.close(self._descriptor)

    def _read(self) -> str:
        return os.pread(self._descriptor, _MOST, 0).decode(errors="replace")


def last_facts(directory: Path) -> dict[str, Any]:
    """What the last writer of a run directory has kept there, if that was another process; takes nothing."""
    try:
        if _identity((directory / NAME).lstat()) in _held:
            return {}
        with open(
            directory / NAME, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NOFOLLOW)
        ) as file:
            found = _parsed(file.read(_MOST))
    except OSError:
        return {}
    return (
        {}
        if (found.get("host"), found.get("pid")) == (socket.gethostname(), os.getpid())
        else found
    )


def check_free(directory: Path) -> None:
    """Raises ConfigError where a process writes; takes nothing."""
    if (directory / NAME).is_file() and not (directory / NAME).is_symlink():
        os.close(_lock(directory / NAME))


_held = set[
    tuple[int, int]
]()  # closing any descriptor of a file drops the process's own lock on it: not opened again


def _identity(found: os.stat_result) -> tuple[int, int]:
    return found.st_dev, found.st_ino


def _lock(path: Path) -> int:
    if path.exists() and _identity(path.lstat()) in _held:
        raise ConfigError(
            f"run directory {path.parent}: this process writes there already; give run.name=<new>"
        )
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return descriptor
        holder = _parsed(os.pread(descriptor, _MOST, 0))
        os.close(descriptor)
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')} writes there"
        advice = f"wait for its end or give run.name=<new>; if that machine is lost, remove {path}"
        raise ConfigError(f"run directory {path.parent}: {who}; {advice}") from None
    return descriptor


def _parsed(data: bytes) -> dict[str, Any]:
    try:
        found = json.loads(data)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
