"""A mean carries its weight: what a loss or a metric may return, how it is summed, and how the sums meet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from trainer.errors import ConfigError

Values = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class Gathers(Protocol):
    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]: ...


def count_rows(*trees: Any) -> int:
    """The length of the first axis of the first tensor found: every tensor is batch-first."""
    for tree in trees:
        for leaf in [tree] if isinstance(tree, torch.Tensor) else tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                return leaf.shape[0]
    raise ConfigError("neither targets nor outputs hold a tensor with a batch axis")


def weigh(name: str, returned: Values, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`values (rows, ...)` and their weights, None when each counts 1.

    Raises ConfigError for a scalar, another first axis, or weights of another shape or with a gradient.
    """
    if isinstance(returned, tuple) and len(returned) != 2:
        raise ConfigError(
            f"{name} returned {len(returned)} things: must be values, or (values, weights)"
        )
    values, weights = returned if isinstance(returned, tuple) else (returned, None)
    if not isinstance(values, torch.Tensor) or values.dim() == 0:
        given = "a scalar" if isinstance(values, torch.Tensor) else f"a {type(values).__name__}"
        raise ConfigError(
            f'{name} returned {given}: must be a value per example; use reduction="none" in the loss function'
        )
    if values.shape[0] != rows:
        shape = f"shape {tuple(values.shape)}"
        raise ConfigError(
            f"{name} returned values of {shape}: the first axis must be the {rows} examples of the batch"
        )
    if weights is not None and not isinstance(weights, torch.Tensor):
        raise ConfigError(
            f"{name} returned {type(weights).__name__} weights: must be a tensor of the values' shape"
        )
    if weights is not None and (weights.shape != values.shape or weights.requires_grad):
        have = "a gradient" if weights.requires_grad else f"shape {tuple(weights.shape)}"
        raise ConfigError(
            f"{name} returned weights with {have}: must be detached and of the values' shape {tuple(values.shape)}"
        )
    return (values.float() if values.dtype in (torch.bfloat16, torch.float16) else values), weights


class Means:
    """Weighted sums by name, kept on the device; the ranks' sums meet once, when they are read.

    A row is what one step (or one evaluation) added; rows are summed in order and in float64.
    """

    def __init__(self) -> None:
        self._open: dict[str, tuple[torch.Tensor, torch.Tensor | float]] = {}
        self._rows: dict[str, list[tuple[torch.Tensor, torch.Tensor | float]]] = {}
        self._reduced: dict[str, torch.Tensor] = {}

    def add(self, name: str, values: torch.Tensor, weights: torch.Tensor | None) -> None:
        values = values.detach()
        total = (values if weights is None else values * weights).sum(dtype=torch.float64)
        self.count(
            name, total, values.numel() if weights is None else weights.sum(dtype=torch.float64)
        )

    def count(self, name: str, total: torch.Tensor, weight: torch.Tensor | float) -> None:
        """Add values that are summed already."""
        if name in self._open:
            total, weight = total + self._open[name][0], weight + self._open[name][1]
        self._open[name] = (total, weight)

    def end_row(self) -> None:
        for name, row in self._open.items():
            self._rows.setdefault(name, []).append(row)
        self._open.clear()

    def names(self) -> list[str]:
        return sorted({*self._open, *self._rows, *self._reduced})

    def clear(self) -> None:
        for table in (self._open, self._rows, self._reduced):
            table.clear()

    def reduced(self, ranks: Gathers) -> dict[str, torch.Tensor]:
        """The rows of every name, (rows, 2) of (sum, weight) over all ranks in float64 on the CPU. A collective."""
        self.end_row()
        names = sorted(self._rows)
        if names:
            local = _stack([row for name in names for row in self._rows[name]])
            total = sum((part.cpu() for part in ranks.gather(local)), start=torch.zeros_like(local))
            for name, rows in zip(
                names, total.split([len(self._rows[name]) for name in names]), strict=True
            ):
                self._reduced[name] = (
                    torch.cat([self._reduced[name], rows]) if name in self._reduced else rows
                )
        self._rows.clear()
        return dict(self._reduced)

    def read(self, ranks: Gathers) -> dict[str, float]:
        """The mean by name over everything since the last read, over all ranks; nan where nothing weighs."""
        rows = self.reduced(ranks)
        self.clear()
        sums = {
            name: [sum(column) for column in table.t().tolist()] for name, table in rows.items()
        }
        return {
            name: total / weight if weight else math.nan for name, (total, weight) in sums.items()
        }

    def load(self, rows: dict[str, torch.Tensor]) -> None:
        """Go on from what `reduced` returned."""
        self.clear()
        self._reduced = {name: table.clone() for name, table in rows.items()}


