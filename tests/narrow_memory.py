"""Tasks whose memory has room for few rows only."""

import os
import resource
import time
from pathlib import Path

import torch
from mesh_gpt import Meshed
from tiny import Begun, Tiny
from torch import nn

from trainer.core.distributed.rendezvous import GUEST

ROOM = "ROOM"  # environment variable: rows that fit, by rank


def check_room(rows: int, rank: int) -> None:
    most = os.environ[ROOM].split()
    if rows > int(most[rank % len(most)]):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 MiB. GPU 0 has none.")


class Narrow(Tiny):
    def loss(self, outputs, targets):
        check_room(len(targets), self.world.rank)
        return super().loss(outputs, targets)


class NarrowMesh(Meshed):
    def loss(self, outputs, targets):
        check_room(len(targets[0]), self.world.rank)
        return super().loss(outputs, targets)


class Late(Begun):
    """Task that runs out of memory in the first step, and not in the dry run before."""

    def loss(self, outputs, targets):
        check_room(len(targets) if self.has_begun else 0, self.world.rank)
        return super().loss(outputs, targets)


class Stuck(Narrow):
    """Task that tells that it is built in this process, and never ends to."""

    def build_model(self):
        Path(f"stuck-{os.getpid()}").touch()
        time.sleep(600)


class Failing(Narrow):
    def loss(self, outputs, targets):
        raise ValueError("the loss of this task is wrong")


class Wide(nn.Linear):
    """Linear layer whose outputs need 200 MB a row."""

    def forward(self, inputs):
        large = inputs[:, :1].repeat(1, 25_000_000)
        return super().forward(inputs) + large.double().mean(1)[:, None]


class Hungry(Tiny):
    """Task whose processes get 2 GB more: in trials, and where LIMITED is set in the run too."""

    def build_model(self):
        if GUEST in os.environ or "LIMITED" in os.environ:
            (line,) = [
                line
                for line in Path("/proc/self/status").read_text().splitlines()
                if line.startswith("VmData:")
            ]
            most = int(line.split()[1]) * 1024 + 2 * 10**9
            resource.setrlimit(resource.RLIMIT_DATA, (most, most))
        return Wide(4, 3)
