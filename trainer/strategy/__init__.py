"""Parallel strategies by name: a new one is a file, an entry here and a YAML in conf/strategy."""

from trainer.config.schema import Config
from trainer.distributed.world import World
from trainer.engine.precision import Precision
from trainer.errors import ConfigError
from trainer.strategy.base import SingleDevice, Strategy
from trainer.strategy.ddp import DataParallel, DistributedDataParallel

STRATEGIES: dict[str, type[Strategy]] = {
    "single": SingleDevice,
    "dp": DataParallel,
    "ddp": DistributedDataParallel,
}


def check_strategy(config: Config, world: World) -> None:
    """Refuse, by ConfigError and before any group exists, what cannot work together."""
    block = config.strategy
    if block.name not in STRATEGIES:
        raise ConfigError(f"strategy.name={block.name}: must be one of {', '.join(STRATEGIES)}")
    Precision.check(block.precision, world.device)
    STRATEGIES[block.name].check(config, world)


def build_strategy(config: Config, world: World) -> Strategy:
    block, found = config.strategy, STRATEGIES[config.strategy.name]
    if found is DistributedDataParallel and world.world_size == 1 and block.comm_hook == "none":
        found = SingleDevice  # nobody to reduce with: the same numbers, a third less time around a small model
    return found(config, world, Precision(block.precision, world.device))


__all__ = ["STRATEGIES", "Strategy", "build_strategy", "check_strategy"]
