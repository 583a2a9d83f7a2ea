"""The training loop: the open objects of a run, its calendar and its checkpoints.

Here are the side of a run that decisions read, their actions on its record and checkpoints, and
the calendar: the steps after which something is due, so that no step has to ask.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from trainer.core.config.schema import Config


class Progress(Protocol):
    """The progress of a run: its step, its evaluations without a better metric, and its end."""

    step: int
    stale: int
    ended: str
    ended_of: int

    def advance(self) -> None: ...
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


PROGRESS_LOOK_S = 0.05  # between two looks at the progress of fast steps
MOST_STEPS_BETWEEN_LOOKS = 64  # between two looks: steps may become slow


@dataclass(frozen=True)
class Segment:
    """Steps of one epoch, `first` to `end - 1`; after the last one something may be due.

    The gradient's norm is logged for the step that ends at `logged`.
    """

    first: int
    end: int
    logged: int


class Calendar:
    """The steps after which a run logs, evaluates, saves or compares its ranks.

    `periods` are in steps by name, None for never. `once` are further ends of segments.
    """

    def __init__(
        self, periods: Mapping[str, Sequence[int | None]], once: Collection[int], num_steps: int
    ):
        self._periods = {name: [p for p in each if p] for name, each in periods.items()}
        self._every = sorted({p for each in self._periods.values() for p in each})
        self._once = sorted(once)
        self.num_steps = num_steps
        self._stride = 1
        self._looked = (-1, 0.0)  # step and time of the last look

    @classmethod
    def of(cls, config: Config, num_steps: int, steps_per_epoch: int) -> Calendar:
        """Return the calendar of these settings."""
        epochs = {"eval": config.eval.every_epochs, "checkpoint": config.checkpoint.every_epochs}
        by_epoch = {name: steps_per_epoch * (count or 0) for name, count in epochs.items()}
        periods: dict[str, list[int | None]] = {
            "log": [config.log.every_steps],
            "eval": [config.eval.every_steps, by_epoch["eval"]],
            "checkpoint": [config.checkpoint.every_steps, by_epoch["checkpoint"]],
            "drift": [config.dist.drift_every_steps],
            "histograms": [config.log.histograms_every_steps],
            "epoch": [steps_per_epoch],
        }
        return cls(periods, config.log.profile_steps or (), num_steps)

    def is_due(self, name: str, step: int) -> bool:
        """Return True if `name` is due after so many steps by its period."""
        return step > 0 and any(step % period == 0 for period in self._periods[name])

    def segment(self, step: int) -> Segment:
        """Return the steps from the 0-based `step` to the next one after which something is due.

        It is short enough to show progress in time, by how long the last steps took.
        """
        self._look(step)
        ends = [(step // period + 1) * period for period in self._every]
        ends += [next((each for each in self._once if each > step), self.num_steps)]
        end = min(*ends, step + self._stride, self.num_steps)
        is_logged = self.is_due("log", end) or end == self.num_steps
        return Segment(step, end, end if is_logged else -1)

    def _look(self, step: int) -> None:
        """Adapt the number of steps between two looks at the progress to their speed."""
        before, then = self._looked
        now_s = time.monotonic()
        self._looked = (step, now_s)
        if step > before >= 0:
            fast = int(PROGRESS_LOOK_S * (step - before) / max(now_s - then, 1e-9))
            self._stride = max(1, min(MOST_STEPS_BETWEEN_LOOKS, fast, 2 * self._stride))
