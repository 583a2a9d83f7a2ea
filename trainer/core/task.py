"""`Task`: the hooks of a user's class, those it must define and those it may override.

Vocabulary: a step trains on one global batch. Each rank gets a local batch, a part of the global
batch, and splits it into micro-batches. Every hook runs on every rank and must not depend on the
rank. `python -m trainer.prove task=<name>` checks that.

For each micro-batch the framework calls

    inputs, targets = task.split_batch(batch)       # tensors, batch-first, on the device
    inputs, targets = task.augment(inputs, targets, random, train)
    outputs = model(inputs)                         # *inputs for a tuple, **inputs for a dict
    values = task.loss(outputs, targets)            # one value per example, or more
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from torch import nn
from torch.optim import Optimizer
from torch.utils.data import Dataset, default_collate

from trainer.base.errors import ConfigError
from trainer.core.config.schema import Config
from trainer.core.config.targets import Spec, call_target
from trainer.core.config.typed import OptionMapping, build, defaults_of, unknown
from trainer.core.data.batches import LocalBatch
from trainer.core.data.sampling import Sampling
from trainer.core.distributed.world import World
from trainer.core.engine.optimizers import split_for_muon
from trainer.core.engine.step import Outcome
from trainer.core.engine.values import Values
from trainer.core.rng.philox import Random
from trainer.core.strategy import find_devices
from trainer.core.strategy.optimizer_trial import fused_option

Split = str  # "train", "eval", or a name in eval.splits


class _Unset:
    """In the place of an attribute that the trainer's __init__ sets."""

    def __get__(self, task: Task | None, kind: type) -> _Unset:
        if task is None:
            return self
        raise ConfigError(f"{kind.__name__}.__init__: must begin with super().__init__(config)")