def _stack(rows: list[tuple[torch.Tensor, torch.Tensor | float]]) -> torch.Tensor:
    """(rows, 2) in float64 on the CPU; one copy each from the device for what lies there."""
    totals = torch.stack([total for total, _ in rows]).cpu()
    on_device = [weight for _, weight in rows if isinstance(weight, torch.Tensor)]
    read = iter(torch.stack(on_device).tolist() if on_device else [])
    weights = [next(read) if isinstance(weight, torch.Tensor) else weight for _, weight in rows]
    return torch.stack([totals.double(), torch.tensor(weights, dtype=torch.float64)], dim=1)


class Objective:
    """The loss as a strategy calls it: (outputs, targets) -> (sum(values x weights), what rides with the gradients).

    Backward runs on that sum x `scale` = ranks / nominal, nominal = global batch x elements per example, a constant of
    the run. The second result is (weight of the micro-batch, 1 if this rank was asked to stop); its sum over the
    global batch turns the gradients into those of the mean: times nominal / weight.
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], Values],
        means: Means,
        global_batch: int,
        ranks: int,
        name: str = "loss",
        agree: Callable[[int], int] = int,
    ):
        """`agree` gives rank 0's number on every rank; it is called once, with the elements per example."""
        self._loss, self._means, self._name, self._agree = loss, means, name, agree
        self._global_batch, self._ranks = global_batch, ranks
        self._carried: dict[tuple[float, bool], torch.Tensor] = {}
        self.elements = 0
        self.is_weighted: bool | None = None
        self.stop = False

    def __call__(self, outputs: Any, targets: Any) -> tuple[torch.Tensor, torch.Tensor]:
        rows = count_rows(targets, outputs)
        values, weights = weigh(self._name, self._loss(outputs, targets), rows)
        self._check_constant(values.numel() // rows, weights is not None)
        total = (values if weights is None else values * weights).sum()
        weight = values.numel() if weights is None else weights.sum()
        self._means.count(self._name, total.detach(), weight)
        return total, self._carry(total, weight)

    @property
    def scale(self) -> float:
        return self._ranks / (self._global_batch * self.elements)

    def factor(self, totals: torch.Tensor) -> torch.Tensor | None:
        """What the reduced gradients are to be multiplied by, None for 1; `totals` are the summed carries."""
        return self._global_batch * self.elements / totals[0] if self.is_weighted else None

    def _check_constant(self, elements: int, is_weighted: bool) -> None:
        if self.is_weighted is None:
            self.is_weighted = is_weighted
        if self.is_weighted != is_weighted:
            advice = "return (values, weights) always, or never"
            raise ConfigError(
                f"{self._name} returned weights in one step and none in another: {advice}"
            )
        self.elements = self.elements or self._agree(max(1, elements))
        if not is_weighted and self.elements != elements:
            was = f"{elements} values per example after {self.elements}"
            raise ConfigError(
                f"{self._name} returned {was}: return (values, weights), so that each value counts alike"
            )

    def _carry(self, total: torch.Tensor, weight: torch.Tensor | int) -> torch.Tensor:
        key = (0 if isinstance(weight, torch.Tensor) else weight, self.stop)
        if key not in self._carried:  # made once: on a GPU the copy would be waited for
            self._carried[key] = torch.tensor(key, dtype=total.dtype, device=total.device)
        if not isinstance(weight, torch.Tensor):
            return self._carried[key]
        return torch.stack([weight.to(total.dtype), self._carried[key][1]])


class OneStepLate:
    """Small device tensors read by the host one push later, so that the device never waits for the question."""

    def __init__(self) -> None:
        self._pending: tuple[list[float] | torch.Tensor, torch.cuda.Event | None] | None = None

    def push(self, tensors: Sequence[torch.Tensor]) -> list[float] | None:
        """The values of the tensors pushed before, None the first time."""
        before = self.flush()
        if tensors[0].device.type == "cuda":
            copied = torch.cuda.Event()
            self._pending = (torch.cat(list(tensors)).to("cpu", non_blocking=True), copied)
            copied.record()
        else:
            self._pending = ([value for tensor in tensors for value in tensor.tolist()], None)
        return before

    def flush(self) -> list[float] | None:
        """The values of the last tensors pushed, once."""
        if self._pending is None:
            return None
        values, copied = self._pending
        self._pending = None
        if copied is not None:
            copied.synchronize()
        return values.tolist() if isinstance(values, torch.Tensor) else values
