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
    `is_counted` another one records the same values.
    """

    def __init__(self, step: OpenStep, means: Means, taken: Container[str], is_counted: bool):
        self.means = means
        self.step = step
        self._taken = taken
        self._is_counted = is_counted
        self._rows: int | None = None  # of the micro-batch whose loss is computed
        self._is_used = False  # by that loss
        self._names: set[str] = set()  # that the task itself records

    def begin_loss(self, rows: int) -> None:
        """Note that the loss of a micro-batch is computed from now on."""
        self._rows = rows
        self._is_used = False

    def end_loss(self) -> bool:
        """Note the end of a loss; return True if it has recorded values or asked for its rows."""
        self._rows = None
        return self._is_used

    def count_rows(self) -> int | None:
        """Return the rows of the micro-batch whose loss is computed; None outside of an update."""
        self._is_used = True
        return self._rows if self.step.is_open else None

    def record(self, name: str, returned: Values) -> None:
        """Add values, or (values, weights), of the examples of a micro-batch.

        Raises ConfigError for a name of an update, and for values that are not one per example.
        """
        if not self.step.is_open:
            return
        self._is_used = True
        subject = f"record({name!r})"
        check_name("record got", name)
        if name in self._taken:
            raise ConfigError(f"{subject}: is the name of an update's loss; choose another name")
        self._names.add(name)
        self._add(name, returned)

    def add_metrics(self, metrics: Mapping[str, Values]) -> None:
        """Add the metrics of a micro-batch whose loss is computed."""
        if not self.step.is_open:
            return
        for name, returned in check_named("metrics returned", metrics).items():
            if name in self._names or name in self._taken:
                other = "record has this name too" if name in self._names else "is an update's loss"
                raise ConfigError(f"""log.train_metrics=true:
                    metrics returned {name!r}, and {other}; rename one""")
            self._add(name, returned)

    def _add(self, name: str, returned: Values) -> None:
        rows = rows_in(returned) if self._rows is None else self._rows
        values, weights = weigh(f"record({name!r})", returned, rows, "got")
        if self._is_counted:
            self.means.add(name, values, weights)


class LossWatcher:
    """Makes the losses of updates: with their rows told to a recorder, their metrics, compiled.

    If `hooks` are given, their metrics are recorded with their loss. Losses are compiled as
    run.compile, `compiles`, says; those that are eager stay as they are.
    """

    def __init__(self, recorder: Recorder, hooks: Hooks | None, compiles: bool | str = False):
        self._recorder = recorder
        self._hooks = hooks
        self._compiles = compiles
        self._compiled: dict[Loss, Loss] = {}
        self._eager: set[Loss] = set()
        self._watched: dict[str, tuple[Loss, Loss]] = {}  # by update: the last loss, and watched

    def watch(self, loss: Loss, name: str = "loss") -> Loss:
        """Return the loss of the update `name`, for which values are recorded."""
        watched_pair = self._watched.get(name)
        if watched_pair is None or watched_pair[0] != loss or self._compiles:
            self._watched[name] = watched_pair = (loss, self._make(loss))
        return watched_pair[1]

    def _make(self, loss: Loss) -> Loss:
        recorder, compiles = self._recorder, bool(self._compiles)
        hooks = self._hooks if self._hooks and loss == self._hooks.loss else None
        run = self._compile(loss)
        is_tried = compiles and run is loss

        def compute(outputs: Any, targets: Any) -> Values:
            is_tensor = type(targets) is torch.Tensor and targets.dim()
            recorder.begin_loss(targets.shape[0] if is_tensor else count_rows(targets, outputs))
            if is_tried and not _are_plain(outputs):
                self._eager.add(loss)
            try:
                values = run(outputs, targets)
                if hooks is not None:
                    with torch.no_grad():
                        recorder.add_metrics(hooks.metrics(outputs, targets))
            finally:
                if recorder.end_loss() and compiles:
                    self._eager.add(loss)
            return values

        return compute

    def _compile(self, loss: Loss) -> Loss:
        """Return a method of a task as it is for its first update, then compiled.

        A loss that records values, gathers rows or gets tensors of a class, such as logits that
        tensor parallel divides, stays as it is. So does one that is no method: it may be another
        object in each step.
        """
        if not self._compiles or not inspect.ismethod(loss):
            return loss
        if loss not in self._compiled:
            self._compiled[loss] = compiled(loss, self._compiles, None)
            return loss
        return loss if loss in self._eager else self._compiled[loss]


def _are_plain(outputs: Any) -> bool:
    """Return True if no tensor is of a class of its own."""
    leaves = tree_leaves(outputs)
    return all(type(leaf) is torch.Tensor for leaf in leaves if isinstance(leaf, torch.Tensor))
