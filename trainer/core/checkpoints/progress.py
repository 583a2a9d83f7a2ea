"""The progress of a run, saved with every checkpoint."""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.core.checkpoints.transaction import Manifest
from trainer.core.config.typed import build


@dataclass
class RunProgress:
    """Progress of a run, saved with every checkpoint. `step` counts global batches."""

    step: int
    run_id: str
    sessions: list[list[int]]
    changes: dict[str, list[str]] = field(default_factory=dict)
    evaluated: int = -1
    metrics: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_step: int | None = None
    best_of: str = ""
    improved: float | None = None
    stale: int = 0
    ended: str = ""
    ended_of: int = 0

    @classmethod
    def begin(cls, world_size: int) -> RunProgress:
        return cls(0, secrets.token_hex(8), [[0, world_size]])

    @classmethod
    def resume(
        cls, manifest: Manifest, saved: dict[str, Any], world_size: int, is_same_run: bool
    ) -> RunProgress:
        """Restore the progress from a checkpoint; from another run's, only step and sessions.

        Raises ConfigError for a progress that no run has saved.
        """
        sessions = [*manifest.sessions, [manifest.step, world_size]]
        if not is_same_run:
            return cls(manifest.step, secrets.token_hex(8), sessions, dict(manifest.changes))
        facts = {name: value for name, value in saved.items() if value != ""}
        facts |= {"step": manifest.step, "run_id": manifest.run, "sessions": sessions}
        facts["changes"] = dict(manifest.changes)
        metrics = {name: float(value) for name, value in saved["metrics"].items()}  # or NaN
        return replace(build(cls, {**facts, "metrics": {}}), metrics=metrics)

    def noted(self, changes: list[str]) -> list[str]:
        """Return what changed at the start of this session, after it was noted."""
        if changes:
            self.changes[str(self.step)] = changes
        return changes

    def advance(self) -> None:
        self.step += 1

    @contextmanager
    def at(self, step: int) -> Iterator[None]:
        """Set another step for the duration of the block, to examine it a second time."""
        before = self.step
        self.step = step
        try:
            yield
        finally:
            self.step = before

    def end(self, reason: str, num_steps: int) -> None:
        """Note that a run of so many steps ended here; a longer run goes on."""
        self.ended = reason
        self.ended_of = num_steps

    def recall(self, metrics: dict[str, float], metric: str, mode: str, least: float) -> None:
        """Take over an evaluation of this step that an earlier process recorded, if any.

        The checkpoint may be from before that evaluation.
        """
        if self.evaluated < self.step and metric in metrics:
            self.note(metrics, metric, mode, least)

    def note(self, metrics: dict[str, float], metric: str, mode: str, least: float) -> bool:
        """Store an evaluation. Return True if it is the best so far by `metric`.

        `stale` counts the evaluations since one that was better by more than `least`.
        """
        value = metrics[metric]
        self.metrics = metrics
        self.evaluated = self.step
        best_of = f"{mode} {metric}"
        if self.best_of != best_of:
            self.best = None
            self.best_step = None
            self.best_of = best_of
            self.improved = None
        sign = 1 if mode == "max" else -1
        is_first = self.improved is None and not math.isnan(value)
        self.stale += 1
        if is_first or (self.improved is not None and sign * (value - self.improved) > least):
            self.improved = value
            self.stale = 0
        if math.isnan(value) or (self.best is not None and sign * value <= sign * self.best):
            return False
        self.best = value
        self.best_step = self.step
        return True

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint holds besides the facts of its manifest."""
        best = ("best", "best_step", "best_of", "improved", "stale")
        names = ("evaluated", "metrics", *best, "ended", "ended_of")
        return {name: getattr(self, name) for name in names}
