"""Shared parts of the tests: ranks and commands in forks, real launches, two machines, a SLURM
cluster, and runs to compare."""

from harness.command import Command, Done
from harness.launch import ELASTIC, PATHS, SPAWN, TORCHRUN, children_of, ended, launch, ranks_of
from harness.ranks import on_ranks
from harness.rows import slow_but
from harness.training import (
    CONF,
    PARITY,
    check_equal_bits,
    check_parity,
    fit,
    fit_on,
    join,
    newest,
    relative_distance,
    warm_up,
)
from harness.waiting import Beside, free_port, wait_for, within

__all__ = [
    "CONF",
    "ELASTIC",
    "PARITY",
    "PATHS",
    "SPAWN",
    "TORCHRUN",
    "Beside",
    "Command",
    "Done",
    "check_equal_bits",
    "check_parity",
    "children_of",
    "ended",
    "fit",
    "fit_on",
    "free_port",
    "join",
    "launch",
    "newest",
    "on_ranks",
    "ranks_of",
    "relative_distance",
    "slow_but",
    "wait_for",
    "warm_up",
    "within",
]
