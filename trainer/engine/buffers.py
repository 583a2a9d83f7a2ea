"""Buffers with `persistent=False`: a checkpoint holds those that training changed.

They are no part of the model's state, so neither exported weights nor `run.init_from` have them.
Constants, such as rotary tables, are built anew at a resume and need no place in a checkpoint.
"""

from __future__ import annotations

import torch

from trainer.codec import digest
from trainer.strategy.shards import (
    Shard,
    TensorSource,
    check_model,
    non_persistent,
    read_into,
    tensors_of,
)
from trainer.strategy.tensors import Tensors


class Buffers:
    """The buffers of a model as built: digests of those with persistent=False, shapes of others."""

    def __init__(self, tensors: Tensors):
        self._tensors = tensors
        self._shapes = self._read_shapes()
        self._built = {name: _print(shard) for name, shard in tensors.non_persistent().items()}

    def shards(self) -> dict[str, Shard]:
        """Return this rank's parts of the buffers that differ from the built model's."""
        every = self._tensors.non_persistent()
        alike = {name: shard for name, shard in every.items() if self._is_shaped(name, shard)}
        return {name: s for name, s in alike.items() if _print(s) != self._built[name]}

    def reshaped(self) -> list[str]:
        """Return the buffers of another shape than as built, which `shards` leaves out."""
        every = self._tensors.non_persistent()
        return [name for name, shard in every.items() if not self._is_shaped(name, shard)]

    def find_change(self) -> str:
        """Return a line if the model's state has other tensors than at the start, else nothing."""
        now = self._read_shapes()
        for name in {**self._shapes, **now}:
            before, after = (shapes.get(name) for shapes in (self._shapes, now))
            if before != after:
                shapes = f"shape {after} and had {before} at the start"
                how = f"has {shapes}" if before is not None else "was added after the start"
                how = how if after is not None else "was removed after the start"
                advice = "build it with its final shape, or use persistent=False"
                return f"{name} {how}, so no resume could load a checkpoint; {advice}"
        return ""

    def _read_shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(t.shape) for name, t in tensors_of(self._tensors.module).items()}

    def _is_shaped(self, name: str, shard: Shard) -> bool:
        return name in self._built and self._built[name][0] == shard.tensor.shape


def _print(shard: Shard) -> tuple[torch.Size, int]:
    return shard.tensor.shape, digest(shard.tensor)


def load_buffers(tensors: Tensors, source: TensorSource) -> None:
    """Load what `Buffers.shards` returned. Raises CheckpointError for another model's buffers."""
    saved = source.shapes()
    built = non_persistent(tensors.structure)
    check_model({name: built[name] for name in saved if name in built}, saved)
    read_into(tensors.non_persistent(), source)
