"""The problem that all contestants train, and the instruments that measure them.

A contestant is a program for torchrun. It reads its settings from PEERS_SETTINGS and writes to the
folder named there: its log, its evaluation result, and the final weights. An instrument at the loss
records what it really computed: `seen-RANK.jsonl` has the examples and losses of each step.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

SETTINGS = "PEERS_SETTINGS"
SEED = 7
FEATURES, CLASSES = 16, 3
NUM_TRAIN, NUM_EVAL = 101, 31  # neither is divisible by the ranks or the batch
BATCH, EPOCHS = 12, 2
STEPS_PER_EPOCH = NUM_TRAIN // BATCH
STEPS = EPOCHS * STEPS_PER_EPOCH
RATE, MOMENTUM = 0.1, 0.9
BAD_EXAMPLE, BAD_RANK, HANGING_STEP = 37, 1, 5
KILL_STEP, KILL_PAUSE_S, PAUSE_S = 12, 5.0, 0.15


@dataclass
class Settings:
    """Settings of one run of a contestant.

    `fault` is pause (slow steps, during which the run is killed), hang, nan (one example has NaN)
    or None.
    """

    folder: str
    accumulation: int = 1
    dropout: float = 0.2
    drop_last: bool = True
    save_every: int = 5
    timeout_s: int = 20
    fault: str | None = None
    resume: bool = False

    @property
    def path(self) -> Path:
        return Path(self.folder)

    @classmethod
    def from_environment(cls) -> Settings:
        return cls(**json.loads(os.environ[SETTINGS]))

    def environment(self) -> dict[str, str]:
        return {SETTINGS: json.dumps(asdict(self))}


class Points(Dataset):
    """Dataset of (features, class, index); some classes are wrong, so that the loss stays large."""

    def __init__(self, split: str, fault: str | None = None):
        count = NUM_TRAIN if split == "train" else NUM_EVAL
        generator = torch.Generator().manual_seed(1 if split == "train" else 2)
        directions = torch.randn(FEATURES, CLASSES, generator=torch.Generator().manual_seed(3))
        self.features = torch.randn(count, FEATURES, generator=generator, dtype=torch.float64)
        noise = torch.randn(count, CLASSES, generator=generator)
        self.classes = (self.features @ directions.double() + 2 * noise).argmax(1)
        if fault == "nan":
            self.features[BAD_EXAMPLE] = torch.nan

    def __len__(self) -> int:
        return len(self.classes)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.features[index], self.classes[index], index


def build_model(dropout: float) -> nn.Module:
    """Return the model in double precision, so that differences are not rounding."""
    model = nn.Sequential(
        *(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Dropout(dropout)),
        *(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(dropout), nn.Linear(32, CLASSES)),
    )
    return model.double()


def build_optimizer(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def build_schedule(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=steps)


class Recorder:
    """Computes and records per-example losses; also injects the faults."""

    def __init__(self, settings: Settings):
        self.settings = settings
        self.rank = int(os.environ.get("RANK", "0"))
        self.session = time.time()
        self._last = -1
        settings.path.mkdir(parents=True, exist_ok=True)

    def losses(
        self, step: int, outputs: torch.Tensor, classes: torch.Tensor, indices: torch.Tensor
    ) -> torch.Tensor:
        """Return the losses, shape (batch,), for the update made at 0-based `step`."""
        losses = F.cross_entropy(outputs, classes, reduction="none")
        fault = self.settings.fault
        self._write(
            f"seen-{self.rank}.jsonl",
            session=self.session,
            step=step,
            index=indices.tolist(),
            loss=losses.tolist(),
        )
        if fault == "pause" and step != self._last:
            time.sleep(KILL_PAUSE_S if step == KILL_STEP else PAUSE_S)
        if fault == "hang" and self.rank == BAD_RANK and step == HANGING_STEP:
            hang_here()
        self._last = step
        return losses

    def log(self, step: int, loss: float, rate: float) -> None:
        """Write the loss that the contestant logs for a step, and the rate of its update."""
        self._write("logged.jsonl", step=step, loss=loss, rate=rate)

    def finish(self, model: nn.Module, accuracy: float, counted: int) -> None:
        """Write the final weights and results of rank 0."""
        self._write("evaluation.jsonl", accuracy=accuracy, counted=counted)
        torch.save(model.state_dict(), self.settings.path / "weights.pt")

    def _write(self, name: str, **values: Any) -> None:
        with (self.settings.path / name).open("a") as stream:
            stream.write(json.dumps(values) + "\n")


def hang_here() -> None:
    """Hang this rank."""
    time.sleep(10**6)
