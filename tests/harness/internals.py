"""The modules of the package that tests look into, in one place for all of them."""

from trainer import audit, doctor, evaluate, replay
from trainer.checkpoints import manifest, packing
from trainer.checkpoints import transaction as checkpoint
from trainer.cli import load_task
from trainer.record import directory as rundir
from trainer.record import resume

__all__ = [
    "audit",
    "checkpoint",
    "doctor",
    "evaluate",
    "load_task",
    "manifest",
    "packing",
    "replay",
    "resume",
    "rundir",
]
