"""Lockstep: one run, any layout. What a task may import; torch is loaded when it is needed."""

from trainer.process import working_directory  # noqa: F401  # before any other import

# isort: split
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer.errors import CheckpointError, ConfigError, RunError
from trainer.process.loading import uncollected

# Torch reads it when it is loaded. At WARNING a rank whose store dies prints 20 lines of C++ frames
# before our line, which says the same.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

if TYPE_CHECKING:
    from trainer.config.compose import load_config
    from trainer.config.schema import Config
    from trainer.config.typed import limit
    from trainer.data.loaders import ResidentDataset
    from trainer.data.packing import PackedDataset
    from trainer.data.sampling.mixture import ClassBalanced, Mixture
    from trainer.data.sampling.weighted import Weighted
    from trainer.data.shards.dataset import ShardedDataset
    from trainer.distributed.world import World
    from trainer.record.trackers.observer import Observer
    from trainer.rng.philox import Random
    from trainer.task import Split
    from trainer.trainer import Summary, Trainer

_HOMES = {
    "ClassBalanced": "trainer.data.sampling.mixture",
    "Config": "trainer.config.schema",
    "Mixture": "trainer.data.sampling.mixture",
    "Observer": "trainer.record.trackers.observer",
    "PackedDataset": "trainer.data.packing",
    "Random": "trainer.rng.philox",
    "ResidentDataset": "trainer.data.loaders",
    "ShardedDataset": "trainer.data.shards.dataset",
    "Split": "trainer.task",
    "Summary": "trainer.trainer",
    "Trainer": "trainer.trainer",
    "Weighted": "trainer.data.sampling.weighted",
    "World": "trainer.distributed.world",
    "limit": "trainer.config.typed",
    "load_config": "trainer.config.compose",
}

__all__ = [
    "CheckpointError",
    "ClassBalanced",
    "Config",
    "ConfigError",
    "Mixture",
    "Observer",
    "PackedDataset",
    "Random",
    "ResidentDataset",
    "RunError",
    "ShardedDataset",
    "Split",
    "Summary",
    "Trainer",
    "Weighted",
    "World",
    "limit",
    "load_config",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        with uncollected():
            return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")
