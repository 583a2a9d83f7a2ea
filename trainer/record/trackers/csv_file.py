"""metrics.csv, a tracker that ends no run: what fails is left out, with a warning."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.record import files
from trainer.record.trackers.base import Sink
from trainer.record.trackers.observer import Say


class CsvFile(Sink):
    """metrics.csv: a row (step, name, value) for each value of metrics.jsonl."""

    def __init__(self, directory: Path, say: Say):
        """Write anew what metrics.jsonl has, which may have been cut at a resume."""
        path = directory / "metrics.csv"
        self._say = say
        self._file: Any = None
        entries = [entry for _, entry in files.read_entries(directory / files.METRICS)]
        try:
            files.replace_file(path, "step,name,value\n")
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
