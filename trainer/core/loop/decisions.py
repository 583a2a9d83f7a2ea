"""Decisions on the outcome of a step, identical on all ranks (law 7)."""

from __future__ import annotations

import math
import shlex
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from trainer.base.errors import ConfigError, RunError, counted
from trainer.base.process import invocation
from trainer.core.config.working_folder import naming_words
from trainer.core.distributed.signals import StopRequest
from trainer.core.distributed.watch.phases import Phase
from trainer.core.engine.context import Parts
from trainer.core.engine.deferred_reads import DeferredReads, HostCopy
from trainer.core.engine.step import Outcome
from trainer.core.loop import Actions, Progress, RolledBack, Writer


class Requests:
    """Requests of this rank: to stop, so that the run is resumed later, or to end the run."""

    def __init__(self, signal: StopRequest, max_minutes: float | None):
        self.end = ""  # the reason, empty without a request
        self._wants_any = False
        self._signal = signal
        self._writers: tuple[Writer, ...] = ()
        self._max_minutes = max_minutes
        self._last_s = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes

    @property
    def stop(self) -> str:
        """The reason to stop; empty without one."""
        if self._signal.name is not None:
            return self._signal.name
        is_over = time.monotonic() > self._last_s
        return f"run.max_minutes={self._max_minutes:g}" if is_over else ""

    def ask_for_end(self, reason: str) -> None:
        self.end = self.end or reason
        self._wants_any = True

    def watch(self, *writers: Writer) -> None:
        """Ask for a stop also once one of these has failed."""
        self._writers = writers

    def wants_stop(self) -> bool:
        """Return True if this rank asks all ranks to stop."""
        return bool(self.stop) or any(writer.has_failed for writer in self._writers)

    def look(self) -> None:
        """Look at the time and the writers, between two segments."""
        self._wants_any = self._wants_any or self.wants_stop()

    def wants_any(self) -> bool:
        """Return True if this rank asks all ranks to stop, or to end the run; asked in each step.

        The time and the writers are as at the last `look`.
        """
        return self._wants_any or self._signal.name is not None


@dataclass(slots=True)
class StepReport:
    """An Outcome read by the host, the same on every rank."""

    has_weight: bool
    is_skipped: bool
    is_stop_requested: bool


