"""The modules of the package that tests look into, in one place for all of them."""

from trainer import audit, doctor, evaluate, replay
from trainer.__main__ import load_task
from trainer.checkpoints import packing
from trainer.checkpoints import transaction as checkpoint
from trainer.record import directory as rundir

__all__ = [
    "audit",
    "checkpoint",
    "doctor",
    "evaluate",
    "load_task",
    "packing",
    "replay",
    "rundir",
]
