"""Placements of tensors: the part of each tensor that each rank of a mesh has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch

from trainer.strategy.mesh import SHARDED, WHOLE, Mesh
from trainer.strategy.sharded.fully_shard import Sharding
from trainer.strategy.shards import Shard
from trainer.strategy.tensor_parallel.plan import MatrixPart


class Placements:
    """The parts of a model's tensors, by their names in the model.

    `cuts[name]`: how tensor parallel divides the parameter.
    """

    def __init__(
        self,
        mesh: Mesh,
        sharding: Sharding | None,
        cuts: Mapping[str, MatrixPart],
        stages: Mapping[str, tuple[int, ...]],
        owners: Mapping[str, int],
    ):
        """`stages[name]`: stages that use the tensor; default (0,). `owners[name]`: the stage that
        writes it; default its first."""
        self.cuts = cuts
        self._mesh = mesh
        self._sharding = sharding
        self._stages = stages
        self._owners = owners

    def stages(self, name: str) -> tuple[int, ...]:
        return self._stages.get(name, (0,))

    def has(self, name: str) -> bool:
        """Return True if this rank's stage uses a tensor."""
        return self._mesh["pipeline"] in self.stages(name)

    def is_sharded(self, tensor: torch.Tensor) -> bool:
        return self._sharding is not None and self._sharding.divides(tensor)

    def divides(self, name: str, tensor: torch.Tensor) -> bool:
        """Return True if this rank has only a part of a tensor, or nothing."""
        return tensor.is_meta or name in self.cuts or self.is_sharded(tensor)

    def num_copies(self, name: str, tensor: torch.Tensor) -> int:
        """Return how many ranks have each element of a tensor."""
        mesh = self._mesh
        number = mesh.replicate * len(self.stages(name))
        if not self.is_sharded(tensor):
            number *= mesh.shard * mesh.context
        return number if name in self.cuts else number * mesh.tensor

    def shard(self, name: str, tensor: torch.Tensor) -> Shard:
        """Return this rank's part of a tensor, as a plain tensor that shares its memory."""
        cut = self.cuts.get(name)
        is_sharded = self.is_sharded(tensor)
        is_written = self._is_writer(name, cut is not None, is_sharded)
        local = (cast(Any, tensor).to_local() if is_sharded else tensor).detach()
        part = Shard.whole(tensor, is_written)
        if cut is not None:
            part = cut.shard(tensor, is_written)
        if not is_sharded:
            return part._replace(tensor=local, axes=WHOLE)
        assert self._sharding is not None
        each = -(-len(tensor) // self._sharding.group.size)  # as torch.chunk divides
        bands = part.rows(each * self._sharding.group.rank, len(local))
        offset = (bands[0][0] if bands else part.shape[0], *part.offset[1:])
        bands = bands if len(bands) > 1 else ()
        return Shard(local, part.shape, offset, is_written, bands, SHARDED)

    def is_first_copy(self, name: str) -> bool:
        """Return True on the first replica of the stage that writes a tensor."""
        place = self._mesh.coordinates()
        owner = self._owners.get(name, self.stages(name)[0])
        return place["pipeline"] == owner and not place["replicate"]

    def _is_writer(self, name: str, is_cut: bool, is_sharded: bool) -> bool:
        place = self._mesh.coordinates()
        is_first = self.is_first_copy(name)
        if not is_sharded:
            is_first &= not place["shard"] and not place["context"]
        return is_first and (is_cut or not place["tensor"])

    def writers(self) -> list[int]:
        """Return the ranks that write a part of a checkpoint."""
        mesh = self._mesh
        divides = {"pipeline", "tensor"} | (
            {"shard", "context"} if self._sharding is not None else set()
        )
        places = {rank: mesh.coordinates(rank) for rank in range(mesh.size)}
        return [
            rank
            for rank, place in places.items()
            if not any(number for axis, number in place.items() if axis not in divides)
        ]
