"""Running statistics: the buffers that a forward pass changes, such as BatchNorm's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from trainer.micro_batch import count_rows
from trainer.strategy.modules.dry_run import changed_buffers


class RunningStatistics:
    """The buffers of a model that a forward pass in training changes, during one step.

    Without `rows`, as in torch, each micro-batch continues from the previous one. `rows` is the
    average number of rows of a step on this rank. With it, every micro-batch starts from the values
    at the start of the step, and the step ends with their mean, weighted by rows. The result then
    depends neither on the number of ranks nor on gradient accumulation.

    Statistics of a frozen norm layer may change later, when it is trained. They are combined in the
    steps in which they change on any rank, so that frozen ones keep their bits.
    """

    def __init__(self, rows: float | None, takes_all: bool = False):
        """With `takes_all`, integers start from their values at the start of the step too."""
        self._takes_all = takes_all
        self.buffers: list[torch.Tensor] = []
        self.rows = rows
        self._is_first = True
        self._frozen: list[int] = []  # places in `buffers`
        self._counters: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []
        self._total: list[torch.Tensor] = []

    def find(
        self,
        model: nn.Module,
        before: Mapping[str, torch.Tensor],
        agree: Callable[[list[bool]], list[bool]] = list,
    ) -> None:
        """Select the buffers that differ from `before`, and the statistics of all norm layers.

        `agree` combines the flags of all ranks: a buffer that changed on any rank is selected.
        """
        buffers = list(model.buffers())
        local = {id(buffer) for buffer in changed_buffers(model, before)}
        flags = agree([id(buffer) in local for buffer in buffers])
        norms = {id(b) for m in model.modules() if isinstance(m, _NormBase) for b in m.buffers()}
        chosen = [
            (buffer, is_changed)
            for buffer, is_changed in zip(buffers, flags, strict=True)
            if is_changed or (id(buffer) in norms and not buffer.is_meta)
        ]
        floats = [(buffer, flag) for buffer, flag in chosen if buffer.is_floating_point()]
        self.buffers = [buffer for buffer, _ in floats]
        self._frozen = [place for place, (_, is_changed) in enumerate(floats) if not is_changed]
        counted = [b for name, b in model.named_buffers() if name.endswith("num_batches_tracked")]
        integers = [b for b, _ in chosen if not b.is_floating_point()]
        if not self._takes_all:
            integers = [b for b in integers if any(b is each for each in counted)]
        self._counters = integers
        self._before = [torch.empty_like(buffer) for buffer in (*self.buffers, *self._counters)]

    @property
    def sizes(self) -> list[int]:
        """Numbers of elements of the tensors that `read` returns."""
        return [*(b.numel() for b in self.buffers), *([len(self._frozen)] if self._frozen else [])]

    def begin(self) -> None:
        """Begin a step: keep a copy of the values."""
        self._total = []
        self._is_first = True
        for now, before in self._alike():
            torch._foreach_copy_(before, [buffer.detach() for buffer in now])

    def rewind(self) -> None:
        """Restore the values from the start of the step before a forward pass, if `rows` is set."""
        has_any = self.buffers or self._counters
        if self.rows is not None and has_any and not self._is_first:
            # .data: an earlier micro-batch's backward pass may be to come, which would refuse them
            with torch.no_grad():  # not a decorator: it takes 4 us in each call
                now = [b.data for b in (*self.buffers, *self._counters)]
                torch._foreach_copy_(now, self._before)
        self._is_first = False

    def note(self, targets: Any, inputs: Any) -> None:
        """Add a micro-batch to the mean after its forward pass, if `rows` is set."""
        if self.rows is None or not self.buffers:
            return
        with torch.no_grad():
            part = self.part(targets, inputs)
            self._total = list(torch._foreach_add(self._total, part)) if self._total else part

    @torch.no_grad()
    def part(self, targets: Any, inputs: Any) -> list[torch.Tensor]:
        """Return a micro-batch's part of what `read` returns, after its forward pass."""
        assert self.rows is not None
        if not self.buffers:
            return []
        weight = count_rows(targets, inputs) / self.rows
        return [*torch._foreach_mul(self.buffers, weight), *self._flags()]

    def read(self) -> list[torch.Tensor]:
        """Return this rank's part of the mean, after `note` for all its micro-batches.

        One tensor per buffer, and one that is not 0 for each frozen buffer that has changed.
        """
        return self._total or [*self.buffers, *self._flags()]

    def _flags(self) -> list[torch.Tensor]:
        frozen = [(self.buffers[place], self._before[place]) for place in self._frozen]
        flags = [(buffer != before).any().to(self.buffers[0]) for buffer, before in frozen]
        return [torch.stack(flags)] if flags else []

    @torch.no_grad()
    def write(self, values: Sequence[torch.Tensor]) -> None:
        """Overwrite the buffers with combined values, as `read` orders them, of any shape."""
        if not values or values[0] is self.buffers[0]:
            return
        new = [value.view_as(b).to(b) for value, b in zip(values, self.buffers, strict=False)]
        for number, place in enumerate(self._frozen):
            has_changed = values[-1][number].to(new[place].device) != 0
            new[place] = torch.where(has_changed, new[place], self._before[place])
        torch._foreach_copy_(self.buffers, new)

    def undo(self, found_inf: torch.Tensor) -> None:
        """Restore the values from the start of the step if `found_inf` is 1: it was skipped."""
        is_host = found_inf.device.type == "cpu"
        if self.buffers and not (is_host and not found_inf):
            self._undo(found_inf, is_host)

    @torch.no_grad()
    def _undo(self, found_inf: torch.Tensor, is_host: bool) -> None:
        for now, before in self._alike(self.buffers):
            if not is_host:  # one kernel for all: each launch costs a GPU more than these numbers
                sizes = [buffer.numel() for buffer in now]
                is_skipped = found_inf.to(now[0].device) > 0
                both = (torch.cat([each.view(-1) for each in some]) for some in (before, now))
                chosen = torch.where(is_skipped, next(both), next(both)).split(sizes)
                before = [each.view_as(b) for each, b in zip(chosen, now, strict=True)]
            torch._foreach_copy_(now, before)

    def _alike(self, some: Sequence[torch.Tensor] | None = None) -> list[Any]:
        """Return pairs of (buffers, their values before) of one device and dtype each."""
        groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        every = (*self.buffers, *self._counters) if some is None else some
        for buffer, before in zip(every, self._before, strict=False):
            now, was = groups.setdefault((buffer.device, buffer.dtype), ([], []))
            now.append(buffer)
            was.append(before)
        return list(groups.values())
