"""Fully sharded data parallel, alone or with copies (FSDP2, HSDP), and with other axes."""

from __future__ import annotations

from trainer.base.errors import ConfigError
from trainer.core.config.schema import Config
from trainer.core.distributed.world import World
from trainer.core.strategy.mesh_sizes import Mesh
from trainer.mesh.parallel import MeshParallel


class FullyShardedDataParallel(MeshParallel):
    """A model over a mesh with ranks that divide its parameters."""

    @classmethod
    def check(cls, config: Config, world: World) -> None:
        super().check(config, world)
        if Mesh.of(config.strategy.mesh, world).shard == 1 and world.world_size > 1:
            raise ConfigError("strategy.mesh.shard=1: strategy=fsdp has nothing to divide; use ddp")


STRATEGY = FullyShardedDataParallel
