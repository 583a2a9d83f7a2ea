"""Evaluation: every example of the eval split counts exactly once, in any layout."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from trainer.data.batches import EvalBatches, count_rows
from trainer.distributed.watch.heartbeat import Phase
from trainer.engine.ema import Ema
from trainer.engine.means import Means, Values, weigh
from trainer.engine.parts import Parts
from trainer.errors import ConfigError

ASK_EVERY_S = 0.5  # how often the ranks agree on whether to stop


class Evaluator:
    """Evaluates a model over all ranks, as often as asked."""

    def __init__(
        self,
        parts: Parts,
        batches: EvalBatches | None,
        metrics: Mapping[str, Any],
        ema: Ema | None,
        wants_stop: Callable[[], bool],
    ):
        """`metrics` are torchmetrics by name; without `batches` there is nothing to evaluate."""
        self._hooks = parts.hooks
        self._strategy = parts.strategy
        self._precision = parts.precision
        self._draws = parts.draws
        self._group = parts.ranks.group
        self._heartbeat = parts.ranks.heartbeat
        self._batches = batches
        self._metrics = metrics
        self._ema = ema
        self._wants_stop = wants_stop

    @torch.no_grad()
    def evaluate(self) -> dict[str, float] | None:
        """`{"eval/loss": ...}`, alike on every rank; None where a rank was asked to stop.

        Padding is cut off before anything is counted. A collective.
        """
        if self._batches is None:
            return {}
        if not self._draws.is_known("eval"):
            self.rehearse()
        means = Means(self._batches.leaves)
        every = 1
        begun = time.monotonic()
        with self._averaged(), self._draws.update("eval"):
            for number, (inputs, targets, rows) in enumerate(self._batches, 1):
                self._heartbeat.enter(Phase.EVALUATE)
                self._count(means, self._strategy.forward(inputs), targets, rows)
                if number % every == 0:
                    asked, seconds = self._agree(begun)
                    if asked:
                        self._strategy.module.train()
                        return None
                    every = max(1, int(number * ASK_EVERY_S / max(seconds, 1e-9)))
        return self._finish(means)

    @torch.no_grad()
    def rehearse(self) -> list[str]:
        """Evaluate one micro-batch; the names of the metrics. A collective.

        Raises ConfigError where they differ between ranks.
        """
        if self._batches is None:
            return []
        means = Means(None)
        with self._averaged(), self._group.agreed("trying metrics"):
            for inputs, targets, rows in islice(self._batches, 1):
                self._heartbeat.enter(Phase.EVALUATE)
                self._draws.rehearse("eval", self._compute, (inputs, targets))
                self._count(means, self._strategy.forward(inputs), targets, rows)
        self._group.check_equal({"what metrics returned": ", ".join(means.names())})
        return list(self._finish(means))

    def _averaged(self) -> Any:
        self._strategy.module.eval()
        return self._ema.swapped() if self._ema else nullcontext()

    def _agree(self, begun: float) -> tuple[float, float]:
        asked, seconds = self._group.max(float(self._wants_stop()), time.monotonic() - begun)
        return asked, seconds

    def _finish(self, means: Means) -> dict[str, float]:
        self._strategy.module.train()
        values = means.read(self._group)
        for name, metric in self._metrics.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of a rank that had no row to update it with
                values[name] = metric.compute().item()
            metric.reset()
        values |= self._hooks.summarize(dict(values))
        return {f"eval/{name}": float(value) for name, value in values.items()}

    def _compute(self, inputs: Any, targets: Any) -> None:
        self._values(self._strategy.forward(inputs), targets)

    def _values(self, outputs: Any, targets: Any) -> dict[str, Values]:
        """Metrics and loss of a micro-batch by name."""
        with self._precision.autocast():
            returned = dict(self._hooks.metrics(outputs, targets))
            if "loss" in returned:
                why = "the loss is there already; choose another name"
                raise ConfigError(f"metrics returned a value called loss: {why}")
            returned["loss"] = self._hooks.loss(outputs, targets)
        return returned

    def _count(self, means: Means, outputs: Any, targets: Any, rows: int) -> None:
        for name, value in self._values(outputs, targets).items():
            values, weights = weigh(name, value, count_rows(targets, outputs))
            means.add(name, values[:rows], None if weights is None else weights[:rows])
        assert self._batches is not None
        if self._metrics and (rows or self._batches.is_padding):
            real_outputs, real_targets = tree_map_only(
                torch.Tensor, lambda t: t[:rows] if t.dim() else t, (outputs, targets)
            )
            self._feed(real_outputs, real_targets, rows)

    def _feed(self, outputs: Any, targets: Any, rows: int) -> None:
        """A rank of padding alone feeds none, so that metrics have the right shapes to gather."""
        for metric in self._metrics.values():
            try:
                metric.update(outputs, targets)
            except (RuntimeError, ValueError):
                if rows:
                    raise
