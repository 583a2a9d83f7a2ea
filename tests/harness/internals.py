"""The internal modules of the package that tests use, imported in one place."""

from harness.verbs import audit
from trainer.checkpoints import resume
from trainer.checkpoints import run_directory as rundir
from trainer.checkpoints import transaction as checkpoint
from trainer.checkpoints.reading import open_content
from trainer.cli import load_task
from trainer.strategy.tensor_shards import read_whole

__all__ = [
    "audit",
    "checkpoint",
    "load_task",
    "open_content",
    "read_whole",
    "resume",
    "rundir",
]