class Task:
    """Hooks and configuration of a task. Derive from `Trainer`, which adds `fit` and `evaluate`.

    Set `Options` to a dataclass to check the types of `task.options` and to refuse unknown names:

        class Spiral(Trainer):
            @dataclass
            class Options:
                width: int

    `self.options` is then an instance of it, else a mapping whose names are attributes too.
    `self.config` is the whole configuration; `self.world` has rank, world size and device.
    """

    Options: type | None = None
    if not TYPE_CHECKING:
        config = world = options = _run = _Unset()

    def __init__(self, config: Config, world: World | None = None):
        if not isinstance(config, Config):
            raise ConfigError(f"""{type(self).__name__}: config is a {type(config).__name__}:
                must be what trainer.load_config([...]) returns""")
        world = world or World.from_environment()
        self.config = config
        self.world = world.with_devices(find_devices(config.strategy, world))
        values = config.task.options
        if self.Options is None and config.unlisted:
            listed = [name for name in values if name not in config.unlisted]
            raise unknown("task.options.", config.unlisted[0], listed)
        self.options: Any = OptionMapping(values)
        if self.Options:
            self.options = build(self.Options, values, "task.options.")
        if self.Options and (defaults := defaults_of(self.options, values)):
            task = replace(config.task, options={**values, **defaults})
            implied = [*config.implied, *defaults]
            self.config = replace(config, task=task, implied=implied)  # saved with the run

    # A task must define these -------------------------------------------------------------------

    def build_model(self) -> nn.Module:
        """Return the model, on the CPU and without a wrapper such as DDP.

        Called after `build_dataset`, with torch's generators seeded by `run.seed`, so every rank
        initialises the same weights. The framework then converts the model to the dtype of the
        run, moves it to the device and wraps it. With `strategy.devices_per_rank` above 1 it
        divides the `blocks` over the devices, unless the model has moved its parts to
        `self.world.devices`. At least one parameter must be trainable.
        """
        raise _unwritten(self, "build_model()")

    def build_dataset(self, split: str) -> Dataset | None:
        """Return a map-style dataset (`__len__`, `__getitem__`) for "train" or for another split.

        Called before `build_model`, once for "train" and for each one of `eval.splits`. Return None
        for "eval" to train without evaluation, and raise ValueError for an unknown split.
        Return all examples on every rank, in the same order: the framework shuffles, shards and
        batches. Tensors (`ResidentDataset`, `TensorDataset`) stay on the device; `DataLoader` reads
        others, with `random`, `numpy` and `torch` seeded per example.
        """
        raise _unwritten(self, "build_dataset(split)")

    def sampling(self, split: str) -> Sampling | None:
        """Return which examples an epoch takes: `Weighted`, `Mixture`, `ClassBalanced` or None.

        Called for "train", after `build_dataset`. None, the default, takes each example once an
        epoch. A sampling is a function of seed, epoch and position.
        """
        return None

    def loss(self, outputs: Any, targets: Any) -> Values:
        """Return the loss of each example, never a mean over the batch.

        Called for each micro-batch, in training and in evaluation, under autocast where the
        precision uses it. `outputs` is what the model returned, `targets` comes from `augment`.
        Return a tensor of shape (batch, ...), or a pair (values, weights) of that shape where
        weights are at least 0 and require no gradient; return the same form in every call. The
        framework computes sum(values * weights) / sum(weights) over the global batch. Without
        weights, the number of values per example must be constant.

            return F.cross_entropy(outputs, targets, reduction="none")

        For sequences with padding, return (values, is_token): padding then has weight 0.
        """
        raise _unwritten(self, "loss(outputs, targets)")

    # A task may override these ------------------------------------------------------------------

    def metrics(self, outputs: Any, targets: Any) -> dict[str, Values]:
        """Return more values to average in evaluation, by name, in the form that `loss` returns.

        Called for each micro-batch of an evaluation, without gradients and with the model in eval
        mode. Values of padding rows are cut off afterwards. Each mean over the split is logged as
        `eval/<name>`; the name "loss" is taken.

            return {"accuracy": (outputs.argmax(1) == targets).float()}
        """
        return {}

    def summarize(self, means: dict[str, float]) -> dict[str, float]:
        """Return scores computed from the means of an evaluation, logged as `eval/<name>`.

        `means` holds "loss" and the results of `metrics` and `build_metrics`, over all ranks.

            return {"perplexity": math.exp(means["loss"])}
        """
        return {}

    def predict(self, outputs: Any) -> Any:
        """Return what `python -m trainer.use RUN out=FILE` writes: a tensor, or tensors by name.

        Called for each micro-batch, without gradients and with the model in eval mode. Each tensor
        has a row per example; rows of padding are cut off afterwards. By default, the outputs.

            return {"class": outputs.argmax(1), "probability": outputs.softmax(1).amax(1)}
        """
        return outputs

    def samples(self, forward: Callable[[Any], Any]) -> dict[str, str]:
        """Return texts by name that show what the model does, such as its answers to questions.

        Called on every rank after an evaluation of a training, without gradients and with the model
        in eval mode, but not if tensor, context or pipeline parallel divide it.
        `forward(inputs)` computes outputs; call it equally often on every rank. The texts of rank 0
        go to the terminal, the record and the report.
        """
        return {}

    def build_metrics(self, split: str) -> dict[str, Any]:
        """Return torchmetrics by name, for scores that are not averages, such as AUROC.

        Called once for each one of `eval.splits`. The framework moves each metric to the device and
        calls `update(outputs, targets)` without padding rows, `compute()` and `reset()`. The metric
        itself synchronises over the ranks. `compute()` must return a scalar, which is logged as
        `<split>/<name>`.
        """
        return {}

    def augment(self, inputs: Any, targets: Any, random: Random, train: bool) -> tuple[Any, Any]:
        """Return (inputs, targets) after augmentation and preprocessing, on the device.

        Called for each micro-batch, with `train` False in evaluation. Draw only from `random`: its
        rows are keyed by (seed, split, name, epoch, example). Other generators would make the run
        depend on its layout.

            noise = random.normal("noise", 3)       # (batch, 3)
            return (inputs + 0.1 * noise if train else inputs), targets
        """
        return inputs, targets

    def prepare(self) -> None:
        """Download or convert what `build_dataset` and `build_model` read.

        Called before them at each start, on one rank of each node, while the others wait. Return
        at once if the files exist. If one rank fails, all of them end.
        """

    def collate(self, rows: list[Any]) -> Any:
        """Return a batch from examples of the dataset. The default is torch's `default_collate`.

        Called for each micro-batch, in a data worker if there are any. Pad rows of unequal length
        here, and give the padding weight 0 in `loss`. Tensors have the rows on their first axis. A
        row's own values must not depend on the other rows.

            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=-1)
        """
        return default_collate(rows)

    def split_batch(self, batch: Any) -> tuple[Any, Any]:
        """Return (inputs, targets) from a micro-batch of the dataset.

        `batch` holds batch-first tensors on the device: the tuple of a `TensorDataset`, else the
        result of `collate`. Override this if it is not a pair:

            return batch["image"], batch["label"]

        Raises ConfigError unless `batch` is a pair.
        """
        is_sequence = isinstance(batch, (tuple, list))
        if is_sequence and len(batch) == 2:
            return batch[0], batch[1]
        returned = f"{len(batch)} parts" if is_sequence else f"a {type(batch).__name__}"
        raise ConfigError(f"""the dataset returned {returned}: must be (inputs, targets);
            otherwise override split_batch""")

    def build_optimizer(self, model: nn.Module) -> Optimizer | list[Optimizer]:
        """Return an optimizer, or a list of them, for the model.

        Called once, after the model is on its device. `model` is what `build_model` returned. The
        default builds `optim._target_` on all trainable parameters, fused where torch supports it;
        torch.optim.Muon gets the matrices, and AdamW the rest. The learning rate of each parameter
        group is its base rate, which `build_schedule` scales.
        """
        spec = self.config.optim
        if spec["_target_"] != "torch.optim.Muon":
            return _call_optimizer(self, spec, model.parameters())
        shared: dict[str, Any] = {key: spec[key] for key in ("lr", "weight_decay") if key in spec}
        adamw = {"_target_": "torch.optim.AdamW", **shared}
        parts = zip((spec, adamw), split_for_muon(model), strict=True)
        return [_call_optimizer(self, each, part) for each, part in parts if part]

    def build_schedule(self, num_steps: int) -> Callable[[int], float]:
        """Return `factor(step)`, which multiplies the base rate of every parameter group.

        `num_steps` is the length of the run in optimizer steps; `step` counts from 0. The factor
        must be finite, at least 0 and a pure function of the step. The default builds the
        `schedule` group.

            return lambda step: 1 - step / num_steps
        """
        return call_target(self.config.schedule, "schedule", self.config.packages, None, num_steps)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        """Return the modules that make up most of the model, such as the layers of a transformer.

        They are the units that `strategy=fsdp` gathers, pipeline stages divide,
        `strategy.recompute=blocks` recomputes in backward, and torch.compile compiles. The rest of
        the model is one more unit. For a pipeline they must run in this order.

            return list(model.layers)
        """
        return []

    def tensor_plan(self) -> dict[str, str] | Literal["auto"]:
        """Return how `strategy.mesh.tensor` divides layers, by patterns of their names.

        `columns` divides the outputs of an nn.Linear, `rows` the inputs of the next one;
        `columns/3` divides each of three packed matrices; `vocabulary` divides the entries of an
        nn.Embedding and the nn.Linear that scores them. Code between columns and rows gets a part
        of the outputs, so write -1 for the number of heads. `*` stands for one part of a name, `|`
        for or. "auto" takes the plan of a model of transformers.

            return {"blocks.*.query|key|value|widen": "columns", "blocks.*.project|narrow": "rows"}
        """
        return {}

    def train_step(self, batch: LocalBatch) -> Outcome:
        """Train on one global batch and return the outcome. The default is `self.update(batch)`.

        Iterating `batch` yields (inputs, targets) per micro-batch. `update` is a collective: make
        the same calls in the same order on every rank, and return the sum of their outcomes:

            critic, generator = self.optimizers
            outcome = self.update(batch, self.critic_loss, [critic], "critic")
            return outcome + self.update(batch, self.generator_loss, [generator], "generator")
        """
        raise NotImplementedError


def _unwritten(task: Task, method: str) -> ConfigError:
    return ConfigError(f"""task.trainer={task.config.task.trainer}: has no {method};
        define it in the class""")


def _call_optimizer(task: Task, spec: Spec, parameters: Iterable[nn.Parameter]) -> Optimizer:
    """Build an optimizer of the parameters that are trained, fused where torch supports it."""
    trained = [p for p in parameters if p.requires_grad]
    fused = fused_option(spec["_target_"], {p.dtype for p in trained}, task.world.device)
    made: Optimizer = call_target(spec, "optim", task.config.packages, Optimizer, trained, **fused)
    return made
