"""Lockstep: one run, any layout. What a task may import; torch is loaded when it is needed."""

from trainer import process  # noqa: F401  # before any other import

# isort: split
import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer.errors import CheckpointError, ConfigError, RunError
from trainer.process import uncollected

# Torch reads it when it is loaded. At WARNING a rank whose store dies prints 20 lines of C++ frames
# before our line, which says the same.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

if TYPE_CHECKING:
    from trainer.checkpoints.run_directory import read_run
    from trainer.config.compose import load_config
    from trainer.config.schema import Config
    from trainer.config.typed import limit
    from trainer.data.packing import PackedDataset
    from trainer.data.resident import ResidentDataset
    from trainer.data.sampling.mixture import ClassBalanced, Mixture, Weighted
    from trainer.distributed.world import World
    from trainer.record.trackers import Observer
    from trainer.rng.philox import Random
    from trainer.shards.dataset import ShardedDataset
    from trainer.task import Split
    from trainer.trainer import Summary, Trainer

_HOMES = {
    "ClassBalanced": "trainer.data.sampling.mixture",
    "Config": "trainer.config.schema",
    "Mixture": "trainer.data.sampling.mixture",
    "Observer": "trainer.record.trackers",
    "PackedDataset": "trainer.data.packing",
    "Random": "trainer.rng.philox",
    "ResidentDataset": "trainer.data.resident",
    "ShardedDataset": "trainer.shards.dataset",
    "Split": "trainer.task",
    "Summary": "trainer.trainer",
    "Trainer": "trainer.trainer",
    "Weighted": "trainer.data.sampling.mixture",
    "World": "trainer.distributed.world",
    "limit": "trainer.config.typed",
    "load_config": "trainer.config.compose",
    "read_run": "trainer.checkpoints.run_directory",
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
