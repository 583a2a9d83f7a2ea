"""The record on disk: metrics.jsonl during a run, exit.json at its end."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoints.disk import Disk
from trainer.config.plain_files import open_plain
from trainer.errors import CheckpointError
from trainer.record import directory as files
from trainer.record.lease import Lease
from trainer.record.record import Sink


class RecordFiles(Sink):
    """metrics.jsonl and exit.json; entries of an earlier process after `step` are dropped."""

    def __init__(
        self, directory: Path, step: int, disk: Disk, lease: Lease, say: Callable[[str], None]
    ):
        self._directory = directory
        self._disk = disk
        self._lease = lease
        self._say = say
        path = directory / files.METRICS
        _drop_beyond(path, step)
        self._file = open(path, "a", encoding="utf-8", opener=open_plain)  # noqa: SIM115

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self.note(step, files.strict(values))

    def note(self, step: int, facts: Mapping[str, Any]) -> None:
        try:
            self._file.write(json.dumps({"step": step, **facts}) + "\n")
            self._file.flush()  # after an error the text stays in the buffer for the next flush
        except OSError as error:
            self._disk.report(error, "writing metrics.jsonl")

    def flush(self) -> None:
        os.fsync(self._file.fileno())

    def exit(self, code: int, reason: str, facts: Mapping[str, Any]) -> None:
        if code and (self._directory / files.EXIT).exists():
            return  # a watcher is ending this process and has written the reason
        try:
            self._lease.check()
            files.write_exit(self._directory, code, reason, **facts)
        except CheckpointError:
            return  # another process has taken over the directory
        except OSError as error:
            self._say(f"warning: {self._directory / files.EXIT}: {error.strerror}")

    def close(self) -> None:
        with contextlib.suppress(OSError):  # a full disk, already reported
            self._file.close()
        self._lease.release()


def _drop_beyond(path: Path, step: int) -> None:
    """Drop entries after `step`, and a truncated last line."""
    if path.exists():
        kept = [f"{line}\n" for line, entry in files.read_entries(path) if entry["step"] <= step]
        files.replace_file(path, "".join(kept))
