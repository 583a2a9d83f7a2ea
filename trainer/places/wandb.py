"""Weights & Biases as a tracker."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping

from trainer.places.known_observer import KnownObserver


class WandB(KnownObserver):
    """Weights & Biases. Its environment variables decide project, entity and mode."""

    name = "wandb"

    def start(self, step: int) -> None:
        import wandb

        name, _ = self.known(lambda: secrets.token_hex(8))
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", self.config.task.name),
            name=self.directory.name,
            id=name,
            resume="allow",
            dir=self.directory,
            config=self.config.flat(),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)  # it drops steps that it has

    def end(self, code: int, reason: str) -> None:
        self._run.finish(exit_code=code)


TRACKER = WandB
