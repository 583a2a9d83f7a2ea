"""Layouts as real processes, which may be killed and resumed, and their evidence."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path

from trainer.base.errors import ConfigError, RunError
from trainer.base.process import invocation
from trainer.base.process.child import last_words
from trainer.base.process.table import usable_cores
from trainer.core.config.schema import Config
from trainer.core.distributed.launch import fork_ranks, start_server
from trainer.core.distributed.launchers import CODES
from trainer.core.strategy.ddp import COMPRESSING
from trainer.verify.evidence import Evidence, Notes, join_shards
from trainer.verify.findings import (
    AGREES,
    DIFFERENT,
    PROVES_NOTHING,
    Finding,
    compare,
    judge_bits,
    judge_reference,
)
from trainer.verify.recorded_run import enter, followed

FP64_NAME = "fp64"


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
            FP64_NAME: ["strategy.comm_hook=none"] if is_compressed else [],
            config.strategy.precision: [],
        }
        self._folder = folder
        self._config_dirs = [str(Path(each).resolve()) for each in config_dirs]
        self._overrides = [
            *overrides,
            f"run.steps={steps}",
            "log.every_steps=1",
            "log.trackers=[]",
            "checkpoint.export=null",
            "checkpoint.mirror=null",
            "run.max_minutes=null",
            *(["data.micro_batch=null"] if config.data.micro_batch == "auto" else []),
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
        threads: int | None = None,
    ) -> dict[str, Evidence]:
        """Train on `ranks` real processes and return the evidence by precision.

        If it `is_reversed`, the rows of each micro-batch are taken in reverse order. If it
        `is_apart`, one rank has another seed for hashes of strings than all other runs. The time
        that `in_all` such layouts take is told, if given. Each rank has `threads`, by default its
        share of the cores. Raises ConfigError or RunError with the error line of the ranks if they
        fail.
        """
        plan = self._write_plan(name, overrides, precisions, None, is_reversed)
        with followed(self._folder, self.steps, len(precisions), in_all):
            ended = self.launch(plan, ranks, is_apart, threads)
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

    def launch(
        self, plan: Path, ranks: int, is_apart: bool = False, threads: int | None = None
    ) -> tuple[int, str]:
        """Run a plan on `ranks` processes; return the exit code and what they wrote to stderr.

        They are forked, which takes half the time, and share a seed for hashes of strings. A rank
        `is_apart` in a process of its own, with its own seed.
        """
        more = {
            "OMP_NUM_THREADS": str(threads or max(1, usable_cores() // ranks)),
            # Threads that spin took six times as long on two cores that another process used too.
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "passive"),
            CODES: str(self._folder / "codes"),
        }
        if is_apart:
            start_server(enter.__module__, more)  # it imports torch meanwhile
            words = [sys.executable, *invocation.words("verify.recorded_run"), str(plan)]
            own = {**os.environ, **more}
            done = subprocess.run(words, capture_output=True, text=True, env=own)  # noqa: S603
            return done.returncode, done.stderr
        log = plan.with_suffix(".log")
        code = fork_ranks(ranks, enter, [str(plan), str(log)], more)
        return code, log.read_text(encoding="utf-8", errors="replace")

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


LEAST_STEPS = 5  # checkpoints follow every second step: a kill in step 4 leaves one
RANKS_AT_FIRST = 2  # of the uninterrupted run and of the killed runs
SAVES = ["checkpoint.every_steps=2", "checkpoint.every_epochs=null", "checkpoint.background=false"]
LOST_STATE = "state kept outside of model, optimizer and step, or unseeded random numbers"


def prove_resume(stage: TrialRuns, kills: int, seed: int) -> list[Finding]:
    """Kill a run at random steps, resume it, and compare it with an uninterrupted run.

    Bits must be equal on the same number of ranks, results up to rounding on 1 and 3 ranks.
    """
    if stage.steps < LEAST_STEPS:
        must = f"must be at least {LEAST_STEPS} with --resume, to kill after a save"
        raise ConfigError(f"steps={stage.steps}: {must}")
    chance = random.Random(seed)  # noqa: S311  # not for security
    findings = []
    for precision in stage.precisions:
        whole = stage.train("undisturbed", RANKS_AT_FIRST, SAVES, [precision])[precision]
        findings.append(judge_reference(f"uninterrupted, {RANKS_AT_FIRST} ranks", precision, whole))
        sizes = [RANKS_AT_FIRST] * kills + ([1, 3] if precision == FP64_NAME else [])
        for run_number, ranks in enumerate(sizes):
            of_all = f"in {precision}, {run_number + 1} of {len(sizes)}"
            step = chance.randrange(LEAST_STEPS - 2, stage.steps)
            killed = chance.randrange(RANKS_AT_FIRST)
            layout = f"rank {killed} killed in step {step + 1}, resumed on {ranks}"
            print(f"{layout} ({of_all}) ...", file=sys.stderr, flush=True)
            name = f"killed-{run_number}"
            if not stage.train_and_kill(name, RANKS_AT_FIRST, SAVES, precision, step, killed):
                raise RunError(f"{layout}: the run ended before it was killed")
            overrides = [*SAVES, "run.resume=auto"]
            resumed = stage.train(name, ranks, overrides, [precision], is_apart=ranks == 1)
            same = ranks == RANKS_AT_FIRST
            findings.append(_compare(layout, precision, whole, resumed[precision], same))
    return findings


def _compare(
    layout: str, precision: str, whole: Evidence, resumed: Evidence, is_exact: bool
) -> Finding:
    """Compare the steps after the resume, and the state at the end."""
    steps = resumed.steps
    if len(steps) == len(whole.steps):
        why = "it started from step 0: there was no checkpoint"
        return Finding(layout, precision, PROVES_NOTHING, reason=why)
    reference = whole.of_steps(steps)
    finding = compare(layout, precision, reference, resumed.of_steps(steps))
    if finding.result == DIFFERENT:  # its probe used other weights, so it explains nothing
        return replace(finding, reason=LOST_STATE)
    if not is_exact or finding.result != AGREES:
        return finding
    return judge_bits(finding, reference, resumed, LOST_STATE)
