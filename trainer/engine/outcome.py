"""The outcome of a step, on the device until the host asks for it one step later."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Outcome:
    """Result of the updates of one step, summed over all ranks; two are joined by `+`.

    For each update (2,): the weight of its batch and the stop requests; and (): 1 if it was
    skipped.
    """

    parts: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(self.parts + other.parts)


@dataclass(frozen=True)
class StepReport:
    """An Outcome as the host reads it, alike on every rank."""

    has_weight: bool
    is_skipped: bool
    is_stop_requested: bool


class OneStepLate:
    """Outcomes read by the host one step later, so that the device never waits for the host."""

    def __init__(self) -> None:
        self._pending: list[torch.Tensor] = []
        self._copied: torch.cuda.Event | None = None

    def push(self, outcome: Outcome) -> StepReport | None:
        """The report of the outcome pushed before, None the first time."""
        before = self.flush()
        tensors = [tensor.reshape(-1) for part in outcome.parts for tensor in part]
        if tensors[0].device.type == "cuda":
            self._copied = torch.cuda.Event()
            tensors = [torch.cat(tensors).to("cpu", non_blocking=True)]
            self._copied.record()
        self._pending = tensors
        return before

    def flush(self) -> StepReport | None:
        """The report of the last outcome, once."""
        if not self._pending:
            return None
        if self._copied is not None:
            self._copied.synchronize()
        values = [value for tensor in self._pending for value in tensor.tolist()]
        self._pending = []
        return StepReport(
            has_weight=0 not in values[::3],
            is_stop_requested=any(values[1::3]),
            is_skipped=any(values[2::3]),
        )
