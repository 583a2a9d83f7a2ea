"""Small tasks for tests."""

import os
import signal
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import Dataset

from trainer import ResidentDataset, Trainer


class Tiny(Trainer):
    """Task with 203 points of 4 numbers in 3 classes; tests vary its options."""

    @dataclass
    class Options:
        dropout: float
        norm: bool
        weights: bool
        examples: int
        signal_at: int | None

    def build_model(self):
        norm = nn.BatchNorm1d(16) if self.options.norm else nn.Identity()
        return nn.Sequential(
            nn.Linear(4, 16), norm, nn.GELU(), nn.Dropout(self.options.dropout), nn.Linear(16, 3)
        )

    def build_dataset(self, split):
        return ResidentDataset(*points(self.options.examples, split))

    def augment(self, inputs, targets, random, train):
        if train:
            inputs = inputs + 0.05 * random.normal("noise", 4).to(inputs.dtype)
        return inputs, targets

    def loss(self, outputs, targets):
        values = nn.functional.cross_entropy(outputs, targets, reduction="none")
        return (values, 0.5 + targets.to(values.dtype)) if self.options.weights else values

    def metrics(self, outputs, targets):
        return {"accuracy": (outputs.argmax(1) == targets).double()}

    def train_step(self, batch):
        outcome = super().train_step(batch)
        if self.options.signal_at == self.step and self.world.rank == self.world.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return outcome


class Begun(Tiny):
    """Task whose `has_begun` is True from the first step on, but not in the dry run before it."""

    has_begun = False

    def train_step(self, batch):
        self.has_begun = True
        return super().train_step(batch)


def points(count: int, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(int(split == "train"))
    inputs = torch.randn(count, 4, generator=generator)
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


class Items(Dataset):
    """Map-style dataset that is not tensors, so it is read by DataLoader."""

    def __init__(self, split: str):
        self.inputs, self.targets = points(203, split)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.inputs[index] + 0.05 * torch.randn(4), self.targets[index]


class TinyItems(Tiny):
    """Task whose noise comes from the dataset, drawn from torch's default generator."""

    def build_dataset(self, split):
        return Items(split)

    def augment(self, inputs, targets, random, train):
        return inputs, targets


class DecidesByRounding(Tiny):
    """Decides between sums that are equal but for rounding, as max pooling does in flat images."""

    class Ties(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3))
            numbers = torch.randn(64, 100_001, generator=torch.Generator().manual_seed(0))
            self.register_buffer("numbers", numbers.double(), persistent=False)

        def forward(self, x):
            is_larger = torch.stack([n.sum() > n.view(11, -1).sum(1).sum() for n in self.numbers])
            return self.inner(x) * (1 + 1e-6 * is_larger.sum())

    def build_model(self):
        return self.Ties()
