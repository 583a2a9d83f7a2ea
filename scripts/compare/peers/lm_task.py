"""task=lm with the instrument that measures both contestants."""

from __future__ import annotations

from typing import Any

import torch

from peers.lm_problem import Instrument, Settings
from trainer.hf.causal import IGNORED
from trainer.tasks.lm import LM


class Watched(LM):
    """Counts the tokens of a step by its rows: a count in the model would be state of it, which the
    proof at the start tries again and again."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.instrument = Instrument(Settings.from_environment())
        self.is_watching = False

    def build_dataset(self, split: str) -> Any:
        data = super().build_dataset(split)
        if split == "train":
            self.rows = data
        return data

    def train_step(self, batch: Any) -> Any:
        self.is_watching = self.instrument.settings.is_watched
        outcome = super().train_step(batch)
        self.is_watching = False
        indices = torch.cat(batch.indices).tolist()
        self.instrument.end_step(self.step, sum(count_tokens(self.rows[i]) for i in indices))
        return outcome

    def loss(self, outputs: torch.Tensor, labels: torch.Tensor) -> Any:
        if self.is_watching:
            count = int((labels != IGNORED).sum())
            self.instrument.see(self.step, float(outputs.detach().sum()), count)
        return super().loss(outputs, labels)


def count_tokens(row: dict[str, torch.Tensor]) -> int:
    """Return how many tokens of a row have one before them in their sequence."""
    return int((row["positions"] > 0).sum()) if "positions" in row else len(row["tokens"]) - 1
