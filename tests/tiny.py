"""Small tasks for tests, and the way tests run them."""

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ranks import on_ranks
from torch import nn
from torch.utils.data import Dataset

from trainer import ResidentDataset, Trainer, load_config
from trainer.__main__ import load_task
from trainer.checkpoints import transaction as checkpoint

CONF = str(Path(__file__).parent / "conf")


class Tiny(Trainer):
    """203 points of 4 numbers in 3 classes; what a test wants to vary stands in the options."""

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

    def train_step(self, micro_batches):
        super().train_step(micro_batches)
        if self.options.signal_at == self.step and self.world.rank == self.world.world_size - 1:
            os.kill(os.getpid(), signal.SIGTERM)


def points(count: int, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(int(split == "train"))
    inputs = torch.randn(count, 4, generator=generator)
    return inputs, (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long()


class Items(Dataset):
    """A map-style dataset that is not tensors: it goes through DataLoader."""

    def __init__(self, split: str):
        self.inputs, self.targets = points(203, split)

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, index):
        return self.inputs[index] + 0.05 * torch.randn(4), self.targets[index]


class TinyItems(Tiny):
    """The noise comes from the dataset, out of torch's default generator."""

    def build_dataset(self, split):
        return Items(split)

    def augment(self, inputs, targets, random, train):
        return inputs, targets


def fit(folder: Path, *overrides: str, task: type[Trainer] | None = None) -> dict[str, Any]:
    """Train in this process, as one rank of those the environment tells of; what a test compares."""
    config = load_config([f"run.dir={folder}", "run.name=run", *overrides], [CONF])
    trainer = (task or load_task(config))(config)
    seen: list[list[int]] = []
    _record(trainer, seen)
    summary = trainer.fit()
    record = [
        json.loads(line) for line in (summary.directory / "metrics.jsonl").read_text().splitlines()
    ]
    return {
        "losses": {r["step"]: r["train/loss"] for r in record if "train/loss" in r},
        "record": [
            {k: v for k, v in r.items() if not k.startswith("speed/")}
            for r in record
            if "ledger" not in r
        ],
        "weights": {
            name: tensor.detach().clone() for name, tensor in trainer.model.state_dict().items()
        },
        "seen": seen,
        "metrics": summary.metrics,
        "code": summary.exit_code,
        "step": summary.step,
        "directory": summary.directory,
    }


def _record(trainer: Trainer, seen: list[list[int]]) -> None:
    """Note the example indices that each training step really draws its augmentation for."""
    augment, train_step = trainer.augment, trainer.train_step
    is_stepping = [False]

    def noting_augment(inputs, targets, random, train):
        if train and is_stepping[0]:
            seen[-1] += random.indices.tolist()
        return augment(inputs, targets, random, train)

    def noting_step(micro_batches):
        seen.append([])
        is_stepping[0] = True
        train_step(micro_batches)
        is_stepping[0] = False

    trainer.augment, trainer.train_step = noting_augment, noting_step  # type: ignore[method-assign]


def fit_on(
    ranks: int, folder: Path, *overrides: str, task: type[Trainer] | None = None
) -> dict[str, Any]:
    """`fit` on several ranks: rank 0's view, with the examples of all ranks joined step by step."""
    results = on_ranks(ranks, lambda: fit(folder, *overrides, task=task))
    steps = zip(*(r["seen"] for r in results), strict=True)
    joined = [[index for part in parts for index in part] for parts in steps]
    for other in results[1:]:
        for name, tensor in other["weights"].items():
            assert torch.equal(tensor, results[0]["weights"][name]), f"{name} differs between ranks"
    return {**results[0], "seen": joined}


def newest(directory: Path) -> checkpoint.Loaded:
    loaded, skipped = checkpoint.load_newest(directory / "checkpoints")
    assert loaded is not None and not skipped
    return loaded


def relative_distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """norm(a - b) / norm(a), in fp64."""
    a, b = a.double(), b.double()
    return float((a - b).norm() / a.norm().clamp_min(1e-300))
