"""Who chose OMP_NUM_THREADS: the user, or the launcher, which sets a default for its ranks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from trainer.base.process.table import OMP_NUM_THREADS, environment_at_start
from trainer.core.distributed.launchers import MARK

OF_TORCHRUN = "1"  # what torchrun sets for its ranks if the user set nothing
_RUN = "TORCHELASTIC_RUN_ID"


def is_chosen(environment: Mapping[str, str] = os.environ) -> bool:
    """Return True if the user set OMP_NUM_THREADS.

    torchrun sets it to 1 for its ranks unless it is set. A rank finds out in the environment with
    which torchrun's agent was started. Without /proc a 1 counts as torchrun's.
    """
    value = environment.get(OMP_NUM_THREADS, "").strip()
    if not value or _RUN not in environment or MARK in environment or value != OF_TORCHRUN:
        return bool(value)
    return bool(_environment_of_agent(environment).get(OMP_NUM_THREADS, "").strip())


def _environment_of_agent(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of torchrun's agent: of the nearest ancestor that is not in this rank.

    A shell or a wrapper between the agent and this process has the variables of the rank.
    """
    rank = {name: value for name, value in environment.items() if name.startswith("TORCHELASTIC_")}
    pid = os.getppid()
    while pid > 0:
        variables = environment_at_start(pid)
        if not rank.items() <= variables.items():
            return variables
        pid = _parent_of(pid)
    return {}


def _parent_of(pid: int) -> int:
    with suppress(OSError, ValueError):
        after_name = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2]
        return int(after_name.split()[1])
    return 0
