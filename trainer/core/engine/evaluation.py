"""Evaluation: every example of the eval split counts exactly once, in any layout."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import nn

from trainer.base.codec import dtype_of, name_of
from trainer.base.errors import ConfigError
from trainer.core.blame import LOSS_HOOK, METRICS_HOOK
from trainer.core.data.eval_batches import EvalBatches
from trainer.core.distributed.watch.heartbeat import Phase
from trainer.core.engine.context import Parts
from trainer.core.engine.deferred_reads import DeferredRows, join_rows
from trainer.core.engine.means import Means
from trainer.core.engine.training_state import Ema
from trainer.core.engine.values import (
    Values,
    as_number,
    check_named,
    check_signs,
    first_rows,
    weigh,
)
from trainer.core.hook_calls import call_hook
from trainer.core.micro_batch import count_rows
from trainer.core.state.sandbox import BufferCopies, keep_attributes, keep_passes, sandbox
from trainer.core.strategy.modules.dry_run import FrozenKept, eager

Use = Callable[[Any, Any, int], None]  # of outputs, targets, and the number of real rows
ASK_EVERY_S = 0.5  # how often the ranks agree on whether to stop


def _named(returned: Any, rows: int) -> dict[str, torch.Tensor]:
    """Return predictions by name. Raises ConfigError unless they are tensors with these rows."""
    named = returned if isinstance(returned, Mapping) else {"prediction": returned}
    if not named:
        raise ConfigError("predict(outputs) returned nothing: must be a tensor, or tensors by name")
    for name, values in named.items():
        if not isinstance(values, torch.Tensor) or not values.dim() or len(values) != rows:
            mismatch = f"{name} is a {type(values).__name__}"
            if isinstance(values, torch.Tensor):
                mismatch = f"{name} has shape {tuple(values.shape)}"
            raise ConfigError(f"""predict(outputs) returned: {mismatch}:
                must be a tensor, or tensors by name, with a row for each of {rows} examples""")
    return {str(name): values for name, values in named.items()}


class _Passes:
    """The forward passes over a split. `error` is the first error in one of them, if any.

    After an error, passes that communicate go on, with the last inputs if no others can be read:
    other ranks would wait for this one.
    """

    def __init__(self, batches: Iterator[Any], forward: Callable[[Any], Any], is_shared: bool):
        """`is_shared` is True if a forward pass communicates; its own errors are raised."""
        self.error: Exception | None = None
        self._batches = batches
        self._forward = forward
        self._is_shared = is_shared
        self._is_readable = True
        self._batch: Any = (None, None, 0)

    def read(self) -> None:
        if not self._is_readable or (self.error is not None and not self._is_shared):
            return
        try:
            self._batch = next(self._batches)
        except Exception as error:  # of the data set or of the task's code
            self._is_readable = False
            self.error = self.error or error

    def compute(self, use: Use) -> None:
        inputs, targets, rows = self._batch
        outputs = self._forward(inputs) if self._is_shared else None
        if self.error is not None:
            return
        try:
            use(outputs if self._is_shared else self._forward(inputs), targets, rows)
        except Exception as error:  # of the task's code
            self.error = error


def check_torchmetrics(returned: Any) -> dict[str, Any]:
    """Return the result of `build_metrics`. Raises ConfigError unless it has torchmetrics."""
    named = check_named("build_metrics returned", returned)
    for name, metric in named.items():
        methods = [getattr(metric, each, None) for each in ("to", "update", "compute", "reset")]
        if isinstance(metric, type) or not all(map(callable, methods)):
            description = f"the class {metric.__name__}" if isinstance(metric, type) else ""
            description = description or f"a {type(metric).__name__}"
            raise ConfigError(f"""build_metrics returned {description} as {name}:
                must be a torchmetrics.Metric""")
    return named


@dataclass(frozen=True)
class EvalSplit:
    """A split to evaluate, with its torchmetrics by name."""

    name: str
    batches: EvalBatches
    metrics: Mapping[str, Any]


class Evaluator:
    """Evaluation of a model over all ranks, which can be repeated."""

    def __init__(
        self,
        parts: Parts,
        splits: Sequence[EvalSplit],
        ema: Ema | None,
        wants_stop: Callable[[], bool],
    ):
        """Without splits, evaluations are empty."""
        self._hooks = parts.hooks
        self._strategy = parts.strategy
        self._precision = parts.precision
        self._draws = parts.draws
        self._group = parts.ranks.group
        self._heartbeat = parts.ranks.heartbeat
        self._splits = splits
        self._ema = ema
        self._wants_stop = wants_stop
        self._mesh = parts.strategy.mesh
        self._names: dict[str, set[str]] = {}  # of the values of each split
        self._is_dry_run = False

    @torch.no_grad()
    def evaluate(self) -> dict[str, float] | None:
        """Return `{"eval/loss": ...}`, the same on every rank, or None if a rank was asked to stop.

        Padding is cut off before anything is counted. Collective: every rank must call it.
        """
        metrics: dict[str, float] = {}
        for split in self._splits:
            means = Means(split.batches.leaves)
            if not self._run(split, partial(self._count, split, means)):
                return None
            metrics |= self._finish(split, means)
        return metrics

    @torch.no_grad()
    def predict(self) -> dict[str, torch.Tensor] | None:
        """Return what the task predicts for the first split, (examples, ...) by name, on rank 0.

        Each example is there once, in the order of the data set. Other ranks return an empty dict,
        all of them None if a rank was asked to stop. Collective: every rank must call it.
        """
        predictions = DeferredRows(self._group.world.device)

        def keep(outputs: Any, targets: Any, rows: int) -> None:
            if self._mesh.is_counted:
                with self._precision.autocast():
                    returned = self._hooks.predict(outputs)
                named = _named(returned, count_rows(targets, outputs))
                predictions.add({name: values[:rows] for name, values in named.items()})

        if not self._splits:
            return {}
        split = self._splits[0]
        self._heartbeat.enter(Phase.EVALUATE)
        for inputs, targets, _ in islice(split.batches, 1):  # no loss: it may have no targets
            with self.evaluating():
                self._trace_draws(lambda inputs, _: self._strategy.forward(inputs), inputs, targets)
        self._draws.agree("eval", self._group.max)
        if not self._run(split, keep):
            return None
        own: dict[str, torch.Tensor] = {}
        predictions.flush()
        with self._group.agreed("joining predictions"):
            own = {name: join_rows(name, each) for name, each in predictions.parts.items()}
        return self._collect(own)

    def _collect(self, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the rows of all ranks on rank 0, in the order of the ranks. A collective."""
        forms = {name: [name_of(t.dtype), list(t.shape)] for name, t in own.items()}
        parts: dict[str, list[torch.Tensor]] = {}
        every = self._group.gather(forms)
        for name in dict.fromkeys(name for each in every for name in each):
            shapes = [each[name][1] for each in every if name in each]
            join_rows(name, [torch.empty(0, *shape[1:], device="meta") for shape in shapes])
        for source, each in enumerate(every):
            for name, (dtype, shape) in each.items():
                if self._group.world.rank not in (0, source):
                    continue
                is_own = self._group.world.rank == source
                tensor = own[name] if is_own else torch.empty(shape, dtype=dtype_of(dtype))
                parts.setdefault(name, []).append(self._group.send_to_rank_0(tensor, source))
        if self._group.world.rank:
            return {}
        return {name: torch.cat(each) for name, each in parts.items()}

    def _run(self, split: EvalSplit, use: Use) -> bool:
        """Compute each micro-batch of a split; return False after a stop request. A collective.

        An error on one rank is raised on all ranks, except in a forward pass that communicates.
        """
        if not self._draws.is_known("eval"):
            self.trace_draws()
        every = 1
        begun = time.monotonic()
        batches = _Passes(iter(split.batches), self._strategy.forward, self._mesh.is_divided)
        last = split.batches.num_micro_batches
        with self.evaluating(), self._draws.update("eval"):
            for micro_batch_number in range(1, last + 1):
                self._heartbeat.enter(Phase.EVALUATE)
                batches.read()
                if micro_batch_number == 1 and self._mesh.is_divided:
                    self._raise_alike(split, batches.error)
                batches.compute(use)
                if micro_batch_number % every == 0 or micro_batch_number == last:
                    state = (float(self._wants_stop()), float(batches.error is not None))
                    asked, failed, seconds = self._group.max(*state, time.monotonic() - begun)
                    if failed:
                        self._raise_alike(split, batches.error)
                    if asked:
                        return False
                    every = max(1, int(micro_batch_number * ASK_EVERY_S / max(seconds, 1e-9)))
        return True

    def _raise_alike(self, split: EvalSplit, error: Exception | None) -> None:
        """Raise on all ranks if a rank has an error. A collective."""
        with self._group.agreed(f"evaluating {split.name}"):
            if error is not None:
                raise error

    @torch.no_grad()
    def trace_draws(self) -> list[str]:
        """Evaluate one micro-batch of each split to find its random draws.

        Returns the names of the metrics. Raises ConfigError if they differ between ranks.
        Collective: every rank must call it.
        """
        metric_names: list[str] = []
        self._is_dry_run = True
        for split in self._splits:
            means, has_drawn = Means(None), False
            with self._trial():
                for inputs, targets, rows in islice(split.batches, 1):
                    watched = self._draws.traces.watched("eval")
                    with eager(self._strategy.spec.config), watched as draws:
                        self._count(split, means, self._strategy.forward(inputs), targets, rows)
                    has_drawn = draws.has_drawn
            if any(self._group.max(has_drawn)):
                with self._trial():
                    for inputs, targets, _ in islice(split.batches, 1):
                        self._trace_draws(self._compute, inputs, targets)
                self._draws.agree("eval", self._group.max)
            names = ", ".join(means.names())
            if self._mesh.divides_model:  # some ranks have no outputs
                names = next(filter(None, (names, *self._group.gather(names))), "")
            self._group.check_equal({f"the list of {split.name} metrics": names})
            metric_names += self._finish(split, means)
        self._is_dry_run = False
        return metric_names

    @contextmanager
    def _trial(self) -> Iterator[None]:
        self._heartbeat.enter(Phase.EVALUATE)
        module = self._strategy.module
        has_large = not self._strategy.untouched  # else copied when an operation writes them
        with (
            self.evaluating(),
            nullcontext() if has_large else FrozenKept(module),
            sandbox(keep_passes(module, has_large=has_large), keep_attributes(module, self._hooks)),
            self._group.agreed("computing metrics"),
        ):
            yield

    def _trace_draws(self, compute: Callable[[Any, Any], Any], inputs: Any, targets: Any) -> None:
        with eager(self._strategy.spec.config):
            self._draws.trace_draws("eval", compute, (inputs, targets))

    @contextmanager
    def first_batch(self) -> Iterator[tuple[nn.Module, Any, int]]:
        """Yield the model with the weights of an evaluation, and the first inputs of a split.

        The third value is the number of their rows that are no padding; 0 without a split.
        """
        with self.evaluating(), torch.no_grad():
            batches = self._splits[0].batches if self._splits else ()
            inputs, _, rows = next(iter(batches), (None, None, 0))
            yield self._strategy.module, inputs, rows

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Switch the model to evaluation, with its averaged weights, and back, after errors too."""
        self._strategy.module.eval()
        try:
            averaged = self._ema.swapped() if self._ema else nullcontext()
            with sandbox(BufferCopies(self._strategy.module).restore), averaged:  # observers write
                yield
        finally:
            self._strategy.module.train()
            self._strategy.tensors.refresh()

    def _finish(self, split: EvalSplit, means: Means) -> dict[str, float]:
        values = means.read(self._group)
        scores = self._scores(split)
        if split.metrics and self._mesh.divides_model:
            scores = next(filter(None, self._group.gather(scores)))
        values |= scores
        with self._group.agreed(f"summarizing {split.name}"):
            returned = check_named("summarize returned", self._hooks.summarize(dict(values)))
            for name, value in returned.items():
                score = as_number(f"summarize returned {name},", value)
                if name in values and repr(score) != repr(values[name]):
                    raise ConfigError(f"""summarize returned {name},
                        which is a mean of the evaluation already; give it another name""")
                values[name] = score
        return {f"{split.name}/{name}": value for name, value in values.items()}

    def _scores(self, split: EvalSplit) -> dict[str, float]:
        """Return the torchmetrics over the ranks that count rows. A collective."""
        scores = {}
        for name, metric in split.metrics.items():
            with self._group.agreed(f"computing {split.name}/{name}"), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a rank without rows never updated it
                if self._mesh.divides_model:
                    metric.process_group = self._strategy.world.groups["data"].group
                if self._mesh.is_counted:
                    returned = f"build_metrics: {name}.compute() returned"
                    scores[name] = as_number(returned, metric.compute())
            metric.reset()
        return scores

    def _compute(self, inputs: Any, targets: Any) -> None:
        outputs = self._strategy.forward(inputs)
        if self._mesh.has_loss:
            self._values(outputs, targets)

    def _values(self, outputs: Any, targets: Any) -> dict[str, Values]:
        """Return metrics and loss of a micro-batch by name."""
        rows = self._draws.rows
        with self._precision.autocast():
            metrics = call_hook(METRICS_HOOK, self._hooks.metrics, outputs, targets, rows)
            returned = check_named("metrics returned", metrics)
            if "loss" in returned:
                raise ConfigError("""metrics returned a value called loss: must have another name;
                    loss is always included""")
            returned["loss"] = call_hook(LOSS_HOOK, self._hooks.loss, outputs, targets, rows)
        return returned

    def _count(self, split: EvalSplit, means: Means, outputs: Any, targets: Any, rows: int) -> None:
        values_by_name = self._values(outputs, targets) if self._mesh.has_loss else {}
        if not self._mesh.is_counted:  # another rank counts the same values
            return
        self._check_names(split.name, set(values_by_name))
        for name, value in values_by_name.items():
            subject = name if name == "loss" else f"metrics: {name}"
            values, weights = weigh(subject, value, count_rows(targets, outputs))
            if self._is_dry_run:
                check_signs(subject, weights)
            means.add(name, values[:rows], None if weights is None else weights[:rows])
        if split.metrics and (rows or split.batches.is_padding):
            real_outputs, real_targets = first_rows((outputs, targets), rows)
            self._feed(split, real_outputs, real_targets, rows)

    def _check_names(self, split: str, names: set[str]) -> None:
        """Raise ConfigError if a mean would leave out a part of the rows."""
        earlier_names = self._names.setdefault(split, names)
        if names != earlier_names:
            raise ConfigError(f"""metrics returned {", ".join(sorted(names))}
                after {", ".join(sorted(earlier_names))}:
                must return the same names for every batch, if need be with weights 0""")

    def _feed(self, split: EvalSplit, outputs: Any, targets: Any, rows: int) -> None:
        """Update the torchmetrics.

        A rank with padding only updates them with empty tensors, which gives their states the right
        shapes to gather, and ignores their errors.
        """
        for name, metric in split.metrics.items():
            shown = f"{name}.update(outputs, targets)"
            try:
                call_hook(shown, metric.update, outputs, targets, self._draws.rows)
            except (RuntimeError, ValueError):
                if rows:
                    raise
