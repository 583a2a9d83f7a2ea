"""A rank as its watcher sees it: its phase and what it waits for, and how slow it is."""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum

HOST = os.uname().nodename
PATIENCE = 5  # times the limit, before the first step and while saving
STRAGGLER = 3.0  # times the median
STRAGGLER_STEPS = 50
# The groups of a mesh; 0: none of these.
GROUPS = ("", "pipeline", "replicate", "shard", "context", "tensor", "data")
PHASES = (
    "start-up",
    "building data and model",
    "the data loader",
    "forward and backward",
    "gradient all-reduce",
    "the update",
    "reading the losses",
    "evaluation",
    "saving a checkpoint",
    "the end of the run",
    "waiting for the device",
)


class Phase(IntEnum):
    """The phase that a rank is in; PHASES has their names. LEFT: it is no longer watched."""

    START, BUILD, DATA, COMPUTE, REDUCE, UPDATE, LOG, EVALUATE, SAVE, END, DEVICE, LEFT = range(12)


@dataclass(frozen=True)
class State:
    """One rank at one moment: `seconds` in its phase; `total` seconds of work in `steps` steps."""

    rank: int
    place: str
    pid: int
    step: int
    phase: int
    seconds: float
    total: float
    steps: int
    group: str
    is_stopped: bool
    stopped_children: list[int]

    @property
    def patience(self) -> int:
        return PATIENCE if not self.steps or self.phase == Phase.SAVE else 1

    def is_waiting(self, stack: Sequence[str]) -> bool:
        """Return True if it is in a collective, which ends when other ranks call it too."""
        if self.is_stopped or self.group:
            return not self.is_stopped
        is_building_ddp = any("torch/nn/parallel/distributed.py" in frame for frame in stack[:1])
        is_in_collective = any("torch/distributed/" in frame for frame in stack[:3])
        is_in_collective |= any("trainer/distributed/group.py" in frame for frame in stack[:1])
        # a collective of a GPU returns at once: the host waits later, for the step's outcome
        is_by_phase = self.phase in (Phase.REDUCE, Phase.DEVICE)
        return is_by_phase or is_building_ddp or is_in_collective

    def describe(self) -> str:
        children = ", ".join(map(str, self.stopped_children))
        return (
            f"rank {self.rank} ({self.place}process {self.pid} on {HOST}) has been in"
            f" {PHASES[self.phase]} for {self.seconds:.0f} s, at step {self.step}"
            + (", stopped by a signal" if self.is_stopped else "")
            + (f"; its child process {children} is stopped" if children else "")
        )


class Stragglers:
    """Find ranks whose own work in a step takes 3 times the median, over 50 steps; once each."""

    def __init__(self) -> None:
        self._before: Sequence[State] = ()
        self._named: set[int] = set()

    def report(self, states: Sequence[State]) -> None:
        """Print a line for each new straggler among the ranks of this node."""
        before = self._before or states
        pairs = list(zip(states, before, strict=True))
        steps = min(s.steps - past.steps for s, past in pairs)
        self._before = before if steps < STRAGGLER_STEPS else states
        if steps < STRAGGLER_STEPS or len(states) == 1:
            return
        means = {s.rank: (s.total - past.total) / (s.steps - past.steps) for s, past in pairs}
        median = statistics.median_low(means.values())
        for rank, mean in means.items():
            if mean > STRAGGLER * median and rank not in self._named:
                self._named.add(rank)
                times = f"{mean * 1e3:.1f} ms a step over the last {steps} steps"
                who = f"rank {rank} on {HOST} is a straggler"
                say(f"warning: {who}: {times}, the median is {median * 1e3:.1f}")


def say(line: str) -> None:
    with suppress(OSError):  # the terminal was closed
        print(line, file=sys.stderr, flush=True)
