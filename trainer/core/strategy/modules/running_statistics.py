"""Running statistics: the buffers that a forward pass changes, such as BatchNorm's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from trainer.base.errors import ConfigError
from trainer.core.micro_batch import count_rows
from trainer.core.state.sandbox import BufferCopies
from trainer.core.strategy.modules.dry_run import changed_buffers


@dataclass(frozen=True)
class _AssignedBuffer:
    """A buffer that a forward pass assigns another tensor, at its place in the list of them."""

    name: str
    module: nn.Module
    key: str
    place: int


@dataclass(frozen=True)
class _ChosenBuffer:
    """A buffer of a norm layer, or one that a forward pass changes or writes."""

    name: str
    buffer: torch.Tensor
    is_changed: bool

    @property
    def is_counter(self) -> bool:
        """True for a norm layer's number of batches."""
        return self.name.endswith("num_batches_tracked")


class RunningStatistics:
    """The buffers of a model that a forward pass in training changes, during one step.

    Without `rows`, as in torch, each micro-batch continues from the previous one. `rows` is the
    average number of rows of a step on this rank. With it, every micro-batch starts from the values
    at the start of the step, and the step ends with their mean, weighted by rows. The result then
    depends neither on the number of ranks nor on gradient accumulation.

    Statistics of a frozen norm layer may change later, when it is trained. They are combined in the
    steps in which they change on any rank, so that frozen ones keep their bits. A buffer that gets
    another size, such as a cache that grows, is none of them.
    """

    def __init__(self, rows: float | None, takes_all: bool = False):
        """With `takes_all`, integers start from their values at the start of the step too.

        They get the mean of their changes, rounded; a flag changes if it does in any micro-batch.
        """
        self._takes_all = takes_all
        self.rows = rows
        self.are_used = False  # by the model
        self._is_first = True
        self._tracked: list[torch.Tensor] = []  # numbers, integers to combine, counters of batches
        self._num_floats = 0
        self._num_integers = 0
        self._frozen: list[int] = []  # places in `buffers`
        self._assigned: list[_AssignedBuffer] = []
        self._before: list[torch.Tensor] = []
        self._total: list[torch.Tensor] = []

    def find(
        self,
        model: nn.Module,
        before: BufferCopies,
        agree: Callable[[list[bool]], list[bool]] = list,
    ) -> None:
        """Select the buffers that differ from `before`, and the statistics of all norm layers.

        With `takes_all`, also those that were written and kept their values. `agree` combines the
        flags of all ranks: a buffer that changed on any rank is selected. Raises ConfigError for a
        persistent one that gets another shape.
        """
        chosen = self._choose(model, before, agree)
        floats = [each for each in chosen if _is_number(each.buffer)]
        counters = [each for each in chosen if each.is_counter]
        integers = [each for each in chosen if not _is_number(each.buffer) and not each.is_counter]
        if not self._takes_all:
            integers = []
        every = [*floats, *integers, *counters]
        self._frozen = [index for index, each in enumerate(floats) if not each.is_changed]
        self._num_floats = len(floats)
        self._num_integers = len(integers)
        self._tracked = [_real(each.buffer) for each in every]
        self._before = [torch.empty_like(buffer) for buffer in self._tracked]
        self.are_used = bool(every)
        self._assigned = [
            _AssignedBuffer(each.name, *_owner_of(model, each.name), index)
            for index, each in enumerate(every)
            if before.is_assigned(each.name, each.buffer)
        ]

    def _choose(
        self, model: nn.Module, before: BufferCopies, agree: Callable[[list[bool]], list[bool]]
    ) -> list[_ChosenBuffer]:
        """Return the buffers of norm layers, and those that any rank's pass changed or wrote."""
        named = [(name, buffer) for name, buffer in model.named_buffers() if not buffer.is_meta]
        changed = {id(buffer) for buffer in changed_buffers(model, before)}
        norms = {id(b) for m in model.modules() if isinstance(m, _NormBase) for b in m.buffers()}
        of_this_rank = [
            *(id(b) in changed for _, b in named),
            *(name in before and b.shape != before[name].shape for name, b in named),
            *(self._takes_all and before.is_written(name, b) for name, b in named),
        ]
        flags = agree(of_this_rank)
        chosen = []
        for index, (name, buffer) in enumerate(named):
            is_changed, is_resized, is_written = flags[index :: len(named)]
            if is_resized:
                _check_resized(model, name)
            elif is_changed or is_written or id(buffer) in norms:
                chosen.append(_ChosenBuffer(name, buffer, is_changed))
        return chosen

    @property
    def buffers(self) -> list[torch.Tensor]:
        """The numbers among the selected buffers."""
        return self._tracked[: self._num_floats]

    @property
    def _integers(self) -> list[torch.Tensor]:
        return self._tracked[self._num_floats :][: self._num_integers]

    @property
    def sizes(self) -> list[int]:
        """Numbers of elements of the tensors that `read` returns."""
        combined = self._tracked[: self._num_floats + self._num_integers]
        return [*(b.numel() for b in combined), *([len(self._frozen)] if self._frozen else [])]

    def begin(self) -> None:
        """Begin a step: keep a copy of the values."""
        self._total = []
        self._is_first = True
        self._follow()
        for buffers, before in self._alike():
            torch._foreach_copy_(before, [buffer.detach() for buffer in buffers])

    def _follow(self) -> None:
        """Take the tensors that the model has now, where it assigns a buffer another one."""
        for each in self._assigned:
            assigned = each.module._buffers[each.key]
            assert assigned is not None
            buffer = _real(assigned)
            if buffer.shape != self._before[each.place].shape:
                raise ConfigError(f"""the buffer {each.name} has shape {tuple(buffer.shape)},
                    and had another one in the dry run; keep its shape""")
            self._tracked[each.place] = buffer

    def rewind(self) -> None:
        """Restore the values from the start of the step before a forward pass, if `rows` is set."""
        if self.rows is not None and self._tracked and not self._is_first:
            # .data: an earlier micro-batch's backward pass may be to come, which would refuse them
            with torch.no_grad():  # not a decorator: it takes 4 us in each call
                torch._foreach_copy_([b.data for b in self._tracked], self._before)
        self._is_first = False

    def note(self, targets: Any, inputs: Any) -> None:
        """Add a micro-batch to the mean after its forward pass, if `rows` is set."""
        if self.rows is None or not self._tracked:
            return
        with torch.no_grad():
            part = self.part(targets, inputs)
            self._total = list(torch._foreach_add(self._total, part)) if self._total else part

    @torch.no_grad()
    def part(self, targets: Any, inputs: Any) -> list[torch.Tensor]:
        """Return a micro-batch's part of what `read` returns, after its forward pass."""
        assert self.rows is not None
        self._follow()
        if not self._num_floats and not self._num_integers:
            return []
        weight = count_rows(targets, inputs) / self.rows
        numbers = torch._foreach_mul(self.buffers, weight) if self._num_floats else ()
        changed = zip(self._integers, self._before[self._num_floats :], strict=False)
        moved = [(buffer.long() - before.long()).float() * weight for buffer, before in changed]
        return [*numbers, *moved, *self._flags()]

    def read(self) -> list[torch.Tensor]:
        """Return this rank's part of the mean, after `note` for all its micro-batches.

        One tensor per buffer, and one that is not 0 for each frozen buffer that has changed.
        """
        self._follow()
        return self._total or [*self.buffers, *self._flags()]

    def _flags(self) -> list[torch.Tensor]:
        frozen = [(self._tracked[index], self._before[index]) for index in self._frozen]
        flags = [(buffer != before).any().to(self._tracked[0]) for buffer, before in frozen]
        return [torch.stack(flags)] if flags else []

    @torch.no_grad()
    def write(self, values: Sequence[torch.Tensor]) -> None:
        """Overwrite the buffers with combined values, as `read` orders them, of any shape."""
        if not values or (self._num_floats and values[0] is self._tracked[0]):
            return
        buffers = self.buffers
        new = [value.view_as(b).to(b) for value, b in zip(values, buffers, strict=False)]
        for flag_index, buffer_index in enumerate(self._frozen):
            has_changed = values[-1][flag_index].to(new[buffer_index].device) != 0
            new[buffer_index] = torch.where(
                has_changed, new[buffer_index], self._before[buffer_index]
            )
        moved = zip(values[len(new) :], self._before[len(new) :], self._integers, strict=False)
        new += [_moved(before, value.view_as(before)) for value, before, _ in moved]
        torch._foreach_copy_(self._tracked[: len(new)], new)

    def undo(self, found_inf: torch.Tensor) -> None:
        """Restore the values from the start of the step if `found_inf` is 1: it was skipped."""
        is_host = found_inf.device.type == "cpu"
        if self._tracked and not (is_host and not found_inf):
            self._undo(found_inf, is_host)

    @torch.no_grad()
    def _undo(self, found_inf: torch.Tensor, is_host: bool) -> None:
        for buffers, before in self._alike(self._tracked[: self._num_floats + self._num_integers]):
            if not is_host:  # one kernel for all: each launch costs a GPU more than these numbers
                sizes = [buffer.numel() for buffer in buffers]
                is_skipped = found_inf.to(buffers[0].device) > 0
                both = (torch.cat([each.view(-1) for each in some]) for some in (before, buffers))
                chosen = torch.where(is_skipped, next(both), next(both)).split(sizes)
                before = [each.view_as(b) for each, b in zip(chosen, buffers, strict=True)]
            torch._foreach_copy_(buffers, before)

    def _alike(self, some: Sequence[torch.Tensor] | None = None) -> list[Any]:
        """Return pairs of (buffers, their values before) of one device and dtype each."""
        groups: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        every = self._tracked if some is None else some
        for buffer, before in zip(every, self._before, strict=False):
            buffers, values_before = groups.setdefault((buffer.device, buffer.dtype), ([], []))
            buffers.append(buffer)
            values_before.append(before)
        return list(groups.values())


def _owner_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    module_name, _, key = name.rpartition(".")
    return model.get_submodule(module_name), key


def _check_resized(model: nn.Module, name: str) -> None:
    """Raise ConfigError for a buffer of the model's state that gets another shape."""
    module, key = _owner_of(model, name)
    if key not in module._non_persistent_buffers_set:
        raise ConfigError(f"""{name} gets another shape in the forward pass, so no resume
            could load a checkpoint; build it with its final shape, or use persistent=False""")


def _is_number(buffer: torch.Tensor) -> bool:
    return buffer.is_floating_point() or buffer.is_complex()


def _real(buffer: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(buffer) if buffer.is_complex() else buffer


def _moved(before: torch.Tensor, mean: torch.Tensor) -> torch.Tensor:
    """Return integers or flags after the mean of their changes."""
    if before.dtype == torch.bool:
        return before ^ (mean != 0).to(before.device)
    return (before.long() + mean.round().to(before.device).long()).to(before.dtype)
