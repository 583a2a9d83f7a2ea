"""The mesh: the axes along which ranks divide data and model, and this rank's coordinates."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

from trainer.config.schema import Mesh as Sizes
from trainer.distributed.world import World
from trainer.errors import ConfigError


@dataclass(frozen=True)
class Mesh:
    """Coordinates of a rank. Code that splits data or compares ranks uses them, not the world.

    Ranks of an inner axis have consecutive numbers. `replicate` counts copies of the model,
    `shard` the ranks that divide a copy; both divide the rows of a global batch.
    """

    rank: int
    replicate: int
    shard: int

    @classmethod
    def of(cls, sizes: Sizes, world: World) -> Mesh:
        """Return the mesh of these sizes over all ranks.

        Raises ConfigError if the product of the axes is not the number of ranks.
        """
        axes = asdict(sizes)
        if axes["shard"] == "node":
            each = world.local_world_size if world.num_nodes > 1 else 2
            axes["shard"] = min(each, world.world_size)
        fixed = math.prod(size for size in axes.values() if size != "auto")
        free = [name for name, size in axes.items() if size == "auto"]
        given = ", ".join(f"{name}={size}" for name, size in axes.items())
        if len(free) > 1:
            raise ConfigError(f"strategy.mesh: {given}: only one axis may be auto")
        for name in free:
            axes[name] = max(1, world.world_size // fixed)
        if math.prod(axes.values()) != world.world_size:
            ranks = f"{world.world_size} ranks were started"
            must = "must be the number of ranks" if not free else "must divide the number of ranks"
            advice = (
                f"start {fixed} or set strategy.mesh.<axis>=auto"
                if not free
                else (f"start a multiple of {fixed}, or set another size")
            )
            raise ConfigError(f"strategy.mesh: {given}: the product {must}, and {ranks}; {advice}")
        return cls(world.rank, **axes)

    @property
    def data_size(self) -> int:
        """Number of parts into which a global batch is divided."""
        return self.replicate * self.shard

    @property
    def data_rank(self) -> int:
        """Number of this rank's part of a global batch."""
        return self.rank

    @property
    def shard_rank(self) -> int:
        """Number of this rank's part of the model."""
        return self.rank % self.shard

    @property
    def replica(self) -> int:
        """Number of this rank's copy of the model."""
        return self.rank // self.shard
