"""Shards: a rank's part of a tensor, and the tensors of a model under the names of its state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch.nn.parameter import is_lazy

from trainer.errors import CheckpointError


class Shard(NamedTuple):
    """A rank's part of a tensor, `tensor`, which begins at `offset` in the whole of `shape`.

    `is_written` is True on the one rank that writes this part into a checkpoint.
    """

    tensor: torch.Tensor
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    is_written: bool

    @classmethod
    def whole(cls, tensor: torch.Tensor, is_written: bool) -> Shard:
        """Return the shard of a tensor that this rank has as a whole."""
        return cls(tensor, tuple(tensor.shape), (0,) * tensor.dim(), is_written)

    def holding(self, tensor: torch.Tensor) -> Shard:
        """Return the shard of another tensor, divided like this one if it has the same shape."""
        if tensor.dim() and tensor.shape == self.tensor.shape:
            return self._replace(tensor=tensor)
        return Shard.whole(tensor, self.is_written and not any(self.offset))


class Source(Protocol):
    """Tensors of a checkpoint by name, read in parts."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]: ...
    def read(self, name: str, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor: ...
    def skip(self, name: str) -> None: ...  # instead of `read`, which may be a collective


def read_whole(source: Source) -> dict[str, torch.Tensor]:
    """Return every tensor of a source."""
    shapes = source.shapes()
    return {name: source.read(name, (0,) * len(shape), shape) for name, shape in shapes.items()}


@torch.no_grad()
def read_into(shards: Mapping[str, Shard], source: Source) -> None:
    """Overwrite shards with their parts of a source, one tensor at a time."""
    for name, shard in shards.items():
        shard.tensor.copy_(source.read(name, shard.offset, shard.tensor.shape))


def check_model(built: Mapping[str, Shard], saved: Mapping[str, tuple[int, ...]]) -> None:
    """Raise CheckpointError, naming the first difference, if a state is of another model."""
    wrong = "the checkpoint is of another model"
    advice = "resume with the task and model it was trained with"
    for name, shard in built.items():
        if name not in saved:
            raise CheckpointError(f"{wrong}: it has no {name}; {advice}")
        if not is_lazy(shard.tensor) and shard.shape != saved[name]:
            shapes = f"{saved[name]} in it and {shard.shape} here"
            raise CheckpointError(f"{wrong}: {name} is {shapes}; {advice}")
    for name in saved:
        if name not in built:
            raise CheckpointError(f"{wrong}: {name} is not in the model built here; {advice}")
