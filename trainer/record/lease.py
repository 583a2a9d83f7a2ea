"""One writer per run directory, even if several processes try to write."""

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

from trainer.config.plain_files import parse_json, read_file
from trainer.errors import CheckpointError, ConfigError

NAME = ".writer"
_MOST = 2**16  # bytes of the file that are read
# Some cluster file systems have no locks; there only the token protects.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
# Closing any descriptor of a file drops the process's own lock on it, so do not open it twice.
_held: set[tuple[int, int]] = set()


class Lease:
    """Rank 0's right to write: a POSIX record lock, and a token in the locked file.

    The kernel drops the lock when the process dies. Unlike flock's, it is not inherited by data
    workers, which outlive a killed parent by seconds. A process may be frozen while its lock file
    is removed. It finds another token when it wakes, and `check` before a rename then keeps it
    from publishing.
    """

    def __init__(self, directory: Path, facts: Mapping[str, Any] | None = None):
        """`facts` are saved beside the token.

        Raises ConfigError, naming host and pid, if another process is the writer.
        """
        self.path = directory / NAME
        self._descriptor = _lock(self.path)
        who = {"token": secrets.token_hex(8), "host": socket.gethostname(), "pid": os.getpid()}
        self._held = json.dumps({**who, **(facts or {})})
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, self._held.encode(), 0)
        os.fsync(self._descriptor)
        _held.add(_identity(os.fstat(self._descriptor)))

    def check(self) -> None:
        """Raise CheckpointError if another process has taken over the directory."""
        try:
            is_same = _identity(self.path.lstat()) == _identity(os.fstat(self._descriptor))
            if is_same and self._read() == self._held:
                return
        except FileNotFoundError:
            pass
        why = "another process has taken over this run"
        if not self.path.parent.is_dir():
            why = "the run directory was removed or moved"
        raise CheckpointError(f"{self.path.parent}: {why}; nothing was published")

    def release(self) -> None:
        _held.discard(_identity(os.fstat(self._descriptor)))
        os.close(self._descriptor)

    def _read(self) -> str:
        return os.pread(self._descriptor, _MOST, 0).decode(errors="replace")


def read_facts(directory: Path) -> dict[str, Any]:
    """Return the facts of a run directory's last writer; empty if this process is the writer."""
    path = directory / NAME
    try:
        return {} if _identity(path.lstat()) in _held else _parse(read_file(path, _MOST))
    except OSError:
        return {}


def last_facts(directory: Path) -> dict[str, Any]:
    """Return the facts of the last writer; empty if it was this process."""
    facts = read_facts(directory)
    is_own = (facts.get("host"), facts.get("pid")) == (socket.gethostname(), os.getpid())
    return {} if is_own else facts


def check_free(directory: Path) -> None:
    """Raise ConfigError if a process is writing there; keep no lock."""
    path = directory / NAME
    if path.is_file() and not path.is_symlink():
        os.close(_lock(path))


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _lock(path: Path) -> int:
    if path.exists() and _identity(path.lstat()) in _held:
        why = "this process already writes there; give run.name=<new>"
        raise ConfigError(f"run directory {path.parent}: {why}")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return descriptor
        holder = _parse(os.pread(descriptor, _MOST, 0))
        os.close(descriptor)
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        who = f"process {holder.get('pid', '?')} on {holder.get('host', '?')} writes there"
        advice = f"wait until it exits or give run.name=<new>; if its host is lost, remove {path}"
        raise ConfigError(f"run directory {path.parent}: {who}; {advice}") from None
    return descriptor


def _parse(data: bytes) -> dict[str, Any]:
    try:
        facts = parse_json(data)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}
