"""Decisions on the outcome of a step, identical on all ranks (law 7)."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from trainer.config.packages import naming_words
from trainer.distributed import entry
from trainer.distributed.signals import StopRequest
from trainer.distributed.watch.phases import Phase
from trainer.engine.outcome import OneStepLate, Outcome, StepReport
from trainer.engine.parts import Parts
from trainer.errors import ConfigError, RunError, counted


class Progress(Protocol):
    """The progress of a run: its step, its evaluations without a better metric, and its end."""

    step: int
    stale: int
    ended: str
    ended_of: int

    def end(self, reason: str, num_steps: int) -> None: ...
    def at(self, step: int) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Actions:
    """Actions of a decision on the record and the checkpoints of the run in `directory`.

    `withdraw` makes the checkpoints from a step on invalid. `name_bad_examples` says which
    examples made the step not finite; every rank calls it.
    """

    directory: Path
    say: Callable[[str], None]
    note_bad_step: Callable[[int, str], None]
    withdraw: Callable[[int], None]
    name_bad_examples: Callable[[int], str]


class RolledBack(Exception):
    """All ranks agreed to resume from the newest checkpoint of the run in `directory`."""

    def __init__(self, directory: Path, step: int):
        super().__init__(f"rolling back to the newest checkpoint of {directory}")
        self.directory = directory
        self.step = step


class Writer(Protocol):
    """A saver or record that writes in the background, which may fail."""

    @property
    def has_failed(self) -> bool: ...


class Requests:
    """Requests of this rank: to stop, so that the run is resumed later, or to end the run."""

    def __init__(self, signal: StopRequest, max_minutes: float | None):
        self.end = ""  # the reason, empty without a request
        self._signal = signal
        self._writers: tuple[Writer, ...] = ()
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

    def watch(self, *writers: Writer) -> None:
        """Ask for a stop also once one of these has failed."""
        self._writers = writers

    def wants_stop(self) -> bool:
        """Return True if this rank asks all ranks to stop."""
        return bool(self.stop) or any(writer.has_failed for writer in self._writers)

    def wants_any(self) -> bool:
        """Return True if this rank asks all ranks to stop, or to end the run."""
        return bool(self.end) or self.wants_stop()


class Decisions:
    """Stops, ends, skipped steps and rollbacks, from values that are equal on all ranks.

    `stopped_by` is the reason once the ranks agreed to stop before the end.
    """

    def __init__(
        self,
        parts: Parts,
        state: Progress,
        num_steps: int,
        requests: Requests,
        actions: Actions,
        rolled_back: Collection[int],
    ):
        """`rolled_back` holds the steps after which the run was already rolled back."""
        self.stopped_by = ""
        self._config = parts.config
        self._group = parts.ranks.group
        self._precision = parts.precision
        self._state = state
        self._num_steps = num_steps
        self._requests = requests
        self._actions = actions
        self._rolled_back = rolled_back
        self._reports = OneStepLate(partial(parts.ranks.heartbeat.enter, Phase.DEVICE))
        self._num_skipped = 0

    @property
    def ended_by(self) -> str:
        """The reason why the run ended before its last step; empty without one."""
        limit, stale = self._config.run.stop_after_evals, self._state.stale
        if limit is not None and stale >= limit:
            metric = self._config.best_metric
            return f"no better {metric} in {counted(stale, 'evaluation')} (run.stop_after_evals)"
        return self._state.ended if self._state.ended_of == self._num_steps else ""

    def agree_on_stop(self) -> None:
        """Stop or end after this step, for the reasons of the ranks. A collective."""
        asked = [self._requests.stop, self._requests.end]
        stops, ends = zip(*self._group.gather(asked), strict=True)
        self.stopped_by = next(filter(None, stops), "")
        if end := next(filter(None, ends), ""):
            self._state.end(end, self._num_steps)
        elif not self.stopped_by:
            self.stopped_by = "a failed checkpoint or record"  # the end raises its error

    def evaluated(self) -> None:
        """End the run if a rank asked for that in an evaluation. A collective."""
        if self._group.max(float(bool(self._requests.end)))[0]:
            self.agree_on_stop()

    def push(self, outcome: Outcome) -> None:
        """Decide on the previous outcome: on a GPU, this one is still being computed.

        Raises ConfigError if train_step returned no Outcome, RunError if `run.on_bad_step` ends
        the run, and RolledBack if it rolls the run back.
        """
        if not isinstance(outcome, Outcome):
            returned = f"train_step returned {type(outcome).__name__}"
            raise ConfigError(f"{returned}: end it with return self.update(batch)")
        self._judge(self._reports.push(outcome), self._state.step - 1)

    def flush(self) -> None:
        """Decide on the last outcome."""
        self._judge(self._reports.flush(), self._state.step)

    def _judge(self, report: StepReport | None, step: int) -> None:
        if report is None:
            return
        if not report.has_weight:
            why = "the weights of its examples sum to 0, so no parameter was updated"
            self._actions.say(f"warning: step {step}: {why}")
        elif report.is_skipped:
            self._judge_skipped(step)
        else:
            self._num_skipped = 0
        if report.is_stop_requested and self._state.step < self._num_steps:
            self.agree_on_stop()

    def _judge_skipped(self, step: int) -> None:
        """Apply `run.on_bad_step` to a non-finite step, which changed nothing."""
        actions = self._actions
        policy = self._config.run.on_bad_step
        precision = self._precision
        self._num_skipped += 1
        if precision.is_scaled and self._num_skipped < precision.max_skipped:
            why = "the scaled gradient is not finite, so the update was skipped"
            actions.say(f"warning: step {step}: {why}")
            actions.note_bad_step(step, why)
            return
        with self._state.at(step - 1):
            line = f"step {step}: {actions.name_bad_examples(step)}"
        if self._num_skipped == precision.max_skipped:
            count = f"no finite gradient in {self._num_skipped} steps in a row"
            raise RunError(f"{line}; and {count}")
        is_repeated = step in self._rolled_back
        if policy == "stop" or is_repeated:
            repeated = "it failed again after a rollback; " if is_repeated else ""
            raise RunError(f"{line}; {repeated}{self._advice(step)}")
        if policy == "rollback":
            actions.say(f"warning: {line}; rolling back to the newest checkpoint")
            with self._group.agreed("rolling back to a checkpoint"):
                actions.withdraw(step)
            raise RolledBack(actions.directory, step)
        actions.say(f"warning: {line}; the update was skipped")
        actions.note_bad_step(step, f"{line}; the update was skipped")

    def _advice(self, step: int) -> str:
        directory = self._actions.directory
        words = [str(directory), f"step={step}"]
        words += naming_words(self._config, Path(self._config.folder, directory))
        return entry.as_started(f"inspect it with python -m trainer.replay {shlex.join(words)}")
