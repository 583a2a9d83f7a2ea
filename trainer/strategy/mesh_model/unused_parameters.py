"""Parameters that the rows of some ranks do not reach in a step, such as those of an expert."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import nn


class UnusedParameters:
    """A divided model's parameters without a gradient on this rank.

    With `is_allowed` a parameter gets its gradient on all ranks if one reached it, else on none.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], is_allowed: bool):
        self._parameters = parameters
        self._is_allowed = is_allowed
        self._missed: Counter[nn.Parameter] = Counter()  # backward passes that did not reach it
        self._of_others: dict[nn.Parameter, torch.Tensor] = {}

    def begin(self) -> None:
        """Begin a step."""
        self._missed.clear()

    def note(self, parameter: nn.Parameter) -> None:
        """Note that a backward pass did not reach a sharded parameter, which got zeros instead."""
        self._missed[parameter] += 1

    def drop(self, num_passes: int) -> None:
        """Take the gradients of other ranks from parameters that no pass of this rank reached."""
        every = [p for p, count in self._missed.items() if count == num_passes]
        self._of_others = {p: p.grad for p in every if p.grad is not None}
        for parameter in every:
            parameter.grad = None

    def flags(self) -> list[torch.Tensor]:
        """Return 1 for each parameter that this rank's rows reached, to sum over the ranks."""
        if not self._is_allowed or not self._parameters:
            return []
        flags = [p.grad is not None for p in self._parameters]
        return [torch.tensor(flags, dtype=torch.float64, device=self._parameters[0].device)]

    def fill(self, counts: torch.Tensor) -> None:
        """Complete the gradients, given the sums of the flags."""
        for parameter, count in zip(self._parameters, counts.tolist(), strict=False):
            if not count:
                parameter.grad = None
            elif parameter.grad is None:
                parameter.grad = self._of_others.get(parameter, torch.zeros_like(parameter))
