"""Jobs of a sweep: runs in their own processes, with state and results on disk."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainer.config.plain_files import read_json
from trainer.config.schema import Config
from trainer.config.typed import build
from trainer.distributed import entry
from trainer.distributed.signals import SIGNALS
from trainer.errors import ConfigError, visible
from trainer.record import files as rundir
from trainer.record.lease import Lease

STOPPED = 75
_STATES = {0: "done", STOPPED: "stopped"}


@dataclass
class Job:
    """One run of the sweep.

    `state` is waiting, running, done, failed, stopped or submitted. `submitted` is the job id of
    the cluster, `code` the exit code and `value` the best metric.
    """

    number: int
    swept: dict[str, str]
    words: list[str]
    directory: str
    state: str = "waiting"
    code: int | None = None
    value: float | None = None
    metrics: dict[str, float | None] = field(default_factory=dict)
    seconds: float = 0.0
    submitted: str = ""

    @classmethod
    def of(
        cls,
        number: int,
        swept: Sequence[str],
        overrides: Sequence[str],
        config: Config,
        config_dirs: Sequence[str],
        sweep: str,
    ) -> Job:
        """Build a job. Its run directory is named by a digest of its arguments.

        So no job can resume the run of another one.
        """
        given = dict(word.lstrip("+").split("=", 1) for word in swept if "=" in word)
        words = [word for folder in config_dirs for word in ("--config-dir", folder)]
        words += [word for word in overrides if not word.startswith(("run.name=", "run.resume="))]
        digest = hashlib.sha256(json.dumps(words).encode()).hexdigest()[:6]
        name = config.run.name if "run.name" in given else f"{sweep}-{digest}"
        words += [f"run.name={name}", f"run.resume={config.run.resume or 'auto'}"]
        return cls(number, given, words, str(Path(config.run.dir) / config.task.name / str(name)))

    @property
    def label(self) -> str:
        return visible(" ".join(f"{k}={v}" for k, v in self.swept.items()) or "as given")

    def recall(self, record: Mapping[str, Any]) -> None:
        """Restore the state that the previous start of the sweep saved in `record`."""
        self.submitted = str(record.get("submitted", ""))
        self.seconds = record.get("seconds", 0.0)
        self._take_results(rundir.read_exit(Path(self.directory)).get("code", record.get("code")))

    def settle(self, code: int) -> None:
        """Read the results of a job that ended; use exit code `code` if it saved none."""
        self._take_results(rundir.read_exit(Path(self.directory)).get("code", self.code or code))

    def begin(self) -> None:
        self.state = "running"

    def finish(self, code: int, seconds: float) -> None:
        self.seconds = seconds
        self._take_results(code)

    def hand_over(self, submitted: str) -> None:
        self.state = "submitted"
        self.submitted = submitted

    def _take_results(self, code: int | None) -> None:
        record = rundir.read_exit(Path(self.directory))
        self.code = code
        self.metrics = record.get("metrics") or {}
        self.value = record.get("best")
        if code is not None:
            self.state = _STATES.get(code, "failed")


class Sweep:
    """The jobs of a sweep so far, and their files. Only one process at a time runs a sweep."""

    def __init__(self, name: str, config: Config):
        self.name = name
        self.config = config
        self.place = Path(config.run.dir) / "sweeps" / name
        self.jobs: list[Job] = []
        self.is_stopped = False
        self.place.mkdir(parents=True, exist_ok=True)
        self._lease = Lease(self.place)
        self._previous = _read_jobs(self.place)

    def add(self, job: Job) -> None:
        """Add a job, with its state of the previous start."""
        self.jobs.append(job)
        if record := self._previous.get(job.directory):
            job.recall(record)

    def check_own(self, job: Job) -> None:
        """Raise ConfigError if another job or run uses its directory."""
        words = self._previous.get(job.directory, {}).get("words")
        if Path(job.directory).exists() and words != job.words:
            advice = f"{job.directory} is the run of another job; choose another run.name"
            raise ConfigError(f"job {job.number}: {advice}")

    def run(self, job: Job, title: str) -> None:
        """Run a job in its own process, unless it is finished. Forward stop signals to it."""
        if job.state == "done":
            print(f"{title} is finished: {job.label}", flush=True)
            return
        job.begin()
        self.record()
        print(f"{title}: {job.label}", flush=True)
        began = time.monotonic()
        code, is_asked = _run_process(job.words)
        job.finish(code, time.monotonic() - began)
        is_over = job.state == "failed" and self.config.launch.on_failed_job == "stop"
        self.is_stopped |= is_asked or is_over or job.state == "stopped"
        self.record()

    def ranking(self) -> list[Job]:
        """Return the jobs, best first, those without a value last."""
        sign = 1 if self.config.best_mode == "min" else -1
        return sorted(
            self.jobs,
            key=lambda job: (job.state != "done", job.value is None, sign * (job.value or 0)),
        )

    def record(self) -> None:
        """Write sweep.json and results.csv."""
        jobs = json.dumps([asdict(job) for job in self.jobs], indent=1)
        rundir.replace_file(self.place / "sweep.json", jobs + "\n")
        names = sorted({name for job in self.jobs for name in job.metrics})
        keys = list(self.jobs[0].swept)
        staged = self.place / ".results.csv.new"
        with open(staged, "w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            header = ["job", "state", "code", *keys, "best", *names, "seconds", "directory"]
            writer.writerow(header)
            for job in self.ranking():
                values = [job.swept.get(key) for key in keys]
                metrics = [job.metrics.get(name) for name in names]
                row = (job.number, job.state, job.code, *values, job.value, *metrics)
                writer.writerow([*row, round(job.seconds, 1), job.directory])
        os.replace(staged, self.place / "results.csv")

    def end(self) -> int:
        """Print a table of all jobs. Return 0 if all are done, 1 if some failed, 75 if stopped."""
        from rich.console import Console
        from rich.table import Table

        best = f"best {self.config.best_metric}"
        columns = ("job", *self.jobs[0].swept, "state", best, "directory")
        table = Table(*columns, box=None, header_style="bold")
        for job in self.ranking():
            value = "" if job.value is None else f"{job.value:.4f}"
            row = (str(job.number), *job.swept.values(), job.state, value, job.directory)
            table.add_row(*map(visible, row))
        Console(width=None if sys.stdout.isatty() else 200).print(table)
        print(f"files: {self.place}/results.csv, {self.place}/sweep.json")
        if sum(job.state == "done" for job in self.jobs) > 1:
            words = shlex.join([str(self.place), f"out={self.place}/compare.html"])
            print(entry.as_started(f"compare with: python -m trainer.compare {words}"))
        states = {job.state for job in self.jobs}
        if states == {"done"}:
            return 0
        return 1 if "failed" in states else STOPPED


def _read_jobs(place: Path) -> dict[str, dict[str, Any]]:
    """Return the jobs of the previous start, by directory."""
    try:
        jobs = read_json(place / "sweep.json")
        known = [{name: value for name, value in job.items() if value != ""} for job in jobs]
        return {build(Job, job).directory: job for job in known}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _run_process(words: Sequence[str]) -> tuple[int, bool]:
    """Run a job and return (its exit code, True if this process received a stop signal).

    The job has its own session, so that Ctrl-C reaches this process only, and only once.
    """
    asked: list[int] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: object) -> None:
        asked.append(number)
        if process is not None:
            process.send_signal(number)

    handlers = {number: signal.signal(number, pass_on) for number in SIGNALS}
    try:
        command = [sys.executable, *entry.words(), *words]
        process = subprocess.Popen(command, start_new_session=True)  # noqa: S603  # no shell
        for number in asked:  # signals that came before the process existed
            process.send_signal(number)
        return process.wait(), bool(asked)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
