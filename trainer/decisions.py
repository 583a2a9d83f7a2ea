"""Decisions on the outcome of a step, identical on all ranks (law 7)."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.config.packages import naming_words
from trainer.data.order import counted
from trainer.distributed import entry
from trainer.distributed.signals import StopRequest
from trainer.engine.diagnosis import name_bad_examples
from trainer.engine.outcome import OneStepLate, Outcome, StepReport
from trainer.engine.parts import Parts
from trainer.errors import ConfigError, RunError
from trainer.record.directory import BAD_STEP

if TYPE_CHECKING:
    from trainer.run import Run


class RolledBack(Exception):
    """All ranks agreed to resume from the newest checkpoint of the run in `directory`."""

    def __init__(self, directory: Path, step: int):
        super().__init__(f"rolling back to the newest checkpoint of {directory}")
        self.directory = directory
        self.step = step


class Requests:
    """Requests of this rank: to stop, so that the run is resumed later, or to end the run."""

    def __init__(self, signal: StopRequest, max_minutes: float | None):
        self.end = ""  # the reason, empty without a request
        self._signal = signal
        self._max_minutes = max_minutes
        self._began = time.monotonic()

    @property
    def stop(self) -> str:
        """The reason to stop; empty without one."""
        if self._signal.name is not None:
            return self._signal.name
        limit = self._max_minutes
        is_over = limit is not None and time.monotonic() - self._began > 60 * limit
        return f"run.max_minutes={limit:g}" if is_over and limit is not None else ""

    def ask_for_end(self, reason: str) -> None:
        self.end = self.end or reason


class Decisions:
    """Stops, ends, skipped steps and rollbacks, from values that are equal on all ranks.

    `stopped_by` is the reason once the ranks agreed to stop before the end.
    """

    def __init__(self, run: Run, parts: Parts, rolled_back: Collection[int]):
        """`rolled_back` holds the steps after which the run was already rolled back."""
        self.stopped_by = ""
        self._run = run
        self._parts = parts
        self._rolled_back = rolled_back
        self._reports = OneStepLate()
        self._num_skipped = 0

    @property
    def ended_by(self) -> str:
        """The reason why the run ended before its last step; empty without one."""
        limit, stale = self._run.config.run.stop_after_evals, self._run.state.stale
        if limit is not None and stale >= limit:
            metric = self._run.config.best_metric
            return f"no better {metric} in {counted(stale, 'evaluation')} (run.stop_after_evals)"
        return self._run.state.ended if self._run.state.ended_of == self._run.num_steps else ""

    def agree_on_stop(self) -> None:
        """Stop or end after this step, for the reasons of the ranks. A collective."""
        requests = self._run.requests
        every = self._parts.ranks.group.gather_text(json.dumps([requests.stop, requests.end]))
        stops, ends = zip(*map(json.loads, every), strict=True)
        self.stopped_by = next(filter(None, stops), "")
        if end := next(filter(None, ends), ""):
            self._run.state.end(end, self._run.num_steps)
        elif not self.stopped_by:
            self.stopped_by = "a failed checkpoint or record"  # the end raises its error

    def evaluated(self) -> None:
        """End the run if a rank asked for that in an evaluation. A collective."""
        if self._parts.ranks.group.max(float(bool(self._run.requests.end)))[0]:
            self.agree_on_stop()

    def push(self, outcome: Outcome) -> None:
        """Decide on the previous outcome: on a GPU, this one is still being computed.

        Raises ConfigError if train_step returned no Outcome, RunError if `run.on_bad_step` ends
        the run, and RolledBack if it rolls the run back.
        """
        if not isinstance(outcome, Outcome):
            returned = f"train_step returned {type(outcome).__name__}"
            raise ConfigError(f"{returned}: end it with return self.update(batch)")
        self._judge(self._reports.push(outcome), self._run.step - 1)

    def flush(self) -> None:
        """Decide on the last outcome."""
        self._judge(self._reports.flush(), self._run.step)

    def _judge(self, report: StepReport | None, step: int) -> None:
        if report is None:
            return
        if not report.has_weight:
            why = "the weights of its examples sum to 0, so no parameter was updated"
            self._run.record.say(f"warning: step {step}: {why}")
        elif report.is_skipped:
            self._judge_skipped(step)
        else:
            self._num_skipped = 0
        if report.is_stop_requested and self._run.step < self._run.num_steps:
            self.agree_on_stop()

    def _judge_skipped(self, step: int) -> None:
        """Apply `run.on_bad_step` to a non-finite step, which changed nothing."""
        run = self._run
        policy = run.config.run.on_bad_step
        precision = self._parts.precision
        self._num_skipped += 1
        if precision.is_scaled and self._num_skipped < precision.max_skipped:
            why = "the scaled gradient is not finite, so the update was skipped"
            run.record.say(f"warning: step {step}: {why}")
            run.record.note(step, {BAD_STEP: why})
            return
        line = f"step {step}: {self._name_bad_examples(step)}"
        if self._num_skipped == precision.max_skipped:
            count = f"no finite gradient in {self._num_skipped} steps in a row"
            raise RunError(f"{line}; and {count}")
        is_repeated = step in self._rolled_back
        if policy == "stop" or is_repeated:
            repeated = "it failed again after a rollback; " if is_repeated else ""
            words = [str(run.directory), f"step={step}"]
            words += naming_words(run.config, Path(run.config.folder, run.directory))
            advice = f"inspect it with python -m trainer.replay {shlex.join(words)}"
            raise RunError(f"{line}; {repeated}{entry.as_started(advice)}")
        if policy == "rollback":
            run.record.say(f"warning: {line}; rolling back to the newest checkpoint")
            with self._parts.ranks.group.agreed("rolling back to a checkpoint"):
                run.saver.withdraw(step)
            raise RolledBack(run.directory, step)
        run.record.say(f"warning: {line}; the update was skipped")
        run.record.note(step, {BAD_STEP: f"{line}; the update was skipped"})

    def _name_bad_examples(self, step: int) -> str:
        run = self._run
        batch = run.batches.of_step(step - 1)
        with run.state.at(step - 1):
            parts = self._parts
            return name_bad_examples(run.engine, parts.hooks, batch, parts.ranks.group)
