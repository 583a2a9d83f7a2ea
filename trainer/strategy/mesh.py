"""The mesh: this rank's place among the ranks, in plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.distributed.world import World


@dataclass(frozen=True)
class Mesh:
    """Coordinates of a rank. Whatever splits data or compares ranks asks it, and never the world.

    `data_rank` of `data_size` says which rows of a global batch this rank takes.
    """

    data_rank: int
    data_size: int

    @classmethod
    def replicated(cls, world: World) -> Mesh:
        """Every rank holds the whole model and takes rows of its own."""
        return cls(data_rank=world.rank, data_size=world.world_size)
