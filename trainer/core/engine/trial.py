"""The run that methods of a task reach, such as `self.record`: none, one in training, or a trial.

A trial runs hooks of a task beside its steps: what they record, stop or save then reaches nothing.
So neither the task nor the run has to ask whether it is being tried.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.core.engine.step import Outcome
from trainer.core.engine.values import Values, rows_in, sum_up, weigh_all

ONLY_IN_FIT = "there only while fit trains; use it in train_step, loss or metrics"


Update = Callable[[Any, Any, "Sequence[Optimizer] | None", str], Outcome]
Gather = Callable[[torch.Tensor], "tuple[torch.Tensor, int]"]


def _refuse_update(batch: Any, loss: Any, optimizers: Any, name: str) -> Outcome:
    raise RuntimeError(ONLY_IN_FIT)


class TaskRun:
    """No run: that of a task before `fit` and after it.

    `update` makes an update, as `Engine.update`; it raises RuntimeError unless the run is open.
    """

    is_open = False
    update: Update = staticmethod(_refuse_update)
    without_model = "is not built yet; call fit or evaluate first"

    @property
    def model(self) -> nn.Module | None:
        """The model as `build_model` returned it; None if it is not here."""
        return None

    @property
    def step(self) -> int:
        """Number of global batches trained on so far."""
        return 0

    def list_optimizers(self) -> list[Optimizer]:
        """Return the optimizers as built. Raises RuntimeError unless the run is open."""
        raise RuntimeError(ONLY_IN_FIT)

    def record_values(self, name: str, returned: Values) -> None:
        """Record values of the examples of a micro-batch, as `Recorder.record`."""

    def stop(self, reason: str) -> None:
        """Ask all ranks to end the run after this step."""

    def gather_rows(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the rows of all ranks, and the number of this rank's first one among them."""
        return tensor, 0

    def request_save(self) -> Path:
        """Request a checkpoint of the state after this step, and return its future path."""
        raise RuntimeError(ONLY_IN_FIT)

    def next_checkpoint(self) -> Path:
        """Return the path that a checkpoint of the state after this step has."""
        raise RuntimeError(ONLY_IN_FIT)

    def evaluate(self) -> dict[str, float]:
        """Return the metrics of an evaluation of the model in training."""
        raise RuntimeError(ONLY_IN_FIT)


NO_RUN = TaskRun()


class Trial(TaskRun):
    """A run that is tried: it has the step of `outer`, and changes nothing of it.

    The task's model is `model`, such as a whole copy of a divided one, or that of `outer`.
    """

    is_open = True

    def __init__(self, outer: TaskRun, model: nn.Module | None = None):
        self._outer = outer
        self._model = model
        self._gather: Gather = super().gather_rows
        self._sums: dict[str, torch.Tensor] | None = None

    @property
    def model(self) -> nn.Module | None:
        return self._outer.model if self._model is None else self._model

    @property
    def step(self) -> int:
        return self._outer.step

    def list_optimizers(self) -> list[Optimizer]:
        return self._outer.list_optimizers()

    def record_values(self, name: str, returned: Values) -> None:
        if self._sums is not None:
            sums = sum_up(*weigh_all(f"record({name!r})", returned, rows_in(returned)))
            self._sums[name] = self._sums.get(name, 0) + sums.detach()

    def gather_rows(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        return self._gather(tensor)

    def request_save(self) -> Path:
        return self._outer.next_checkpoint()

    def evaluate(self) -> dict[str, float]:
        raise RuntimeError("a step that evaluates is not tried in parts")

    @contextmanager
    def updating_by(self, update: Update) -> Iterator[None]:
        """Have `update` make the updates in the block."""
        before, self.update = self.update, update
        try:
            yield
        finally:
            self.update = before

    @contextmanager
    def collecting(self) -> Iterator[dict[str, torch.Tensor]]:
        """Add the sums (3,) of what is recorded in the block to a dict."""
        self._sums = collected = dict[str, torch.Tensor]()
        try:
            yield collected
        finally:
            self._sums = None

    @contextmanager
    def gathering_by(self, gather: Gather) -> Iterator[None]:
        """Have `gather` return the rows of all ranks in the block."""
        before, self._gather = self._gather, gather
        try:
            yield
        finally:
            self._gather = before


class Inspection:
    """Looks at a run beside its steps. This one looks at nothing: no checks are installed."""

    is_due = False  # in this step updates are looked at again
    due: frozenset[int] = frozenset()  # 0-based steps for which `begin_step` is called

    def begin(self, batches: Any, say: Callable[[str], None]) -> None:
        """Look at updates from now on, on rows of these batches; `say` tells a line."""

    def close(self) -> None:
        """Look at nothing from now on."""

    def begin_step(self, step: int) -> None:
        """Begin the 0-based `step`. A collective."""

    def examine(self, name: str, loss: Any, step: int) -> None:
        """Look at an update before it is made. Raises ConfigError for a wrong one. A collective."""

    def list_changed(self) -> list[str]:
        """Return the names of state that training has changed and no checkpoint holds."""
        return []

    def find_lost(self, names: Sequence[str], step: int) -> list[str]:
        """Return those of some state that a resume after `step` misses. A collective."""
        return list(names)
