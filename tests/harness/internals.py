"""The internal modules of the package that tests use, imported in one place."""

from trainer import audit, doctor, evaluate, replay
from trainer.checkpoints import manifest, packing
from trainer.checkpoints import transaction as checkpoint
from trainer.checkpoints.reading import open_content
from trainer.cli import load_task
from trainer.record import files as rundir
from trainer.record import resume
from trainer.strategy.shards import read_whole

__all__ = [
    "audit",
    "checkpoint",
    "doctor",
    "evaluate",
    "load_task",
    "manifest",
    "open_content",
    "packing",
    "read_whole",
    "replay",
    "resume",
    "rundir",
]
