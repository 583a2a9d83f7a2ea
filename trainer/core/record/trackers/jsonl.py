"""metrics.jsonl and metrics.csv: one entry a log, appended, and repaired after a crash."""

from __future__ import annotations

import csv
import json
import os
import stat
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.base.durable_files import replace_file
from trainer.base.errors import CheckpointError, counted
from trainer.base.plain_files import open_plain, strict
from trainer.core.checkpoints import run_directory
from trainer.core.checkpoints.disk import Disk
from trainer.core.checkpoints.run_directory import Lease
from trainer.core.config.saved_config import CONFIG
from trainer.core.record.trackers import Say, Sink


class CsvFile(Sink):
    """metrics.csv: a row (step, name, value) for each value of metrics.jsonl."""

    def __init__(self, directory: Path, say: Say):
        """Write anew what metrics.jsonl has, which may have been cut at a resume."""
        path = directory / "metrics.csv"
        self._say = say
        self._file: Any = None
        entries = [
            entry for _, entry in run_directory.read_entries(directory / run_directory.METRICS)
        ]
        try:
            run_directory.replace_file(path, "step,name,value\n")
            self._file = path.open("a", encoding="utf-8", newline="")
        except OSError as error:
            self._fail(error)
        for entry in entries:
            step = entry.pop("step")  # the rest are curves, and words of the ledger
            self.scalars(step, {k: v for k, v in entry.items() if not isinstance(v, str)})

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if self._file is None:
            return
        try:
            rows = [(step, name, value) for name, value in values.items()]
            csv.writer(self._file, lineterminator="\n").writerows(rows)
            self._file.flush()
        except OSError as error:
            self._fail(error)

    def close(self) -> None:
        if self._file is not None:
            with suppress(OSError):
                self._file.close()

    def _fail(self, error: OSError) -> None:
        self._file = None
        why = f"{error.strerror}; the run continues without it"
        self._say(f"warning: log.trackers: metrics.csv: {why}")


MOST_RECENT = 10_000  # lines that can be restored after another program has shortened the file
CHECK_S = 1.0  # between two checks of the lease
OF_PROOF = ("proof ", "with more ", "warning: this run differs ")  # beginnings of its lines


class RecordFiles(Sink):
    """metrics.jsonl, exit.json, and config.json of a resumed run.

    Entries of an earlier process after `step` are dropped.
    """

    def __init__(
        self,
        directory: Path,
        step: int,
        disk: Disk,
        lease: Lease,
        say: Callable[[str], None],
        settings: str = "",
    ):
        """`settings` is the text of config.json, if that has those of an earlier session."""
        self._directory = directory
        self._disk = disk
        self._lease = lease
        self._say = say
        self._settings = settings
        self._proof: list[str] = []
        self._checked_s = time.monotonic()
        path = directory / run_directory.METRICS
        _drop_beyond(path, step)
        self._metrics = MetricsFile(path, self._check, self._warn)

    def say(self, text: str) -> None:
        """Write the lines of the start's proof, which the card of an export shows."""
        if not text.startswith(OF_PROOF):
            return
        self._proof.append(text)
        with suppress(OSError):  # the run can go on without it
            content = "".join(f"{line}\n" for line in self._proof)
            replace_file(self._directory / run_directory.PROOF, content)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.note(step, strict(values))

    def profile(self, step: int) -> None:
        """Write the settings after the first step that was trained with them."""
        if not self._settings:
            return
        try:
            self._lease.write_beside(self._directory / CONFIG, self._settings)
        except OSError as error:
            self._disk.report(error, f"writing {CONFIG}")
        self._settings = ""

    def note(self, step: int, facts: Mapping[str, Any]) -> None:
        try:
            if time.monotonic() - self._checked_s > CHECK_S:
                self._check()
            self._metrics.write(json.dumps({"step": step, **facts}) + "\n")
        except CheckpointError as error:  # the directory is another process's, or is gone
            self._disk.fail(error)
        except OSError as error:
            self._disk.report(error, "writing metrics.jsonl")

    def flush(self) -> None:
        self._check()
        self._metrics.sync()

    def exit(self, code: int, reason: str, facts: Mapping[str, Any]) -> None:
        if code and (self._directory / run_directory.EXIT).is_file():
            return  # a watcher is ending this process and has written the reason
        try:
            self._check()
            run_directory.write_exit(self._directory, code, reason, **facts)
        except CheckpointError:
            return  # another process has taken over the directory
        except OSError as error:
            self._warn(f"{self._directory / run_directory.EXIT}: {error.strerror}")

    def close(self) -> None:
        with suppress(OSError, CheckpointError):  # a full disk, already reported
            self._metrics.close()
        self._lease.release()

    def _check(self) -> None:
        """Repair the lease if necessary. Raises CheckpointError if it is another process's."""
        self._lease.check()
        self._checked_s = time.monotonic()
        for line in self._lease.take_repairs():
            self._warn(line)

    def _warn(self, text: str) -> None:
        self._say(f"warning: {text}")


