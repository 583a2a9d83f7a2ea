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
    """Evaluation of a model over all ranks, which can be repeated."""

    def __init__(
        self,
        parts: Parts,
        batches: EvalBatches | None,
        metrics: Mapping[str, Any],
        ema: Ema | None,
        wants_stop: Callable[[], bool],
    ):
        """Take torchmetrics by name as `metrics`; with `batches=None`, evaluations are empty."""
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
        """Return `{"eval/loss": ...}`, the same on every rank, or None if a rank was asked to stop.

        Padding is cut off before anything is counted. Collective: every rank must call it.
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
        """Evaluate one micro-batch to find its random draws, and return the names of the metrics.

        Raises ConfigError if they differ between ranks. Collective: every rank must call it.
        """
        if self._batches is None:
            return []
        means = Means(None)
        with self._averaged(), self._group.agreed("computing metrics"):
            for inputs, targets, rows in islice(self._batches, 1):
                self._heartbeat.enter(Phase.EVALUATE)
                self._draws.rehearse("eval", self._compute, (inputs, targets))
                self._count(means, self._strategy.forward(inputs), targets, rows)
        self._group.check_equal({"the list of metrics": ", ".join(means.names())})
        return list(self._finish(means))

    def _averaged(self) -> Any:
        self._strategy.module.eval()
        return self._ema.swapped() if self._ema else nullcontext()

    def _agree(self, begun: float) -> tuple[float, float]:
        asked, seconds = self._group.max(float(self._wants_stop()), time.monotonic() - begun)
        return asked, seconds

    def _finish(self, means: Means) -> dict[str, float]:
        self._strategy.module.train()
        self._strategy.refresh()
        values = means.read(self._group)
        for name, metric in self._metrics.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # a rank without rows never updated it
                values[name] = metric.compute().item()
            metric.reset()
        values |= self._hooks.summarize(dict(values))
        return {f"eval/{name}": float(value) for name, value in values.items()}

    def _compute(self, inputs: Any, targets: Any) -> None:
        self._values(self._strategy.forward(inputs), targets)

    def _values(self, outputs: Any, targets: Any) -> dict[str, Values]:
        """Return metrics and loss of a micro-batch by name."""
        with self._precision.autocast():
            returned = dict(self._hooks.metrics(outputs, targets))
            if "loss" in returned:
                why = "must have another name; loss is always included"
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
        """Update the torchmetrics.

        A rank with padding only updates them with empty tensors, which gives their states the right
        shapes to gather, and ignores their errors.
        """
        for metric in self._metrics.values():
            try:
                metric.update(outputs, targets)
            except (RuntimeError, ValueError):
                if rows:
                    raise
