"""Small tasks that the checks train."""

import os
import re
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from trainer import ResidentDataset, Trainer
from trainer.tasks.text import Text

from .steps import profiled, synchronizing_is

RECIPE = """# @package _global_
task:
  name: probe
  trainer: gpu_checks.probe.Probe
  options: {norm: false, dropout: 0.0, amplify: 1.0}
data: {global_batch: 22}
run: {steps: 30}
optim: {lr: 0.3}
log: {every_steps: 1}
strategy: {precision: fp64}
"""
VICTIM, FATAL_STEP = 1, 8  # the rank that a check stops or kills, and the step
KERNELS = "kernels.txt"  # of attention, in the folder of the runs


class Probe(Trainer):
    """Task with 203 points of 4 numbers in 3 classes; its noise has equal bits on every device."""

    @dataclass
    class Options:
        norm: bool
        dropout: float
        amplify: float

    def build_model(self):
        norm = nn.BatchNorm1d(16) if self.options.norm else nn.Identity()
        return nn.Sequential(
            nn.Linear(4, 16), norm, nn.GELU(), nn.Dropout(self.options.dropout), nn.Linear(16, 3)
        )

    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(int(split == "train"))
        inputs = torch.randn(203, 4, generator=generator)
        return ResidentDataset(inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long())

    def blocks(self, model):
        return [model[0], model[4]]

    def tensor_plan(self):
        return {"0": "columns", "4": "rows"}

    def augment(self, inputs, targets, random, train):
        return inputs + 0.1 * random.uniform("noise", 4) if train else inputs, targets

    def loss(self, outputs, targets):
        return self.options.amplify * nn.functional.cross_entropy(
            outputs, targets, reduction="none"
        )

    def predict(self, outputs):
        return {"probability": outputs.softmax(1)}


class Around(nn.Module):
    """User-defined module that wraps another one."""

    def __init__(self, inner: nn.Module):
        super().__init__()
        self.inner = inner

    def forward(self, inputs):
        return self.inner(inputs)


class Own(Probe):
    def build_model(self):
        return Around(super().build_model())

    def blocks(self, model):
        return super().blocks(model.inner)


class Weighted(Probe):
    """Task with a weight for each example, so gradients are divided by a sum on the device."""

    def loss(self, outputs, targets):
        return super().loss(outputs, targets), 0.5 + targets.to(outputs.dtype)


class Placed(Probe):
    """Record in `seen` the devices of the micro-batches."""

    def augment(self, inputs, targets, random, train):
        places = {tensor.device.type for tensor in (inputs, targets, random.indices)}
        self.seen = places | getattr(self, "seen", set())
        return super().augment(inputs, targets, random, train)


class Watched(Probe):
    """Record the backend, and an all-reduce in it."""

    def train_step(self, batch):
        one = torch.ones(3, device=self.world.device)
        dist.all_reduce(one)
        self.backend, self.reduced = dist.get_backend(), one.tolist()
        return super().train_step(batch)


class Strict(Placed):
    """Raise an error if an operation within a step makes the host wait for the GPU."""

    def train_step(self, batch):
        with synchronizing_is("error" if self.step else "default"):
            return super().train_step(batch)


class WithKernels(Text):
    """Write the names of the last rank's kernels of attention in step 5.

    The first rank of a context has as many keys as queries, so its kernels are those of one rank.
    """

    def train_step(self, batch):
        if self.step == 5:
            self.profile = profiled()
            self.profile.start()
        elif self.step == 6:
            self.profile.stop()
            names = {event.key for event in self.profile.key_averages()}
            found = {re.split(r"[<(]", n)[0].split()[-1] for n in names if "flash_fwd" in n}
            found |= {n for n in names if n.startswith("aten::_scaled_dot_product_")}
            if self.world.rank == self.world.world_size - 1:
                (Path(self.config.run.dir) / KERNELS).write_text(" ".join(sorted(found)))
        return super().train_step(batch)


class Telling(Probe):
    """Print the rank's backend and device in its first step."""

    def train_step(self, batch):
        if self.step == 0:
            line = f"rank {self.world.rank}: {dist.get_backend()} on {self.world.device}"
            print(line, flush=True)
        return super().train_step(batch)


class Stopped(Probe):
    """One rank is stopped by a signal in a step."""

    number = signal.SIGSTOP

    def train_step(self, batch):
        if self.step == FATAL_STEP:
            print(f"process {os.getpid()} of rank {self.world.rank}", flush=True)
            if self.world.rank == VICTIM:
                print(f"signalled at {time.time()}", flush=True)
                os.kill(os.getpid(), self.number)
        return super().train_step(batch)


class Killed(Stopped):
    """One rank is killed in a step."""

    number = signal.SIGKILL


# Large activations --------------------------------------------------------------------------------

POSITIONS, WIDTH = 2048, 1024


class Spread(nn.Module):
    """(rows, 4) to (rows, POSITIONS, WIDTH)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, POSITIONS)[:, None])

    def forward(self, inputs):
        return self.linear(inputs)[:, None] * self.scale


class Collect(nn.Module):
    """(rows, POSITIONS, WIDTH) to (rows, 3)."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3)

    def forward(self, inputs):
        return self.linear(nn.functional.gelu(inputs).mean(1))


class Wide(Probe):
    """Two blocks with 16 MB of activations per row in fp64 between them."""

    def build_model(self):
        return nn.Sequential(Spread(), Collect())

    def blocks(self, model):
        return list(model)


ROWS_OF_A_DEVICE = 32  # whose activations would fill its memory


class Filling(nn.Linear):
    """Linear layer that keeps 1/32 of the GPU's memory per row for the backward pass."""

    def forward(self, inputs):
        outputs = super().forward(inputs)
        size = outputs.element_size() * ROWS_OF_A_DEVICE
        length = total_memory(inputs.device) // size
        return outputs + outputs[:, :1].expand(-1, length).exp().mean(1)[:, None]


def total_memory(device: torch.device) -> int:
    """Return the bytes of a GPU's memory."""
    return torch.cuda.get_device_properties(device).total_memory


class Large(Probe):
    """Task whose global batch of 64 rows needs twice the memory of the GPU."""

    def build_model(self):
        return Filling(4, 3)

    def blocks(self, model):
        return []
