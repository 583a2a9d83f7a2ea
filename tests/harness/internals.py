"""The internal modules of the package that tests use, imported in one place."""

from trainer.cli import load_task
from trainer.core.checkpoints import resume
from trainer.core.checkpoints import run_directory as rundir
from trainer.core.checkpoints import transaction as checkpoint
from trainer.core.checkpoints.reading import open_content
from trainer.core.strategy.tensor_shards import read_whole

__all__ = [
    "checkpoint",
    "load_task",
    "open_content",
    "read_whole",
    "resume",
    "rundir",
]
