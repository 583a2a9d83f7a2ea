"""Running statistics: the buffers that a forward pass changes, such as BatchNorm's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainer.data.batches import count_rows
from trainer.strategy.rehearsal import changed_buffers


class RunningStatistics:
    """The buffers of a model that a forward pass in training changes, during one step.

    Without `rows`, as in torch, each micro-batch continues from the previous one. `rows` is the
    average number of rows of a step on this rank. With it, every micro-batch starts from the values
    at the start of the step, and the step ends with their mean, weighted by rows. The result then
    depends neither on the number of ranks nor on gradient accumulation.
    """

    def __init__(self, rows: float | None):
        self.buffers: list[torch.Tensor] = []
        self.rows = rows
        self._is_first = True
        self._counters: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []
        self._total: list[torch.Tensor] = []

    def find(
        self,
        model: nn.Module,
        before: Mapping[str, torch.Tensor],
        agree: Callable[[list[bool]], list[bool]] = list,
    ) -> None:
        """Select the buffers that differ from `before`.

        `agree` combines the flags of all ranks: a buffer that changed on any rank is selected.
        """
        buffers = list(model.buffers())
        local = {id(buffer) for buffer in changed_buffers(model, before)}
        flags = agree([id(buffer) in local for buffer in buffers])
        changed = [buffer for buffer, is_changed in zip(buffers, flags, strict=True) if is_changed]
        self.buffers = [buffer for buffer in changed if buffer.is_floating_point()]
        counted = [b for name, b in model.named_buffers() if name.endswith("num_batches_tracked")]
        self._counters = [buffer for buffer in counted if any(buffer is each for each in changed)]

    def begin(self) -> None:
        """Begin a step: keep a copy of the values."""
        if self.buffers:
            self._before = [buffer.clone() for buffer in (*self.buffers, *self._counters)]
            self._total = []
            self._is_first = True

    @torch.no_grad()
    def rewind(self) -> None:
        """Restore the values from the start of the step before a forward pass, if `rows` is set."""
        if self.rows is not None and self.buffers and not self._is_first:
            # .data: an earlier micro-batch's backward pass may be to come, which would refuse them
            torch._foreach_copy_([b.data for b in (*self.buffers, *self._counters)], self._before)
        self._is_first = False

    @torch.no_grad()
    def note(self, targets: Any, inputs: Any) -> None:
        """Add a micro-batch to the mean after its forward pass, if `rows` is set."""
        if self.rows is None or not self.buffers:
            return
        part = self.part(targets, inputs)
        self._total = list(torch._foreach_add(self._total, part)) if self._total else part

    @torch.no_grad()
    def part(self, targets: Any, inputs: Any) -> list[torch.Tensor]:
        """Return a micro-batch's part of the mean, after its forward pass."""
        assert self.rows is not None
        if not self.buffers:
            return []
        return list(torch._foreach_mul(self.buffers, count_rows(targets, inputs) / self.rows))

    def read(self) -> Sequence[torch.Tensor]:
        """Return this rank's part of the mean, after `note` for all its micro-batches."""
        return self._total or self.buffers

    @torch.no_grad()
    def write(self, values: Sequence[torch.Tensor]) -> None:
        """Overwrite the buffers with `values`."""
        if values and values is not self.buffers:
            torch._foreach_copy_(self.buffers, list(values))

    @torch.no_grad()
    def undo(self, found_inf: torch.Tensor) -> None:
        """Restore the values from the start of the step if `found_inf` is 1: it was skipped."""
        for buffer, was in zip(self.buffers, self._before, strict=False):
            buffer.copy_(torch.where(found_inf.to(buffer.device) > 0, was, buffer))
