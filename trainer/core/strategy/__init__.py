"""Parallel strategies, and the choice of one, and of the devices of a rank.

Each is one file, with its rules in `check`, and a YAML in conf/strategy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from trainer.base.errors import ConfigError
from trainer.core.config.schema import StrategySettings
from trainer.core.distributed import accelerator
from trainer.core.distributed.world import World
from trainer.core.extensions import STRATEGIES
from trainer.core.strategy.base import Strategy
from trainer.core.strategy.mesh_sizes import is_divided


def find_devices(settings: StrategySettings, world: World) -> tuple[torch.device, ...]:
    """Return the devices of this rank: GPUs in the order of the local ranks, else the CPU.

    Raises ConfigError if torch does not see such a GPU.
    """
    count = accelerator.count()
    each = settings.devices_per_rank
    if not count:
        return (torch.device("cpu"),) * each
    indexes: Sequence[int] = range(world.local_rank * each, (world.local_rank + 1) * each)
    if find_strategy(settings).takes_device_ids:  # one process for all GPUs
        indexes = settings.device_ids or range(count)
    elif each == 1:
        indexes = [world.local_rank % count]  # ranks may share a GPU
    if max(indexes) >= count or min(indexes) < 0:
        ids = settings.device_ids
        key = f"device_ids={ids}" if ids else f"devices_per_rank={each}"
        raise ConfigError(f"""strategy.{key}: rank {world.rank} has no GPU {max(indexes)};
            use the {count} that torch sees""")
    return tuple(torch.device(accelerator.kind(), index) for index in indexes)


def find_strategy(settings: StrategySettings) -> type[Strategy]:
    """Return the strategy of `find_name`. Raises ConfigError if there is none."""
    strategy: type[Strategy] = _load(find_name(settings)).STRATEGY
    return strategy


def find_name(settings: StrategySettings) -> str:
    """Return the name of the strategy, or of the one that it needs for the mesh.

    Raises ConfigError if there is none.
    """
    name = settings.name
    strategy = getattr(_load(name), "STRATEGY", None)
    if strategy is None:
        raise ConfigError(f"strategy.name={name}: is no strategy; choose one with strategy=<name>")
    on_mesh = vars(strategy).get("on_mesh")  # of this class: a subclass is another strategy
    if on_mesh and is_divided(settings.mesh):
        return find_name(replace(settings, name=on_mesh))
    return name


def _load(name: str) -> ModuleType:
    """Return the module of a strategy. Raises ConfigError if there is none."""
    if name in STRATEGIES:
        extension: ModuleType = STRATEGIES[name].load()
        return extension
    module = f"{__name__}.{name}"
    if not name.isidentifier() or find_spec(module) is None:
        raise ConfigError(f"""strategy.name={name}: must be the name of a file in
            trainer/core/strategy, or one of {", ".join(STRATEGIES)}""")
    return import_module(module)
