"""Values that a task records while it trains: means over the global batch, like its loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trainer.engine.means import (
    Means,
    Values,
    check_name,
    check_named,
    sum_up,
    weigh,
    weigh_all,
)
from trainer.engine.parts import Hooks
from trainer.errors import ConfigError
from trainer.micro_batch import count_rows
from trainer.rng.compiled import compiled

Loss = Callable[[Any, Any], Values]


class Recorder:
    """Adds values to `means` during a step, and ignores them otherwise.

    `taken` are the names of updates, whose losses are logged under them. On a rank that is not
    `is_counted` another one records the same values. If `hooks` are given, their metrics are
    recorded with their loss. Losses are compiled as run.compile, `compiles`, says.
    """

    def __init__(
        self,
        means: Means,
        taken: Container[str],
        is_counted: bool,
        hooks: Hooks | None,
        compiles: bool | str = False,
    ):
        self.means = means
        self._taken = taken
        self._is_counted = is_counted
        self._hooks = hooks
        self.is_open = False  # during a step
        self._rows: int | None = None
        self._names: set[str] = set()  # that the task itself records
        self._compiles = compiles
        self._compiled: dict[Loss, Loss] = {}
        self._eager: set[Loss | None] = set()  # what stays as it is
        self._loss: Loss | None = None  # while it is computed
        self._sums: dict[str, torch.Tensor] | None = None  # by name, while they are collected

    def begin_step(self) -> None:
        self.is_open = True

    def end_step(self) -> None:
        self.is_open = False

    def count_rows(self) -> int | None:
        """Return the rows of the micro-batch whose loss is computed; None outside of an update."""
        self._eager.add(self._loss)
        return self._rows if self.is_open else None

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Ignore values during the block."""
        was = self.is_open
        self.is_open = False
        try:
            yield
        finally:
            self.is_open = was

    @contextmanager
    def collecting(self) -> Iterator[dict[str, torch.Tensor]]:
        """Add the sums (3,) of what is recorded in the block to a dict, and log nothing."""
        found: dict[str, torch.Tensor] = {}
        self._sums = found
        try:
            yield found
        finally:
            self._sums = None

    def record(self, name: str, returned: Values) -> None:
        """Add values, or (values, weights), of the examples of a micro-batch.

        Raises ConfigError for a name of an update, and for values that are not one per example.
        """
        if not self.is_open:
            if self._sums is not None:
                sums = sum_up(*weigh_all(f"record({name!r})", returned, self._rows_of(returned)))
                self._sums[name] = self._sums.get(name, 0) + sums.detach()
            return
        self._eager.add(self._loss)
        given = f"record({name!r})"
        check_name("record got", name)
        if name in self._taken:
            raise ConfigError(f"{given}: is the name of an update's loss; choose another name")
        self._names.add(name)
        self._add(name, returned)

    def _add(self, name: str, returned: Values) -> None:
        given = f"record({name!r})"
        values, weights = weigh(given, returned, self._rows_of(returned), "got")
        if self._is_counted:
            self.means.add(name, values, weights)

    def _rows_of(self, returned: Values) -> int:
        """Return the rows of the micro-batch whose loss is computed; outside, those of values."""
        values = returned[0] if isinstance(returned, tuple) and returned else returned
        if self._rows is None and isinstance(values, torch.Tensor) and values.dim():
            return len(values)
        return self._rows or 0

    def _add_metrics(self, metrics: Mapping[str, Values]) -> None:
        if not self.is_open:
            return
        for name, returned in check_named("metrics returned", metrics).items():
            if name in self._names or name in self._taken:
                other = "record has this name too" if name in self._names else "is an update's loss"
                given = f"log.train_metrics=true: metrics returned {name!r}"
                raise ConfigError(f"{given}, and {other}; rename one")
            self._add(name, returned)

    def watched(self, loss: Loss) -> Loss:
        """Return the loss of an update, for which values are recorded."""
        hooks = self._hooks if self._hooks and loss == self._hooks.loss else None
        run = self._compile(loss)
        is_tried = bool(self._compiles) and run is loss

        def compute(outputs: Any, targets: Any) -> Values:
            self._rows = count_rows(targets, outputs)
            self._loss = loss
            if is_tried and not _are_plain(outputs):
                self._eager.add(loss)
            try:
                values = run(outputs, targets)
                if hooks is not None:
                    with torch.no_grad():
                        self._add_metrics(hooks.metrics(outputs, targets))
            finally:
                self._rows = self._loss = None
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
