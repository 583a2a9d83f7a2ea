"""Values that a task records while it trains: means over the global batch, like its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trainer.base.errors import ConfigError
from trainer.core.engine.context import Hooks
from trainer.core.engine.means import Means
from trainer.core.engine.step import OpenStep
from trainer.core.engine.values import Values, check_name, check_named, rows_in, weigh
from trainer.core.micro_batch import count_rows
from trainer.core.rng.compiled import compiled

Loss = Callable[[Any, Any], Values]


class Recorder:
    """Adds values to `means` during a step, and ignores them otherwise.

    `taken` are the names of updates, whose losses are logged under them. On a rank that is not
    `is_counted` another one records the same values. If `hooks` are given, their metrics are
    recorded with their loss. Losses are compiled as run.compile, `compiles`, says.
    """

    def __init__(
        self,
        step: OpenStep,
        means: Means,
        taken: Container[str],
        is_counted: bool,
        hooks: Hooks | None,
        compiles: bool | str = False,
    ):
        self.means = means
        self.step = step
        self._taken = taken
        self._is_counted = is_counted
        self._hooks = hooks
        self._rows: int | None = None
        self._names: set[str] = set()  # that the task itself records
        self._losses = _Losses(compiles)
        self._loss: Loss | None = None  # while it is computed
        self._watched: dict[str, tuple[Loss, Loss]] = {}  # by update: the last loss, and watched

    def count_rows(self) -> int | None:
        """Return the rows of the micro-batch whose loss is computed; None outside of an update."""
        self._losses.eager.add(self._loss)
        return self._rows if self.step.is_open else None

    def record(self, name: str, returned: Values) -> None:
        """Add values, or (values, weights), of the examples of a micro-batch.

        Raises ConfigError for a name of an update, and for values that are not one per example.
        """
        if not self.step.is_open:
            return
        self._losses.eager.add(self._loss)
        subject = f"record({name!r})"
        check_name("record got", name)
        if name in self._taken:
            raise ConfigError(f"{subject}: is the name of an update's loss; choose another name")
        self._names.add(name)
        self._add(name, returned)

    def _add(self, name: str, returned: Values) -> None:
        subject = f"record({name!r})"
        values, weights = weigh(subject, returned, self._rows_of(returned), "got")
        if self._is_counted:
            self.means.add(name, values, weights)

    def _rows_of(self, returned: Values) -> int:
        """Return the rows of the micro-batch whose loss is computed; outside, those of values."""
        return rows_in(returned) if self._rows is None else self._rows

    def _add_metrics(self, metrics: Mapping[str, Values]) -> None:
        if not self.step.is_open:
            return
        for name, returned in check_named("metrics returned", metrics).items():
            if name in self._names or name in self._taken:
                other = "record has this name too" if name in self._names else "is an update's loss"
                raise ConfigError(f"""log.train_metrics=true:
                    metrics returned {name!r}, and {other}; rename one""")
            self._add(name, returned)

    def watched(self, loss: Loss, name: str = "loss") -> Loss:
        """Return the loss of the update `name`, for which values are recorded."""
        watched_pair = self._watched.get(name)
        if watched_pair is None or watched_pair[0] != loss or self._losses.compiles:
            self._watched[name] = watched_pair = (loss, self._watch(loss))
        return watched_pair[1]

    def _watch(self, loss: Loss) -> Loss:
        hooks = self._hooks if self._hooks and loss == self._hooks.loss else None
        run = self._losses.compile(loss)
        is_tried = bool(self._losses.compiles) and run is loss

        def compute(outputs: Any, targets: Any) -> Values:
            is_tensor = type(targets) is torch.Tensor and targets.dim()
            self._rows = targets.shape[0] if is_tensor else count_rows(targets, outputs)
            self._loss = loss
            if is_tried and not _are_plain(outputs):
                self._losses.eager.add(loss)
            try:
                values = run(outputs, targets)
                if hooks is not None:
                    with torch.no_grad():
                        self._add_metrics(hooks.metrics(outputs, targets))
            finally:
                self._rows = self._loss = None
            return values

        return compute


class _Losses:
    """Compiles losses as run.compile, `compiles`, says; those that are `eager` stay as they are."""

    def __init__(self, compiles: bool | str):
        self.compiles = compiles
        self.eager: set[Loss | None] = set()
        self._compiled: dict[Loss, Loss] = {}

    def compile(self, loss: Loss) -> Loss:
        """Return a method of a task as it is for its first update, then compiled.

        A loss that records values, gathers rows or gets tensors of a class, such as logits that
        tensor parallel divides, stays as it is. So does one that is no method: it may be another
        object in each step.
        """
        if not self.compiles or not inspect.ismethod(loss):
            return loss
        if loss not in self._compiled:
            self._compiled[loss] = compiled(loss, self.compiles, None)
            return loss
        return loss if loss in self.eager else self._compiled[loss]


def _are_plain(outputs: Any) -> bool:
    """Return True if no tensor is of a class of its own."""
    leaves = tree_leaves(outputs)
    return all(type(leaf) is torch.Tensor for leaf in leaves if isinstance(leaf, torch.Tensor))