class MetricsFile:
    """metrics.jsonl, which an editor, sed -i, logrotate or a person may replace, shorten or remove.

    The size and the identity of the file are compared before each write.
    """

    def __init__(self, path: Path, check_owner: Callable[[], None], warn: Callable[[str], None]):
        """`check_owner` raises if the other file is that of another writer."""
        self._path = path
        self._check_owner = check_owner
        self._warn = warn
        self._turn = threading.RLock()  # a checkpoint in the background syncs the file
        self._recent: deque[str] = deque(maxlen=MOST_RECENT)
        self._unwritten = b""
        self._last = b""  # the line that was written last
        self._is_barred = False
        self._descriptor = self._open()
        self._size = os.fstat(self._descriptor).st_size

    def write(self, line: str) -> None:
        """Append a line. After an OSError it is written with the next one."""
        with self._turn:
            self._recent.append(line)
            self._unwritten += line.encode()
            self._follow()
            self._write()

    def sync(self) -> None:
        with self._turn:
            self._follow()
            self._write()
            os.fsync(self._descriptor)

    def close(self) -> None:
        with self._turn:
            try:
                self._follow()
                self._write()
                if self._is_barred and not os.fstat(self._descriptor).st_nlink:
                    kept_path = self._path.with_name(f"kept-{self._path.name}")
                    replace_file(kept_path, _read(self._descriptor))
                    self._warn(f"{self._path}: is not a file, its lines are in {kept_path.name}")
            finally:
                os.close(self._descriptor)

    def _open(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return open_plain(str(self._path), flags)

    def _write(self) -> None:
        try:
            while self._unwritten:
                self._unwritten = self._unwritten[os.write(self._descriptor, self._unwritten) :]
            self._last = self._recent[-1].encode() if self._recent else b""
        finally:
            self._size = os.fstat(self._descriptor).st_size

    def _follow(self) -> None:
        """Continue in the file that has the name now, with the lines that it lacks."""
        own = os.fstat(self._descriptor)
        try:
            other = self._path.lstat()
        except FileNotFoundError:
            other = None
        if other is not None and os.path.samestat(own, other):
            if own.st_size != self._size and not self._is_appended(own.st_size):
                what = f"another program changed its {self._size:,} bytes to {own.st_size:,}"
                self._restore(self._recent, what)
            return
        if other is not None and not stat.S_ISREG(other.st_mode):
            if not self._is_barred:
                why = "is not a file any more: the lines are kept until it is removed"
                self._warn(f"{self._path}: {why}")
            self._is_barred = True
            return
        self._check_owner()
        written = _read(self._descriptor).splitlines(keepends=True)
        descriptor = self._open()
        os.close(self._descriptor)
        self._descriptor = descriptor
        self._is_barred = False
        what = "was removed" if other is None else "was replaced"
        if own.st_nlink and (other is None or not other.st_size):  # it still has another name
            before = {*written}
            what = "was moved"
            self._restore([line for line in self._recent if line not in before], what)
        else:
            self._restore(dict.fromkeys([*written, *self._recent]), what)

    def _is_appended(self, size: int) -> bool:
        """Return True if lines were added behind the one that was written last."""
        begin = max(0, self._size - len(self._last))
        tail = os.pread(self._descriptor, max(0, size - begin), begin)
        return size > self._size and tail.startswith(self._last) and tail.endswith(b"\n")

    def _restore(self, lines: Iterable[str], what: str) -> None:
        """Write those lines again that the file lacks after its last step."""
        there = _read(self._descriptor)
        missing = list(_lines_after(there, lines))
        tail = there.rpartition("\n")[2]
        own = tail.rstrip("\0")  # a line that was cut; zeros behind it make a file longer
        if tail and (not own or any(line.startswith(own) for line in missing)):
            size = os.fstat(self._descriptor).st_size
            os.ftruncate(self._descriptor, size - len(tail.encode()))
            tail = ""
        added = len(missing) - self._unwritten.count(b"\n")
        self._unwritten = (("\n" if tail else "") + "".join(missing)).encode()
        again = f", with {counted(added, 'line')} that it lacked" if added > 0 else ""
        self._warn(f"{self._path}: {what}; the run continues in it{again}")


def _lines_after(text: str, lines: Iterable[str]) -> Iterable[str]:
    """Yield the lines that follow the last step of a file's text, or belong to it."""
    there = [entry for _, entry in run_directory.parse_entries(text.splitlines())]
    last = max((entry["step"] for entry in there), default=-1)
    last_entries = {frozenset(entry) for entry in there if entry["step"] == last}
    for line, entry in run_directory.parse_entries(lines):
        if entry["step"] > last or (entry["step"] == last and frozenset(entry) not in last_entries):
            yield line


def _read(descriptor: int) -> str:
    size = os.fstat(descriptor).st_size
    return os.pread(descriptor, size, 0).decode(errors="replace")


def _drop_beyond(path: Path, step: int) -> None:
    """Drop entries after `step`, and a truncated last line."""
    if path.exists():
        lines = [
            f"{line}\n" for line, entry in run_directory.read_entries(path) if entry["step"] <= step
        ]
        replace_file(path, "".join(lines))
