"""What a task is: the methods that it writes, and those that it may replace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from trainer.config.schema import Config
from trainer.config.targets import call_target
from trainer.config.typed import build
from trainer.data.randomness import Random
from trainer.distributed.world import World
from trainer.engine.means import Values
from trainer.errors import ConfigError
from trainer.strategy.base import MicroBatches

Split = Literal["train", "eval"]
FUSED = ("torch.optim.SGD", "torch.optim.Adam", "torch.optim.AdamW")  # on CPU and CUDA


class Task:
    """A run's subject; `Trainer` adds the loop, and is what a task derives from.

    `Options`, where a task names a dataclass so, types `task.options`: then typos there are refused too.
    """

    Options: type | None = None
    model: nn.Module

    def __init__(self, config: Config, world: World | None = None):
        self.config = config
        self.world = (world or World.from_environment()).with_devices(config.strategy)
        given = config.task.options
        self.options: Any = build(self.Options, given, "task.options.") if self.Options else given
        self.step = 0

    # What a task writes -----------------------------------------------------------------------------------------------

    def build_model(self) -> nn.Module:
        """The model, on the CPU; the generators are seeded with `run.seed` before the call."""
        raise self._unwritten("build_model()")

    def build_dataset(self, split: Split) -> Dataset | None:
        """A map-style dataset; None for "eval" if there is nothing to evaluate on."""
        raise self._unwritten("build_dataset(split)")

    def loss(self, outputs: Any, targets: Any) -> Values:
        """Values (batch, ...), or (values, weights) of equal shape; never a mean over the batch."""
        raise self._unwritten("loss(outputs, targets)")

    # What a task may replace ------------------------------------------------------------------------------------------

    def metrics(self, outputs: Any, targets: Any) -> dict[str, Values]:
        """Further values to average in evaluation, by name, in the manner of `loss`."""
        return {}

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """What is derived from the means of an evaluation, {"perplexity": exp(means["loss"])}."""
        return {}

    def build_metrics(self, split: Split) -> dict[str, Any]:
        """torchmetrics by name, for what is no mean of values: fed the real rows alone, computed over all ranks."""
        return {}

    def augment(self, inputs: Any, targets: Any, random: Random, train: bool) -> tuple[Any, Any]:
        """A micro-batch on the device, in training and in evaluation."""
        return inputs, targets

    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        """(inputs, targets) from what the dataset gives."""
        if isinstance(batch, (tuple, list)) and len(batch) == 2:
            return batch[0], batch[1]
        given = (
            f"{len(batch)} parts"
            if isinstance(batch, (tuple, list))
            else f"a {type(batch).__name__}"
        )
        raise ConfigError(
            f"the dataset gives {given}: must be (inputs, targets), or replace Trainer.split_batch"
        )

    def build_optimizer(self, model: nn.Module) -> Optimizer | list[Optimizer]:
        """From the `optim` group; fused where torch can. Several optimizers all step at every step."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        fused = {"fused": True} if self.config.optim["_target_"] in FUSED else {}
        return call_target(
            self.config.optim, "optim", self.config.packages, Optimizer, parameters, **fused
        )

    def build_schedule(self, num_steps: int) -> Callable[[int], float]:
        """The factor on every group's rate, for the update made at 0-based step."""
        return call_target(self.config.schedule, "schedule", self.config.packages, None, num_steps)

    def train_step(self, micro_batches: MicroBatches) -> None:
        """One step from this rank's share of a global batch: one `Trainer.update`, or several, alike on every rank."""
        raise NotImplementedError

    def _unwritten(self, method: str) -> ConfigError:
        return ConfigError(
            f"task.trainer={self.config.task.trainer}: has no {method}; a task writes it"
        )
