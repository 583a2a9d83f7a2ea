"""`gather_rows` during a proof: the rows of all micro-batches of a pass, as of all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a gradient through the rows of all ranks is not tried in parts")


class Gathering:
    """The tensors that the losses of a pass's micro-batches gather.

    A loss runs twice: first to know its tensors, then with those of all micro-batches joined.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.is_used = False  # by the loss, in a pass over whole rows
        self._number = 0  # of the micro-batch
        self._given: list[list[torch.Tensor]] = []
        self._is_joined = False
        self._call = 0

    @contextmanager
    def over(self, count: int) -> Iterator[Gathering]:
        """Gather over so many micro-batches in the block."""
        self.is_on = True
        if count == 1:
            self.is_used = False
        self._given = [[] for _ in range(count)]
        self._is_joined = False
        try:
            yield self
        finally:
            self.is_on = False
            self._given = []

    def begin(self, number: int) -> None:
        """Begin the loss of a micro-batch."""
        self._number = number
        self._call = 0

    def join(self) -> None:
        """Return joined rows from now on."""
        self._is_joined = True

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Refuse gradients in a loss: those through the rows of other ranks are sums over ranks."""
        kept = torch.autograd.grad
        torch.autograd.grad = _refuse
        try:
            yield
        finally:
            torch.autograd.grad = kept

    def take(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the rows of all micro-batches, and the number of the first one of this one."""
        self.is_used = True
        if not self._is_joined:
            self._given[self._number].append(tensor)
            return tensor, 0
        every = [given[self._call] for given in self._given]
        every[self._number] = tensor
        self._call += 1
        return torch.cat(every), sum(map(len, every[: self._number]))
