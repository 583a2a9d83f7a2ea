"""The run directory: its files, and the lease that makes one process its writer."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import stat
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

from trainer.base.durable_files import replace_file
from trainer.base.errors import CheckpointError, ConfigError
from trainer.base.plain_files import parse_json, read_file, read_json, read_lines, strict
from trainer.core.config.saved_config import CONFIG
from trainer.core.distributed.owner import Owner

METRICS = "metrics.jsonl"
EXIT = "exit.json"
WRITER = ".writer"
PROOF = "proof.txt"  # lines of the newest start's proof, for the card of an export
BAD_STEP = "bad_step"  # in metrics.jsonl: why a step was skipped
_FILES_OF_A_RUN = (CONFIG, EXIT, METRICS, PROOF, WRITER)
_FOLDERS = ("checkpoints", "tensorboard")
MOST_STEPS_OF_A_RUN = 2**53
MOST_OF_EXIT = 2**20  # bytes
_EXIT: dict[str, tuple[type, ...]] = {
    **{"code": (int,), "reason": (str,), "step": (int,)},
    **{"best": (int, float), "metrics": (dict,)},
}


def make_timestamped(base: Path) -> Path:
    """Create a new directory in `base`, named by the time."""
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    path = base / stamp
    numbers = itertools.count(2)
    while True:
        try:
            path.mkdir(parents=True)
            return path
        except FileExistsError:
            path = base / f"{stamp}_{next(numbers)}"


def check_plain(directory: Path) -> None:
    """Raise ConfigError if a run's file or folder is a link or a pipe: writes would follow it."""
    for name in (*_FILES_OF_A_RUN, *_FOLDERS):
        try:
            mode = (directory / name).lstat().st_mode
        except OSError:
            continue
        is_file = name in _FILES_OF_A_RUN
        if not (stat.S_ISREG(mode) if is_file else stat.S_ISDIR(mode)):
            must = f"{name} must be a plain {'file' if is_file else 'folder'}, not a link"
            advice = "remove it or give run.name=<new>"
            raise ConfigError(f"run directory {directory}: {must}; {advice}")


def check_writable(path: Path) -> None:
    """Raise ConfigError if a directory cannot be created or written; create nothing."""
    existing = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not existing.is_dir():
        why = f"{path} cannot be created, {existing} is not a directory"
        raise ConfigError(f"run.dir: {why}; choose another run.dir")
    if not os.access(existing, os.W_OK | os.X_OK):
        why = f"{path} cannot be written, {existing} is not writable"
        advice = "choose another run.dir, and with run.resume also a run.name"
        raise ConfigError(f"run.dir: {why}; {advice}")


def read_evaluation(directory: Path, step: int) -> dict[str, float]:
    """Return the evaluation of `step` in metrics.jsonl, which a resume does not repeat."""
    return {
        name: value
        for at, name, value in read_values(directory)
        if at == step and name.startswith("eval/") and value is not None
    }


def read_values(directory: Path) -> Iterator[tuple[int, str, Any]]:
    """Yield (step, name, value) of a run's metrics.jsonl, as `read_entries` reads it."""
    for _, entry in read_entries(directory / METRICS):
        step = entry.pop("step")
        yield from ((step, name, value) for name, value in entry.items())


