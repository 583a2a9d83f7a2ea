"""The exponential moving average of the weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from trainer.errors import CheckpointError
from trainer.strategy.shards import Shard, TensorSource, read_into
from trainer.strategy.tensors import Tensors


class Ema:
    """Moving average of the weights: decay x average + (1 - decay) x weight after each step.

    It starts from the initial weights. Parameters are averaged, in 32 bits or more: in 16 an
    average with a decay of 0.999 never moves. Buffers are those of the model. Every rank computes
    the same average from the same weights.
    """

    def __init__(self, tensors: Tensors, decay: float):
        self.decay = decay
        self._refresh = tensors.refresh
        shards = {name: tensors.shard_of(p) for name, p in tensors.parameters.items()}
        weights: list[torch.Tensor] = [*tensors.parameters.values()]
        self._weights = weights  # not detached: a task may replace their .data
        self._averages = [w.detach().to(widened(w.dtype), copy=True) for w in weights]
        self._is_wide = any(widened(w.dtype) != w.dtype for w in weights)
        averages = zip(shards.items(), self._averages, strict=True)
        self._shards = {name: shard._replace(tensor=mean) for (name, shard), mean in averages}

    @torch.no_grad()
    def update(self) -> None:
        weights = self._weights
        if self._is_wide:
            weights = [weight.to(widened(weight.dtype)) for weight in weights]
        torch._foreach_lerp_(self._averages, weights, 1 - self.decay)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Use the averages as the model's weights during the block, then restore the weights."""
        kept = [weight.detach().clone() for weight in self._weights]
        self._write(self._averages)
        try:
            yield
        finally:
            self._write(kept)

    @torch.no_grad()
    def _write(self, weights: list[torch.Tensor]) -> None:
        torch._foreach_copy_(self._weights, weights)
        self._refresh()

    def shards(self) -> dict[str, Shard]:
        """Return this rank's parts of the averages."""
        return self._shards

    @torch.no_grad()
    def load(self, source: TensorSource) -> None:
        """Load the averages; without any in the checkpoint, start from its weights.

        Raises CheckpointError if the averages are of another model.
        """
        saved = source.shapes()
        if missing := [name for name in self._shards if saved and name not in saved]:
            raise CheckpointError(
                f"the checkpoint is of another model: its averages have no {missing[0]}"
            )
        if saved:
            read_into(self._shards, source)
        else:
            self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Start from the current weights."""
        torch._foreach_copy_(self._averages, self._weights)


def widened(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the average of weights of `dtype`."""
    is_narrow = dtype.is_floating_point and dtype.itemsize < 4
    return torch.float32 if is_narrow else dtype


def size_of_averages(weights: Iterable[torch.Tensor]) -> int:
    """Return the bytes of the averages of weights."""
    return sum(weight.numel() * widened(weight.dtype).itemsize for weight in weights)
