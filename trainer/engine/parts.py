"""The parts that training and evaluation share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from trainer.config.schema import Config
from trainer.distributed.ranks import Ranks
from trainer.engine.means import Values
from trainer.engine.precision import Precision
from trainer.rng.forward import Draws
from trainer.strategy.base import Strategy

OWN = ("trainer.task", "trainer.trainer")  # modules of the hooks that a task inherits
# Hooks that may draw in a step, outside of an update's forward pass and loss
OF_A_STEP = ("train_step", "split_batch", "augment", "collate", "build_schedule")


class Hooks(Protocol):
    """The methods of a task that training and evaluation call."""

    def loss(self, outputs: Any, targets: Any) -> Values: ...
    def metrics(self, outputs: Any, targets: Any) -> dict[str, Values]: ...
    def predict(self, outputs: Any) -> Any: ...
    def summarize(self, means: dict[str, float]) -> dict[str, float]: ...
    def train_step(self, batch: Any) -> Any: ...
    def build_optimizer(self, model: nn.Module) -> Optimizer | list[Optimizer]: ...


@dataclass(frozen=True)
class Parts:
    """A task, and its model on all ranks."""

    config: Config
    hooks: Hooks
    strategy: Strategy
    precision: Precision
    draws: Draws
    ranks: Ranks

    @property
    def has_own_step(self) -> bool:
        """True if the task has a train_step of its own, which may update some parameters only."""
        return getattr(self.hooks.train_step, "__module__", "") not in OWN

    @cached_property
    def may_draw(self) -> bool:
        """True if the task has a hook of its own that may draw outside of an update's forward."""
        found = (getattr(getattr(self.hooks, name), "__module__", "") for name in OF_A_STEP)
        return any(module not in OWN for module in found)
