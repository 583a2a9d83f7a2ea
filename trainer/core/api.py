"""The interface of the core: all that a companion imports from it, each when it is asked for.

A companion imports names from here and from `trainer`, and what knows nothing of training from
`trainer.base`. Friends, which tests/project/test_architecture.py lists, know the core's modules.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainer.base.process import uncollected

# ruff: isort: off
if TYPE_CHECKING:
    # Settings, as they are composed, checked and saved
    from trainer.core.config.compose import answer, load_run_config, parse
    from trainer.core.config.rules import check_path
    from trainer.core.config.saved_config import CONFIG, read_settings
    from trainer.core.config.schema import LAYOUT, CheckpointSettings, LaunchSettings, MeshSizes
    from trainer.core.config.typed import build, convert
    from trainer.core.config.working_folder import find_options

    # Runs and their checkpoints on a disk
    from trainer.core.checkpoints import run_directory, transaction
    from trainer.core.checkpoints.run_directory import PROOF, Lease, read_values, write_exit
    from trainer.core.checkpoints.transaction import MANIFEST, CheckpointFiles, Manifest, is_gone
    from trainer.core.checkpoints.reading import open_content
    from trainer.core.checkpoints.resume import FIXED
    from trainer.core.checkpoints.saver import copy_again
    from trainer.core.checkpoints.tensor_files import memory_of, write_tensors
    from trainer.core.engine.training_state import OF_MODEL

    # Stores of runs, such as a bucket
    from trainer.core.config.stores import (
        RECORD,
        Events,
        Held,
        Mirror,
        NotThereError,
        Store,
        StoreError,
        StoreWriter,
        address_problem,
        is_address,
        open_store,
    )
    from trainer.core.config.copies import address_of, copy_of, with_addresses
    from trainer.core.distributed.owner import Owner

    # Data and its order
    from trainer.core.data import ledger
    from trainer.core.data.ledger import chains_of
    from trainer.core.data.order import BatchPlan, EpochSampler
    from trainer.core.data.sampling import Sampling
    from trainer.core.data.sampling.mixture import read_sampling
    from trainer.core.data.sampling.shard_order import ShardShuffle
    from trainer.core.data.workers import context_of_workers, prepare_worker
    from trainer.core.rng import seed_all, seed_example
    from trainer.core.rng.forward import ExampleRng
    from trainer.core.rng.philox import key_of

    # Ranks, launchers and signals
    from trainer.core.distributed import accelerator
    from trainer.core.distributed.launchers import MARK, OF_A_GROUP, Launcher
    from trainer.core.distributed.signals import SIGNALS, check_start, interrupt, signal_to_stop
    from trainer.core.distributed.world import count_ranks
    from trainer.core.strategy import find_strategy
    from trainer.core.strategy.ddp import COMPRESSING
    from trainer.core.strategy.mesh_sizes import Mesh
    from trainer.core.setup.early_checks import check_job, fits_here, list_sizes

    # Tasks, and what a run does and records
    from trainer.core.task import Task
    from trainer.core.trainer import examine_step
    from trainer.core.engine.evaluation import Evaluator
    from trainer.core.engine.values import first_rows
    from trainer.core.hook_calls import call
    from trainer.core.loop.diagnosis import Example
    from trainer.core.loop.training import examine, kept_task
    from trainer.core.record.startup import Summary, picture
    from trainer.core.record.trackers import SAMPLES, Sink

_NAMES = {  # by module of the core, as above
    # Settings, as they are composed, checked and saved
    "config.compose": "answer load_run_config parse",
    "config.rules": "check_path",
    "config.saved_config": "CONFIG read_settings",
    "config.schema": "LAYOUT CheckpointSettings LaunchSettings MeshSizes",
    "config.typed": "build convert",
    "config.working_folder": "find_options",
    # Runs and their checkpoints on a disk
    "checkpoints": "run_directory transaction",
    "checkpoints.run_directory": "PROOF Lease read_values write_exit",
    "checkpoints.transaction": "MANIFEST CheckpointFiles Manifest is_gone",
    "checkpoints.reading": "open_content",
    "checkpoints.resume": "FIXED",
    "checkpoints.saver": "copy_again",
    "checkpoints.tensor_files": "memory_of write_tensors",
    "engine.training_state": "OF_MODEL",
    # Stores of runs, such as a bucket
    "config.stores": (
        "RECORD Events Held Mirror NotThereError "
        "Store StoreError StoreWriter address_problem is_address open_store"
    ),
    "config.copies": "address_of copy_of with_addresses",
    "distributed.owner": "Owner",
    # Data and its order
    "data": "ledger",
    "data.ledger": "chains_of",
    "data.order": "BatchPlan EpochSampler",
    "data.sampling": "Sampling",
    "data.sampling.mixture": "read_sampling",
    "data.sampling.shard_order": "ShardShuffle",
    "data.workers": "context_of_workers prepare_worker",
    "rng": "seed_all seed_example",
    "rng.forward": "ExampleRng",
    "rng.philox": "key_of",
    # Ranks, launchers and signals
    "distributed": "accelerator",
    "distributed.launchers": "MARK OF_A_GROUP Launcher",
    "distributed.signals": "SIGNALS check_start interrupt signal_to_stop",
    "distributed.world": "count_ranks",
    "strategy": "find_strategy",
    "strategy.ddp": "COMPRESSING",
    "strategy.mesh_sizes": "Mesh",
    "setup.early_checks": "check_job fits_here list_sizes",
    # Tasks, and what a run does and records
    "task": "Task",
    "trainer": "examine_step",
    "engine.evaluation": "Evaluator",
    "engine.values": "first_rows",
    "hook_calls": "call",
    "loop.diagnosis": "Example",
    "loop.training": "examine kept_task",
    "record.startup": "Summary picture",
    "record.trackers": "SAMPLES Sink",
}
_HOMES = {name: f"trainer.core.{home}" for home, names in _NAMES.items() for name in names.split()}
_MODULES = ("accelerator", "ledger", "run_directory", "transaction")


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trainer.core.api' has no attribute {name!r}")
    with uncollected():
        if name in _MODULES:
            return import_module(f"{_HOMES[name]}.{name}")
        return getattr(import_module(_HOMES[name]), name)