def read_entries(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (line, its values) of a metrics.jsonl, if it exists; skip a damaged line.

    Raises ConfigError for a link or a pipe, and for a file that is too large.
    """
    if not path.exists():
        return
    if path.is_symlink() or not path.is_file():
        raise ConfigError(f"{path}: must be a plain file, not a link; remove it")
    try:
        yield from parse_entries(read_lines(path))
    except OSError as error:
        advice = "move it out of the run directory"
        raise ConfigError(f"{path}: {error.strerror}; {advice}") from None


def parse_entries(lines: Iterable[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (line, its values) of lines of a metrics.jsonl; skip what is no entry."""
    for line in lines:
        with suppress(ValueError):
            entry = parse_json(line)
            step = entry.get("step") if isinstance(entry, dict) else None
            if type(step) is int and 0 <= step < MOST_STEPS_OF_A_RUN:
                yield line, entry


def read_run(directory: str | Path) -> dict[str, list[Any]]:
    """Return the curves of a run as a table: a list of values per name, a row per step.

    Steps without a value of that name have None. Raises ConfigError if it is no run directory.

        pandas.DataFrame(read_run("runs/cifar/first")).plot("step", "train/loss")
        polars.DataFrame(read_run("runs/cifar/first"))
    """
    path = Path(directory)
    if not (path / CONFIG).is_file():
        raise ConfigError(f"{directory}: has no {CONFIG}; give a run directory")
    curves: dict[str, dict[int, Any]] = {}
    for step, name, value in read_values(path):
        if isinstance(value, (int, float)):
            curves.setdefault(name, {})[step] = value
    steps = sorted({step for curve in curves.values() for step in curve})
    table: dict[str, list[Any]] = {"step": [*steps]}
    return table | {name: [curve.get(step) for step in steps] for name, curve in curves.items()}


def write_exit(directory: Path, code: int, reason: str, **facts: Any) -> None:
    """Write exit.json, since torchrun turns every exit code other than 0 into 1."""
    content = strict({"code": code, "reason": reason, **facts})
    replace_file(directory / EXIT, json.dumps(content, indent=1) + "\n")


def read_exit(directory: Path) -> dict[str, Any]:
    """Return the facts of exit.json that have their types; none if it is missing or damaged."""
    try:
        raw = read_json(directory / EXIT, MOST_OF_EXIT)
    except (OSError, ValueError):
        return {}
    facts = raw if isinstance(raw, dict) else {}
    facts = {name: facts[name] for name in _EXIT if type(facts.get(name)) in _EXIT[name]}
    if "metrics" in facts:
        values = facts["metrics"].items()
        facts["metrics"] = {name: v for name, v in values if type(v) in (int, float, type(None))}
    return facts


_MOST_OF_WRITER = 2**16  # bytes of the file that are read
_GONE = "the run directory was removed or moved"
# Some cluster file systems have no locks; there only the token protects.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EINVAL)
_LOCKED = (errno.EACCES, errno.EAGAIN)  # by another process
_OFD = getattr(fcntl, "F_OFD_SETLK", None)  # Linux
_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
# The descriptors of this process by file. Where only POSIX locks exist, closing any descriptor of a
# file drops the process's lock on it, so do not open it twice.
_held: dict[tuple[int, int], int] = {}


def _leave_to_parent() -> None:
    """Close the descriptors in a forked child: data workers outlive a killed parent by seconds."""
    for descriptor in _held.values():
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_leave_to_parent)


class Lease:
    """Rank 0's right to write: a lock of the open file, and a token in it.

    The kernel drops the lock when the process dies. Unlike a POSIX lock, it remains when the task
    reads or copies the directory. A process may be frozen while its lock file is removed. It finds
    another token when it wakes, and `check` before a rename then keeps it from publishing.
    """

    def __init__(self, directory: Path, facts: Mapping[str, Any] | None = None):
        """`facts` are saved beside the token.

        Raises ConfigError, naming host and pid, if another process is the writer.
        """
        self.path = directory / WRITER
        self._place = _identity_of(directory.parent)
        self._repairs: list[str] = []
        self._turn = threading.Lock()  # checkpoints are saved in a thread
        self._beside: tuple[Path, str] | None = None
        self._beside_identity: tuple[int, int] | None = None
        self._descriptor = _lock(self.path)
        self._identity = _identity(os.fstat(self._descriptor))
        own = Owner.new()
        self._known = (own.token, self._read().get("token"), None)  # a backup has the one before
        self._text = json.dumps({**own.facts(), **(facts or {})})
        self._write()
        _held[self._identity] = self._descriptor

    def write_beside(self, path: Path, text: str) -> None:
        """Write a file of the directory that every writer replaces when it begins."""
        replace_file(path, text)
        self._beside = (path, text)
        self._beside_identity = _identity_of(path)

    def check(self) -> None:
        """Repair the lock and its file, if they were changed and nobody else writes.

        Raises CheckpointError if another process has taken over the directory, or if it is gone.
        """
        with self._turn:
            try:
                if _identity_of(self.path) == self._identity:
                    self._keep()
                else:
                    self._renew()
            except OSError as error:
                why = f"{self.path.name}: {error.strerror}"
                if not self.path.parent.is_dir():
                    why = _GONE
                raise CheckpointError(self._line(why)) from None

    def _keep(self) -> None:
        """Lock the file again, which is still the same: a server may have lost the lock."""
        facts = self._read()
        if facts.get("token") not in self._known or not _try_lock(self._descriptor):
            raise CheckpointError(self._line(_describe_successor(facts)))
        if facts.get("token") != self._known[0]:
            self._write()
            self._repairs.append(f"{self.path} was changed, and is written again")

    def _renew(self) -> None:
        """Lock the file that has the name now: a copy, or a new one."""
        what = "was removed" if _identity_of(self.path) is None else "was replaced by a copy"
        beside = self._beside
        if what == "was removed" and self._is_beside_replaced():
            raise CheckpointError(self._line(_describe_successor({})))
        if _identity_of(self.path.parent.parent) != self._place:
            raise CheckpointError(self._line(_GONE))  # TensorBoard's writer may make it anew
        if not self.path.parent.is_dir():
            what = "was removed or moved with its directory"
            self.path.parent.mkdir()
        try:
            descriptor = _lock(self.path)
        except ConfigError:
            facts = _parse(read_file(self.path, _MOST_OF_WRITER))
            raise CheckpointError(self._line(_describe_successor(facts))) from None
        facts = _parse(os.pread(descriptor, _MOST_OF_WRITER, 0))
        if facts.get("token") not in self._known:
            os.close(descriptor)
            raise CheckpointError(self._line(_describe_successor(facts)))
        self.release()
        self._descriptor = descriptor
        self._identity = _identity(os.fstat(descriptor))
        _held[self._identity] = descriptor
        self._write()
        if beside is not None:
            if _identity_of(beside[0]) is None:
                replace_file(*beside)
            self._beside_identity = _identity_of(beside[0])
        self._repairs.append(f"{self.path} {what}; nobody else writes there, so the run continues")

    def _is_beside_replaced(self) -> bool:
        """Return True if a successor has begun, though its token is gone too."""
        beside = self._beside
        if beside is None or not beside[0].is_file():
            return False
        return _identity_of(beside[0]) != self._beside_identity

    def take_repairs(self) -> list[str]:
        """Return a line for each repair since the last call."""
        repairs = self._repairs
        self._repairs = []
        return repairs

    def release(self) -> None:
        if _held.pop(self._identity, None) is not None:  # None in a forked child
            os.close(self._descriptor)

    @staticmethod
    def check_free(directory: Path) -> None:
        """Raise ConfigError if a process is writing there; keep no lock."""
        path = directory / WRITER
        if path.is_file() and not path.is_symlink():
            os.close(_lock(path))

    def _line(self, why: str) -> str:
        return f"{self.path.parent}: {why}; nothing was published"

    def _read(self) -> dict[str, Any]:
        return _parse(os.pread(self._descriptor, _MOST_OF_WRITER, 0))

    def _write(self) -> None:
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, self._text.encode(), 0)
        os.fsync(self._descriptor)


