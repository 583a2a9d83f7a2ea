"""Two small tasks for compare_commits.py, which copies this file into its scratch folder.

They run under every edition of the package: a `train_step` returns what `update` returned, which
is None in the first edition.
"""

import os
import signal

import torch
from torch import nn
from torch.nn.functional import cross_entropy, softplus
from torch.utils.data import Dataset

from trainer import ResidentDataset, Trainer

NUM_EXAMPLES = {"train": 203, "eval": 101}


def make_points(split):
    """Return points of 4 numbers, and the class of each, one of 3."""
    generator = torch.Generator().manual_seed(int(split == "train"))
    inputs = torch.randn(NUM_EXAMPLES[split], 4, generator=generator)
    targets = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()
    return inputs, targets


class NoisyItems(Dataset):
    """The same points read one by one, with noise from torch's default generator."""

    def __init__(self, split, unreadable):
        self.inputs, self.targets = make_points(split)
        self.unreadable = unreadable if split == "train" else None

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        if index == self.unreadable:
            raise OSError(f"example {index} is damaged")
        return self.inputs[index] + 0.05 * torch.randn(4), self.targets[index]


class Points(Trainer):
    """A classifier with dropout, BatchNorm and weighted examples; its options cause trouble.

    `signal_at`: the last rank sends itself SIGTERM in this step. `bad_step`: the loss is not a
    number in this step. `items`: read the data one by one. `unreadable`: this item raises.
    """

    def build_dataset(self, split):
        if self.options["items"]:
            return NoisyItems(split, self.options["unreadable"])
        return ResidentDataset(*make_points(split))

    def build_model(self):
        return nn.Sequential(
            nn.Linear(4, 16),
            nn.BatchNorm1d(16),
            nn.GELU(),
            nn.Dropout(0.2),
            nn.Linear(16, 3),
        )

    def augment(self, inputs, targets, random, train):
        if train:
            inputs = inputs + 0.05 * random.normal("noise", 4).to(inputs.dtype)
        return inputs, targets

    def loss(self, outputs, targets):
        values = cross_entropy(outputs, targets, reduction="none")
        if self.options["bad_step"] == self.step and self.model.training:
            values = values * float("nan")
        return values, 0.5 + targets.to(values.dtype)

    def metrics(self, outputs, targets):
        return {"accuracy": (outputs.argmax(1) == targets).double()}

    def train_step(self, batch):
        outcome = self.update(batch)
        is_last_rank = self.world.rank == self.world.world_size - 1
        if self.options["signal_at"] == self.step and is_last_rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return outcome


class Pair(nn.Module):
    """A generator and a discriminator; one forward gives the discriminator's logits of both."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, real, noise):
        fake = self.generator(noise)
        return self.discriminator(real).squeeze(1), self.discriminator(fake).squeeze(1)


class Gan(Trainer):
    """Goodfellow et al., arXiv:1406.2661: two optimizers, and two updates in each step."""

    def build_dataset(self, split):
        return ResidentDataset(*make_points(split)) if split == "train" else None

    def build_model(self):
        return Pair()

    def augment(self, inputs, targets, random, train):
        noise = random.normal("noise", 8).to(inputs.dtype)
        return (inputs, noise), targets

    def build_optimizer(self, model):
        parts = (model.discriminator, model.generator)
        return [torch.optim.Adam(part.parameters(), lr=0.002, betas=(0.5, 0.999)) for part in parts]

    def loss(self, outputs, targets):
        real, fake = outputs
        return softplus(-real) + softplus(fake)

    def generator_loss(self, outputs, targets):
        _, fake = outputs
        return softplus(-fake)

    def train_step(self, batch):
        discriminator, generator = self.optimizers
        first = self.update(batch, optimizers=[discriminator])
        second = self.update(batch, self.generator_loss, [generator], name="generator")
        return None if first is None else first + second