class DeferredOutcomes:
    """Outcomes read by the host one step later, so that the device never waits for the host."""

    def __init__(self, wait: Callable[[], None]) -> None:
        """`wait` is called before the host waits for the device."""
        self._wait = wait
        self._pending: tuple[Outcome, HostCopy | None] | None = None

    def push(self, outcome: Outcome) -> StepReport | None:
        """Return the report of the previous outcome, None the first time."""
        report = self.flush()
        copy = None
        if outcome.parts[0][0].device.type != "cpu":
            copy = HostCopy([tensor for part in outcome.parts for tensor in part])
        self._pending = (outcome, copy)
        return report

    def flush(self) -> StepReport | None:
        """Return the report of the last outcome; None if it was already returned."""
        if self._pending is None:
            return None
        outcome, copy = self._pending
        parts = outcome.parts
        if copy is not None:
            numbers = copy.read(self._wait)
            parts = tuple(zip(numbers[::2], numbers[1::2], strict=True))
        has_weight = True
        is_skipped = is_stop_requested = False
        for totals, found_inf in parts:
            weight, stops = totals.tolist()
            has_weight &= weight != 0
            is_stop_requested |= stops > 0
            is_skipped |= found_inf.item() != 0
        self._pending = None
        return StepReport(has_weight, is_skipped, is_stop_requested)


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
        later: DeferredReads,
    ):
        """`rolled_back` holds the steps after which the run was already rolled back.

        `later` is what the log began in earlier steps.
        """
        self.stopped_by = ""
        self.ends_segment = False
        self.is_judging = False  # True after an error of a judgement, too
        self._later = later
        self._parts = parts
        self._state = state
        self._num_steps = num_steps
        self._requests = requests
        self._actions = actions
        self._rolled_back = rolled_back
        self._reports = DeferredOutcomes(partial(parts.ranks.heartbeat.enter, Phase.DEVICE))
        self._num_skipped = 0

    @property
    def ended_by(self) -> str:
        """The reason why the run ended before its last step; empty without one."""
        limit, stale = self._parts.config.run.stop_after_evals, self._state.stale
        if limit is not None and stale >= limit:
            metric = self._parts.config.best_metric
            return f"no better {metric} in {counted(stale, 'evaluation')} (run.stop_after_evals)"
        return self._state.ended if self._state.ended_of == self._num_steps else ""

    def agree_on_stop(self) -> None:
        """Stop or end after this step, for the reasons of the ranks. A collective."""
        self.ends_segment = True
        asked = [self._requests.stop, self._requests.end]
        stops, ends = zip(*self._parts.ranks.group.gather(asked), strict=True)
        self.stopped_by = next(filter(None, stops), "")
        if end := next(filter(None, ends), ""):
            self._state.end(end, self._num_steps)
        elif not self.stopped_by:
            self.stopped_by = "a failed checkpoint or record"  # the end raises its error

    def evaluated(self) -> None:
        """End the run if a rank asked for that in an evaluation. A collective."""
        if self._parts.ranks.group.max(float(bool(self._requests.end)))[0]:
            self.agree_on_stop()

    def begin_segment(self) -> None:
        """Begin to make steps; nothing is asked for yet."""
        self.ends_segment = False

    def end_segment(self) -> None:
        """End the segment with this step: a checkpoint is asked for."""
        self.ends_segment = True

    def react(self, outcome: Outcome) -> bool:
        """Count a step, and decide on the one before it: on a GPU, this one is still computed.

        Returns True if the segment must end here: a stop, an end or a checkpoint was asked for.
        Raises ConfigError if train_step returned no Outcome, RunError if `run.on_bad_step` ends
        the run, and RolledBack if it rolls the run back.
        """
        self._state.advance()
        self._parts.ranks.heartbeat.end_step()
        if not isinstance(outcome, Outcome):
            self.is_judging = True
            raise ConfigError(f"""train_step returned {type(outcome).__name__}:
                end it with return self.update(batch)""")
        if self._later.under_way:  # first: what it waits for came after the previous outcome
            self._later.advance()
        self._judge(self._reports.push(outcome), self._state.step - 1)
        return self.ends_segment

    def flush(self) -> None:
        """Decide on the last outcome."""
        self._judge(self._reports.flush(), self._state.step)

    def _judge(self, report: StepReport | None, step: int) -> None:
        self.is_judging = True
        try:
            self._apply(report, step)
        except RunError:  # on all ranks: the log shows what led to it
            self._later.finish()
            raise
        self.is_judging = False

    def _apply(self, report: StepReport | None, step: int) -> None:
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
        """Apply `run.on_bad_step` to a non-finite step, which changed nothing.

        With a loss scale, which is still being searched, a few in a row are skipped.
        """
        actions = self._actions
        policy = self._parts.config.run.on_bad_step
        precision = self._parts.precision
        self._num_skipped += 1
        if precision.is_scaled and self._num_skipped < precision.max_skipped:
            why = "the scaled gradient is not finite, so the update was skipped"
            actions.say(f"warning: step {step}: {why}")
            actions.note_bad_step(step, why)
            return
        with self._state.at(step - 1):
            line = f"step {step}: {actions.name_bad_examples(step)}"
        if self._num_skipped == precision.max_skipped:
            raise RunError(f"{line}; and no finite gradient in {self._num_skipped} steps in a row")
        is_repeated = step in self._rolled_back
        if policy == "stop" or is_repeated:
            repeated = "it failed again after a rollback; " if is_repeated else ""
            raise RunError(f"{line}; {repeated}{self._advice(step)}")
        if policy == "rollback":
            actions.say(f"warning: {line}; rolling back to the newest checkpoint")
            with self._parts.ranks.group.agreed("rolling back to a checkpoint"):
                actions.withdraw(step)
            raise RolledBack(actions.directory, step)
        actions.say(f"warning: {line}; the update was skipped")
        actions.note_bad_step(step, f"{line}; the update was skipped")

    def _advice(self, step: int) -> str:
        directory = self._actions.directory
        words = [str(directory), f"step={step}"]
        words += naming_words(self._parts.config, Path(self._parts.config.folder, directory))
        return invocation.as_started(f"inspect it with python -m trainer.show {shlex.join(words)}")