def _describe_successor(facts: Mapping[str, Any]) -> str:
    who = f" ({Owner.of(facts).describe()})" if "pid" in facts else ""
    return f"another process{who} has taken over this run"


def read_facts(directory: Path) -> dict[str, Any]:
    """Return the facts of a run directory's last writer; empty if this process is the writer."""
    path = directory / WRITER
    try:
        return {} if _identity_of(path) in _held else _parse(read_file(path, _MOST_OF_WRITER))
    except OSError:
        return {}


def last_facts(directory: Path) -> dict[str, Any]:
    """Return the facts of the last writer; empty if it was this process."""
    facts = read_facts(directory)
    return {} if Owner.of(facts).is_this_process else facts


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def _identity_of(path: Path) -> tuple[int, int] | None:
    try:
        return _identity(path.lstat())
    except (FileNotFoundError, NotADirectoryError):
        return None


def _lock(path: Path) -> int:
    if _identity_of(path) in _held:
        why = "this process already writes there; give run.name=<new>"
        raise ConfigError(f"run directory {path.parent}: {why}")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        is_locked = _try_lock(descriptor)
    except OSError:
        os.close(descriptor)
        raise
    if not is_locked:
        holder = Owner.of(_parse(os.pread(descriptor, _MOST_OF_WRITER, 0)))
        os.close(descriptor)
        who = f"{holder.describe()} writes there"
        advice = f"wait until it exits or give run.name=<new>; if its host is lost, remove {path}"
        if holder.is_stopped:
            who = f"process {holder.pid}, which writes there, is stopped"
            pid = holder.pid
            advice = f"run kill -CONT {pid} to continue it, or kill -KILL {pid} to end it"
        raise ConfigError(f"run directory {path.parent}: {who}; {advice}")
    return descriptor


def _try_lock(descriptor: int) -> bool:
    """Lock a file, or keep the lock; return False if another process has it.

    A lock of the open file where there is one, else a POSIX lock, else none.
    """
    for is_ofd in (True, False):
        try:
            if not is_ofd:
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            elif _OFD is not None:
                fcntl.fcntl(descriptor, _OFD, _WHOLE_FILE)
            else:
                continue
        except OSError as error:
            if error.errno in _LOCKED:
                return False
            if error.errno not in _NO_LOCKS:
                raise
        else:
            return True
    return True


def _parse(data: bytes) -> dict[str, Any]:
    try:
        facts = parse_json(data)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}
