"""torch's DataParallel: one process splits each micro-batch over its GPUs."""

from __future__ import annotations

from torch import nn

from trainer.base.errors import ConfigError
from trainer.core.config.schema import Config
from trainer.core.distributed import accelerator
from trainer.core.distributed.world import World
from trainer.core.micro_batch import MicroBatch
from trainer.core.strategy.base import ObjectiveProtocol
from trainer.core.strategy.single import SingleDevice


class DataParallel(SingleDevice):
    """One process over several GPUs; without a GPU the same as strategy=single."""

    takes_device_ids = True

    @classmethod
    def check(cls, config: Config, world: World) -> None:
        block = config.strategy
        if block.sync_batchnorm or block.devices_per_rank > 1:
            count = f"devices_per_rank={block.devices_per_rank}"
            name = "sync_batchnorm=true" if block.sync_batchnorm else count
            raise ConfigError(f"strategy.{name}: is not supported by torch's DataParallel; use ddp")
        if config.norm_rows is not None and len(world.devices) > 1:
            raise ConfigError(f"""run.norm_rows={config.norm_rows}:
                torch's DataParallel splits micro-batches anywhere; set null, or use ddp""")
        is_recomputed = block.recompute != "none"
        if len(world.devices) > 1 and (config.run.compile or is_recomputed):
            name = "strategy.recompute" if is_recomputed else "run.compile"
            raise ConfigError(f"""{name}: torch's DataParallel makes copies,
                which would use the weights of the first GPU; leave it out, or use ddp""")
        if world.world_size > 1:
            raise ConfigError(f"strategy=dp: must be one process, and {world.started}; use ddp")
        super(SingleDevice, cls).check(config, world)

    @classmethod
    def draws_by_example(cls, config: Config, world: World) -> bool:
        """Return False with several GPUs: replicas are threads, where torch modes do not work."""
        return super().draws_by_example(config, world) and len(world.devices) == 1

    def prepare(self, batch: MicroBatch, objective: ObjectiveProtocol) -> None:
        super().prepare(batch, objective)
        if accelerator.is_used(self.world.device):
            self._wrapped = nn.DataParallel(self.module, list(self.world.devices))

    def list_remarks(self, is_resumed: bool) -> list[str]:
        if self.world.device.type == "cpu":
            return ["without a GPU, dp runs as strategy=single"]
        is_one = len(self.world.devices) == 1
        return [] if is_one else ["dp keys dropout by GPU and micro-batch, not by example"]


STRATEGY = DataParallel
