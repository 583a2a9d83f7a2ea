"""Lockstep: one run, any layout. What a task may import; torch is loaded when it is needed."""

from trainer.base import process  # noqa: F401  # before any other import

# isort: split
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer.base.errors import CheckpointError, ConfigError, RunError
from trainer.base.process import uncollected

# Torch reads it when it is loaded. At WARNING a rank whose store dies prints 20 lines of C++ frames
# before our line, which says the same.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

if TYPE_CHECKING:
    from trainer.core.checkpoints.run_directory import read_run
    from trainer.core.config.compose import load_config
    from trainer.core.config.schema import Config
    from trainer.core.config.typed import limit
    from trainer.core.data.packing import PackedDataset
    from trainer.core.data.resident import ResidentDataset
    from trainer.core.data.sampling.mixture import ClassBalanced, Mixture, Weighted
    from trainer.core.distributed.world import World
    from trainer.core.record.trackers import Observer
    from trainer.core.rng.philox import Random
    from trainer.core.task import Split
    from trainer.core.trainer import Summary, Trainer
    from trainer.shards.dataset import ShardedDataset

_HOMES = {
    "ClassBalanced": "trainer.core.data.sampling.mixture",
    "Config": "trainer.core.config.schema",
    "Mixture": "trainer.core.data.sampling.mixture",
    "Observer": "trainer.core.record.trackers",
    "PackedDataset": "trainer.core.data.packing",
    "Random": "trainer.core.rng.philox",
    "ResidentDataset": "trainer.core.data.resident",
    "ShardedDataset": "trainer.shards.dataset",
    "Split": "trainer.core.task",
    "Summary": "trainer.core.trainer",
    "Trainer": "trainer.core.trainer",
    "Weighted": "trainer.core.data.sampling.mixture",
    "World": "trainer.core.distributed.world",
    "limit": "trainer.core.config.typed",
    "load_config": "trainer.core.config.compose",
    "read_run": "trainer.core.checkpoints.run_directory",
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
    "read_run",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        with uncollected():
            return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'trainer' has no attribute {name!r}")
