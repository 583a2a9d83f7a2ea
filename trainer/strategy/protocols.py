"""Protocols: what a strategy uses of the rest of a run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from trainer.data.batches import MicroBatch


class PrecisionProtocol(Protocol):
    """Precision of a run, as strategies use it."""

    dtype: torch.dtype

    @property
    def wide(self) -> torch.dtype: ...
    def autocast(self) -> AbstractContextManager: ...
    def cast(self, tree: Any) -> Any: ...
    def root(self, total: torch.Tensor, factor: float) -> torch.Tensor: ...


class ObjectiveProtocol(Protocol):
    """A loss as strategies use it: (outputs, targets) -> (sum to differentiate, carried values).

    The gradient of the sum is multiplied by `scale`. Carried values are summed over the ranks
    together with the gradients. `absent` returns those of a rank without outputs. `sums` returns
    the sums of the values, of their sizes and of their weights, to compare.
    """

    @property
    def scale(self) -> float: ...
    def __call__(self, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]: ...
    def absent(self) -> torch.Tensor: ...
    def sums(self, outputs: Any, targets: Any) -> torch.Tensor: ...


class MicroBatches(Protocol):
    """This rank's micro-batches of a global batch, as `LocalBatch` yields them."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[MicroBatch]: ...
