"""The tests' tasks, slowed down: they mark their progress, and may hang."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from dataclasses import dataclass

from mesh_gpt import Meshed
from tiny import Items, Tiny
from torch.utils.data import get_worker_info

MARKS = "FAULTS_MARKS"  # names a file to which rank 0 adds a line at each step and evaluation


class Marking:
    """A part of each task here: its first rank marks progress, and one rank may be meant to hang,
    but not after a restart."""

    def _mark(self, text: str) -> None:
        if self.world.rank == 0:
            mark(text)

    def _is_meant(self, where: str) -> bool:
        is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
        return is_first and self.options.where == where and self.world.rank == self.options.rank


class Slow(Marking, Tiny):
    @dataclass
    class Options(Tiny.Options):
        pause_s: float
        build_s: float

    def build_dataset(self, split):
        if split == "train":
            self._mark("building")
            time.sleep(self.options.build_s)
        return super().build_dataset(split)

    def train_step(self, batch):
        self._mark(f"step {self.step + 1}")
        time.sleep(self.options.pause_s)
        return super().train_step(batch)

    def metrics(self, outputs, targets):
        if self.step:
            self._mark(f"evaluation {self.step}")
            time.sleep(self.options.pause_s / 4)
        return {"accuracy": (outputs.argmax(1) == targets).double()}


class Stuck(Slow):
    """Task whose rank `rank` hangs at step `at`, in `where` (step, metrics, worker), but not after
    a restart."""

    @dataclass
    class Options(Slow.Options):
        how: str
        where: str
        rank: int
        at: int

    def build_dataset(self, split):
        if self.options.where != "worker":
            return super().build_dataset(split)
        share = self.config.data.global_batch // self.world.world_size
        is_meant = split == "train" and self._is_meant("worker")
        return Stopping(split, self.options.at * share + 1 if is_meant else 0)

    def train_step(self, batch):
        if self.step == self.options.at and self._is_meant("step"):
            stand_still(self.options.how, os.getpid())
        return super().train_step(batch)

    def metrics(self, outputs, targets):
        if self.step == self.options.at and self._is_meant("metrics"):
            stand_still(self.options.how, os.getpid())
        return super().metrics(outputs, targets)


class Spread(Marking, Meshed):
    """Task for every mesh, whose rank `rank` hangs at step `at`, in `where` (step, metrics)."""

    @dataclass
    class Options(Meshed.Options):
        pause_s: float = 0.01
        how: str = ""
        where: str = ""
        rank: int = -1
        at: int = 0

    def augment(self, inputs, targets, random, train):
        if train:
            self._mark(f"step {self.step + 1}")
        elif self.step:
            self._mark(f"evaluation {self.step}")
        time.sleep(self.options.pause_s)
        if self.step == self.options.at and self._is_meant("step" if train else "metrics"):
            stand_still(self.options.how, os.getpid())
        return inputs, targets


class Stopping(Items):
    """Dataset that stops the data worker at its `at`-th example; 0: never."""

    def __init__(self, split: str, at: int):
        super().__init__(split)
        self.at, self.count = at, 0

    def __getitem__(self, index):
        if get_worker_info() is not None:
            self.count += 1
            if self.count == self.at:
                stand_still("stop", os.getppid())
        return super().__getitem__(index)


def stand_still(how: str, rank_pid: int) -> None:
    mark(f"stuck {rank_pid} {time.monotonic()}")
    if how == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif how == "gil":
        ctypes.PyDLL(None).sleep(1000)  # a C function that keeps the GIL
    elif how == "loop":
        while True:
            pass
    time.sleep(1000)


def mark(text: str) -> None:
    if path := os.environ.get(MARKS):
        with open(path, "a", encoding="utf-8") as file:
            file.write(text + "\n")
