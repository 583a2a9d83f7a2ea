"""The task for Lockstep; its recipe is conf/task/points.yaml."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torchmetrics import Metric

from peers.problem import Points, Recorder, Settings, build_model
from trainer import Trainer


@dataclass
class Options:
    dropout: float


class Task(Trainer):
    Options = Options

    def build_model(self) -> torch.nn.Module:
        return build_model(self.options.dropout)

    def build_dataset(self, split: str) -> Points:
        fault = Settings.from_environment().fault
        return Points(split, fault if split == "train" else None)

    def split_batch(self, batch: Any) -> Any:
        features, classes, indices = batch
        return features, (classes, indices)

    def loss(self, outputs: torch.Tensor, targets: Any) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(outputs, targets[0], reduction="none")

    def metrics(self, outputs: torch.Tensor, targets: Any) -> dict[str, torch.Tensor]:
        return {"accuracy": (outputs.argmax(1) == targets[0]).double()}


class Counted(Metric):
    """Metric that counts the examples of an evaluation; Lockstep updates it like any metric."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")

    def update(self, outputs: torch.Tensor, targets: Any) -> None:
        self.total += len(outputs)

    def compute(self) -> torch.Tensor:
        return self.total


class Watched(Task):
    """The task with the instruments that measure all contestants."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.recorder = Recorder(Settings.from_environment())
        self.is_stepping = False

    def build_metrics(self, split: str) -> dict[str, Metric]:
        return {"counted": Counted()}

    def train_step(self, batch: Any) -> Any:
        self.is_stepping = True
        outcome = super().train_step(batch)
        self.is_stepping = False
        return outcome

    def loss(self, outputs: torch.Tensor, targets: Any) -> torch.Tensor:
        if self.is_stepping:
            return self.recorder.losses(self.step, outputs, *targets)
        return super().loss(outputs, targets)

    def fit(self) -> Any:
        summary = super().fit()
        if summary.exit_code or self.recorder.rank:
            return summary
        found = summary.metrics
        self.recorder.finish(self.model, found["eval/accuracy"], int(found["eval/counted"]))
        for line in (summary.directory / "metrics.jsonl").read_text().splitlines():
            row = json.loads(line)
            if "train/loss" in row:
                self.recorder.log(row["step"] - 1, row["train/loss"], row["optim/lr"])
        return summary
