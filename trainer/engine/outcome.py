"""The outcome of a step, on the device until the host reads it one step later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from trainer.distributed import accelerator


@dataclass(slots=True)
class Outcome:
    """Result of the updates of one step, summed over all ranks. `+` joins two outcomes.

    A part is, for one update, (2,) with the weight of its batch and the stop requests, and () that
    is 1 if the update was skipped.
    """

    parts: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(self.parts + other.parts)


@dataclass(slots=True)
class StepReport:
    """An Outcome read by the host, the same on every rank."""

    has_weight: bool
    is_skipped: bool
    is_stop_requested: bool


class OneStepLate:
    """Outcomes read by the host one step later, so that the device never waits for the host."""

    def __init__(self, wait: Callable[[], None]) -> None:
        """`wait` is called before the host waits for the device."""
        self._wait = wait
        self._pending: Outcome | None = None
        self._copied: torch.Event | None = None

    def push(self, outcome: Outcome) -> StepReport | None:
        """Return the report of the previous outcome, None the first time."""
        report = self.flush()
        device = outcome.parts[0][0].device
        if accelerator.is_used(device):
            self._copied = accelerator.module(device).Event()
            to_host = [[t.to("cpu", non_blocking=True) for t in part] for part in outcome.parts]
            outcome = Outcome(tuple((totals, found_inf) for totals, found_inf in to_host))
            self._copied.record()
        self._pending = outcome
        return report

    def flush(self) -> StepReport | None:
        """Return the report of the last outcome; None if it was already returned."""
        if self._pending is None:
            return None
        if self._copied is not None:
            self._wait()
            self._copied.synchronize()
        has_weight = True
        is_skipped = is_stop_requested = False
        for totals, found_inf in self._pending.parts:
            weight, stops = totals.tolist()
            has_weight &= weight != 0
            is_stop_requested |= stops > 0
            is_skipped |= found_inf.item() != 0
        self._pending = None
        return StepReport(has_weight, is_skipped, is_stop_requested)
