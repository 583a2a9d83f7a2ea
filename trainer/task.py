"""The task: the methods that a user writes, and those that may be replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from trainer.config.schema import Config
from trainer.config.targets import call_target
from trainer.config.typed import build
from trainer.data.batches import LocalBatch
from trainer.data.randomness import Random
from trainer.distributed.world import World
from trainer.engine.means import Values
from trainer.engine.outcome import Outcome
from trainer.errors import ConfigError
from trainer.strategy.base import find_strategy

Split = Literal["train", "eval"]
FUSED = ("torch.optim.SGD", "torch.optim.Adam", "torch.optim.AdamW")  # on CPU and CUDA


class Task:
    """The subject of a run; `Trainer` adds `fit` and `evaluate`, and is what a task derives from.

    A dataclass named `Options` in the class types `task.options`: typos there are refused too.
    """

    Options: type | None = None

    def __init__(self, config: Config, world: World | None = None):
        found = world or World.from_environment()
        strategy = find_strategy(config.strategy.name)
        self.config = config
        self.world = found.with_devices(strategy.find_devices(config.strategy, found))
        given = config.task.options
        self.options: Any = build(self.Options, given, "task.options.") if self.Options else given

    # A task writes these ------------------------------------------------------------------------

    def build_model(self) -> nn.Module:
        """Build the model on the CPU; the generators are seeded with `run.seed` before the call."""
        raise _unwritten(self, "build_model()")

    def build_dataset(self, split: Split) -> Dataset | None:
        """A map-style dataset; None for "eval" if there is nothing to evaluate on."""
        raise _unwritten(self, "build_dataset(split)")

    def loss(self, outputs: Any, targets: Any) -> Values:
        """Values (batch, ...), or (values, weights) of equal shape; never a mean over the batch."""
        raise _unwritten(self, "loss(outputs, targets)")

    # A task may replace these -------------------------------------------------------------------

    def metrics(self, outputs: Any, targets: Any) -> dict[str, Values]:
        """More values to average in evaluation, by name, in the form that `loss` returns."""
        return {}

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Functions of the means of an evaluation, {"perplexity": exp(means["loss"])}."""
        return {}

    def build_metrics(self, split: Split) -> dict[str, Any]:
        """torchmetrics by name, for what is no mean: fed without padding, over all ranks."""
        return {}

    def augment(self, inputs: Any, targets: Any, random: Random, train: bool) -> tuple[Any, Any]:
        """Change a micro-batch on the device, in training and in evaluation."""
        return inputs, targets

    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        """(inputs, targets) from what the dataset gives."""
        is_sequence = isinstance(batch, (tuple, list))
        if is_sequence and len(batch) == 2:
            return batch[0], batch[1]
        given = f"{len(batch)} parts" if is_sequence else f"a {type(batch).__name__}"
        must = "must be (inputs, targets), or replace Trainer.split_batch"
        raise ConfigError(f"the dataset gives {given}: {must}")

    def build_optimizer(self, model: nn.Module) -> Optimizer | list[Optimizer]:
        """Build the optimizer of the `optim` group, fused where torch can.

        Several optimizers all step at every step.
        """
        parameters = [p for p in model.parameters() if p.requires_grad]
        spec = self.config.optim
        packages = self.config.packages
        fused = {"fused": True} if spec["_target_"] in FUSED else {}
        return call_target(spec, "optim", packages, Optimizer, parameters, **fused)

    def build_schedule(self, num_steps: int) -> Callable[[int], float]:
        """The factor on every group's rate, for the update made at 0-based step."""
        return call_target(self.config.schedule, "schedule", self.config.packages, None, num_steps)

    def train_step(self, batch: LocalBatch) -> Outcome:
        """Train on this rank's rows of a global batch, alike on every rank.

        One `return self.update(batch)`, or the sum of several updates.
        """
        raise NotImplementedError


def _unwritten(task: Task, method: str) -> ConfigError:
    name = task.config.task.trainer
    return ConfigError(f"task.trainer={name}: has no {method}; a task writes it")
