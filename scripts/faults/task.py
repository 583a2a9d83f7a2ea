"""The tests' tiny task, slowed down, which says where it is and may have one example that is not finite."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch
from tiny import Tiny, points

from trainer import ResidentDataset

MARKS = "FAULTS_MARKS"  # names a file to which rank 0 adds a line at each step and evaluation


class Slow(Tiny):
    @dataclass
    class Options(Tiny.Options):
        pause_s: float
        poison: int | None

    def build_dataset(self, split):
        inputs, targets = points(self.options.examples, split)
        if split == "train" and self.options.poison is not None:
            inputs[self.options.poison] = float("nan")
        return ResidentDataset(inputs, targets)

    def train_step(self, micro_batches):
        self._mark(f"step {self.step + 1}")
        time.sleep(self.options.pause_s)
        super().train_step(micro_batches)

    def metrics(self, outputs, targets):
        if self.step:
            self._mark(f"evaluation {self.step}")
            time.sleep(self.options.pause_s / 4)
        return {"accuracy": (outputs.argmax(1) == targets).double()}

    def _mark(self, text: str) -> None:
        if self.world.rank == 0 and (path := os.environ.get(MARKS)):
            with open(path, "a", encoding="utf-8") as file:
                file.write(text + "\n")


def is_finite(model: torch.nn.Module) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in model.state_dict().values())
