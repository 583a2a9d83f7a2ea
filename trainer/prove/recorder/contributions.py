"""Contributions: what each backward pass adds to each gradient, before any reduction.

They tell losses that are weighted otherwise from gradients that are changed afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import WeakIdKeyDictionary

from .log import LOG, quietly
from .sketches import encode, is_apart, sketch
from .wrapping import Given, watch

NO_TAG = -1


class Contributions:
    """Sketches of the gradients of a backward pass; a parameter has a number, its tag."""

    def __init__(self) -> None:
        self._tags = WeakIdKeyDictionary()
        self._sums: dict[int, torch.Tensor] = {}
        self._is_open = False
        self._scale = 1.0
        self._first: dict[int, torch.Tensor] = {}  # weights before the first backward pass

    def tag(self, parameter: torch.Tensor) -> int:
        """Return the tag of a parameter; NO_TAG for one that is not watched."""
        found: int = self._tags.get(parameter, NO_TAG)
        return found

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch parameters; the gradients of shards (DTensor) pass by such hooks."""
        for each in parameters:
            is_able = each.requires_grad and each.is_leaf and not hasattr(each, "placements")
            if is_able and each not in self._tags:
                tag = len(self._tags)
                self._tags[each] = tag
                each.register_hook(self._noting(tag))

    def _noting(self, tag: int) -> Callable[[torch.Tensor], None]:
        @unserializable_hook  # a parameter is sent to other processes without it
        def note(gradient: torch.Tensor) -> None:
            if self._is_open:
                self._add(tag, gradient)

        return note

    @quietly
    def _add(self, tag: int, gradient: torch.Tensor) -> None:
        added = sketch(gradient) / self._scale
        self._sums[tag] = self._sums[tag] + added if tag in self._sums else added

    def begin(self, scale: float) -> None:
        """Begin a backward pass, of a loss that was multiplied by `scale`."""
        self.watch(list(self._tags))
        if not self._first:
            self._first = {tag: sketch(each) for each, tag in self._tags.items()}
        self._is_open = True
        self._scale = scale

    def has_changed(self, parameter: torch.Tensor) -> bool:
        """Return True if a parameter has other values than before the first backward pass."""
        before = self._first.get(self.tag(parameter))
        return before is not None and is_apart(before, sketch(parameter))

    @quietly
    def end(self) -> None:
        """Write what a backward pass has added."""
        self._is_open = False
        if self._sums:
            tags = list(self._sums)
            LOG.add("contributed", tags=tags, values=encode(list(self._sums.values())))
        self._sums.clear()

    def note_group(self, given: Given, _: Any) -> None:
        """Watch the parameters of an optimizer's group."""
        parameters = given["param_group"]["params"]
        self.watch([parameters] if isinstance(parameters, torch.Tensor) else parameters)

    def note_zeroing(self, given: Given) -> None:
        """Note gradients that are dropped."""
        owner = given["self"]
        if isinstance(owner, nn.Module):
            dropped = list(owner.parameters())
        else:
            dropped = [each for group in owner.param_groups for each in group["params"]]
        tags = [self.tag(each) for each in dropped if each.grad is not None]
        if tags:
            LOG.add("zeroed", tags=[tag for tag in tags if tag != NO_TAG])


CONTRIBUTIONS = Contributions()


def watch_contributions() -> None:
    """Watch the parameters of each optimizer from now on."""
    watch(torch.optim.Optimizer, "add_param_group", after=CONTRIBUTIONS.note_group)
    watch(torch.optim.Optimizer, "zero_grad", before=CONTRIBUTIONS.note_zeroing)
    watch(nn.Module, "zero_grad", before=CONTRIBUTIONS.note_zeroing)
