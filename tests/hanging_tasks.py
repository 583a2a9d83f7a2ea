"""A task with a rank that hangs in the way that a test selects."""

import os
import signal
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tiny import Items, Tiny


class Sticks(Tiny):
    """Task whose rank `rank` hangs in the way `how` at `at`; a step takes 10 ms, on rank `slow`
    `slow_ms`."""

    @dataclass
    class Options(Tiny.Options):
        how: str
        rank: int
        at: int
        slow_ms: float

    def build_dataset(self, split):
        return (
            Sticking(split, self) if self.options.how == "worker" else super().build_dataset(split)
        )

    def train_step(self, batch):
        self._stick("before")
        time.sleep((self.options.slow_ms if self.world.rank == self.options.rank else 10) / 1000)
        return super().train_step(batch)

    def metrics(self, outputs, targets):
        self._stick("metrics")
        return super().metrics(outputs, targets)

    def _stick(self, place):
        how, _, where = self.options.how.partition("@")
        if (
            self.world.rank != self.options.rank
            or self.step != self.options.at
            or place != (where or "before")
        ):
            return
        if how == "sleep":
            time.sleep(1000)
        elif how == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "gil":
            sum(range(10**15))  # C code that keeps the GIL, and that no signal ends
        elif how == "barrier":
            dist.barrier()  # which the others do not call


class Sticking(Items):
    """Dataset whose data worker is stopped by a signal."""

    def __init__(self, split, task):
        super().__init__(split)
        self.at = (
            task.options.at * 22
            if split == "train" and task.world.rank == task.options.rank
            else -1
        )
        self.count = 0

    def __getitem__(self, index):
        self.count += torch.utils.data.get_worker_info() is not None  # proofs read rows themselves
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().__getitem__(index)
