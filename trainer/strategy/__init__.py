"""Parallel strategies by name: a new one is a file, an entry here and a YAML in conf/strategy."""

from trainer.config import Strategy as StrategyConfig
from trainer.distributed.world import World
from trainer.precision import Precision
from trainer.strategy.base import SingleDevice, Strategy
from trainer.strategy.data_parallel import DistributedDataParallel

STRATEGIES: dict[str, type[Strategy]] = {"single": SingleDevice, "ddp": DistributedDataParallel}


def build_strategy(config: StrategyConfig, world: World, precision: Precision) -> Strategy:
    return STRATEGIES[config.name](world, precision)


__all__ = ["STRATEGIES", "Strategy", "build_strategy"]
