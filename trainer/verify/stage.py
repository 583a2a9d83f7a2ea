"""Stage: run layouts as real processes and collect their evidence."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import trainer
from trainer.config.schema import Config
from trainer.distributed import entry
from trainer.distributed.launch import end_ranks, fork_ranks, start_server
from trainer.distributed.launchers import CODES
from trainer.distributed.world import usable_cores
from trainer.errors import ConfigError, RunError
from trainer.strategy.modules.comm_hooks import COMPRESSING
from trainer.verify.evidence import Evidence, Notes, join_shards
from trainer.verify.progress import followed
from trainer.verify.recording import enter

FP64 = "fp64"
_FRAME = re.compile(r'  File "([^"]+)", line (\d+), in (.+)')
_PACKAGE = str(Path(trainer.__file__).parent)


class TrialRuns:
    """Folder in which layouts are run, and the precisions to run them in."""

    def __init__(
        self,
        folder: Path,
        overrides: Sequence[str],
        config_dirs: Sequence[str],
        config: Config,
        steps: int,
    ):
        self.steps = steps
        is_compressed = config.strategy.comm_hook in COMPRESSING  # such hooks accept float32 only
        self.precisions = {
            FP64: ["strategy.comm_hook=none"] if is_compressed else [],
            config.strategy.precision: [],
        }
        self._folder = folder
        self._config_dirs = [str(Path(each).resolve()) for each in config_dirs]
        self._overrides = [
            *overrides,
            f"run.steps={steps}",
            "log.every_steps=1",
            "log.trackers=[]",
            "run.max_minutes=null",
            *["data.micro_batch=null"] * (config.data.micro_batch == "auto"),
            f"run.dir={folder / 'runs'}",
            "run.compile=false",
            "run.prove=warn",  # what differs shall be measured
        ]

    def train(
        self,
        name: str,
        ranks: int,
        overrides: Sequence[str],
        precisions: Collection[str],
        is_reversed: bool = False,
        is_apart: bool = False,
        in_all: float = 0.0,
    ) -> dict[str, Evidence]:
        """Train on `ranks` real processes and return the evidence by precision.

        If it `is_reversed`, the rows of each micro-batch are taken in reverse order. If it
        `is_apart`, one rank has another seed for hashes of strings than all other runs. The time
        that `in_all` such layouts take is told, if given. Raises ConfigError or RunError with the
        error line of the ranks if they fail.
        """
        plan = self._write_plan(name, overrides, precisions, None, is_reversed)
        with followed(self._folder, self.steps, len(precisions), in_all):
            ended = self.launch(plan, ranks, is_apart)
        self._check(name, *ended)
        evidence = {}
        for precision in precisions:
            run = _run_name(name, precision)
            files = [self._folder / f"{run}-{rank}.pt" for rank in range(ranks)]
            evidence[precision] = Evidence(join_shards([Notes.load(file) for file in files]))
        return evidence

    def train_and_kill(
        self,
        name: str,
        ranks: int,
        overrides: Sequence[str],
        precision: str,
        step: int,
        rank: int,
    ) -> bool:
        """Train, and kill a rank before it trains at 0-based `step`.

        Returns False if the run ended before. Raises ConfigError or RunError if it failed.
        """
        plan = self._write_plan(name, overrides, [precision], (step, rank))
        code, stderr = self.launch(plan, ranks)
        if code == -signal.SIGKILL:
            return True
        self._check(name, code, stderr)
        return False

    def launch(self, plan: Path, ranks: int, is_apart: bool = False) -> tuple[int, str]:
        """Run a plan on `ranks` processes; return the exit code and what they wrote to stderr.

        They are forked, which takes half the time, and share a seed for hashes of strings. A rank
        `is_apart` in a process of its own, with its own seed.
        """
        more = {
            "OMP_NUM_THREADS": str(max(1, usable_cores() // ranks)),
            # Threads that spin took six times as long on two cores that another process used too.
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
            CODES: str(self._folder / "codes"),
        }
        try:
            if is_apart:
                start_server(enter.__module__, more)  # it imports torch meanwhile
                words = [sys.executable, *entry.words("verify.recording"), str(plan)]
                own = {**os.environ, **more}
                done = subprocess.run(words, capture_output=True, text=True, env=own)  # noqa: S603
                return done.returncode, done.stderr
            log = plan.with_suffix(".log")
            code = fork_ranks(ranks, enter, [str(plan), str(log)], more)
            return code, log.read_text(encoding="utf-8", errors="replace")
        except KeyboardInterrupt:  # their folder is removed next
            end_ranks()
            raise

    def _write_plan(
        self,
        name: str,
        overrides: Sequence[str],
        precisions: Collection[str],
        kill: tuple[int, int] | None,
        is_reversed: bool = False,
    ) -> Path:
        runs = []
        for precision in precisions:
            run = _run_name(name, precision)
            own = [f"run.name={run}", f"strategy.precision={precision}"]
            runs.append((run, [*self._overrides, *own, *self.precisions[precision], *overrides]))
        plan = {
            "out": str(self._folder),
            "config_dirs": self._config_dirs,
            "runs": runs,
            "kill": kill,
            "is_reversed": is_reversed,
        }
        path = self._folder / f"{name}.json"
        path.write_text(json.dumps(plan), encoding="utf-8")
        return path

    def _check(self, name: str, code: int, stderr: str) -> None:
        if not code:
            return
        codes = self._folder / "codes"  # of all ranks, of which the first to fail may be another
        is_refused = codes.exists() and "2" in codes.read_text().split()
        error = ConfigError if is_refused else RunError
        raise error(f"{name}: {last_words(stderr)}")


def _run_name(name: str, precision: str) -> str:
    return f"{name}-{precision}"


def last_words(stderr: str) -> str:
    """Return the error line of failed ranks, else the first exception and where it was raised."""
    lines = stderr.splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors and not errors[0].startswith("another rank "):
        return errors[0]
    return _find_exception(lines) or (errors or lines[-1:] or ["failed"])[0]


def _find_exception(lines: Sequence[str]) -> str | None:
    """Return the first exception, with its last frame outside this package and libraries."""
    frames: list[re.Match[str]] | None = None
    for line in lines:
        if line.startswith("Traceback "):
            frames = []
            continue
        if frames is None:
            continue
        frame = _FRAME.match(line)
        if frame:
            frames.append(frame)
        elif frames and not line.startswith(" "):
            outside = [frame for frame in frames if not _is_library(frame[1])]
            path, number, function = (outside or frames)[-1].groups()
            return f"{line} ({path}:{number}, in {function})"
    return None


def _is_library(path: str) -> bool:
    return path.startswith((_PACKAGE, "<")) or "/site-packages/" in path
