"""A mean carries its weight: what a loss or a metric may return, how it is summed and reduced."""

from __future__ import annotations

import functools
import math

import torch

from trainer.data.order import Leaves
from trainer.distributed.group import Group
from trainer.errors import ConfigError

Values = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Row = tuple[torch.Tensor, torch.Tensor | float]  # (sum, weight)


def weigh(name: str, returned: Values, rows: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """`values (rows, ...)` and their weights, None when each counts 1.

    Raises ConfigError for a scalar, another first axis, or weights of another shape or with a
    gradient.
    """
    values: object = returned
    weights: object = None
    if isinstance(returned, tuple):
        if len(returned) != 2:
            given = f"{len(returned)} things"
            raise ConfigError(f"{name} returned {given}: must be values, or (values, weights)")
        values, weights = returned
    if not isinstance(values, torch.Tensor) or values.dim() == 0 or values.shape[0] != rows:
        _refuse_values(name, values, rows)
    assert isinstance(values, torch.Tensor)
    if values.dtype in (torch.bfloat16, torch.float16):
        values = values.float()
    return values, None if weights is None else _check_weights(name, values, weights)


def _refuse_values(name: str, values: object, rows: int) -> None:
    if isinstance(values, torch.Tensor) and values.dim():
        shape = f"values of shape {tuple(values.shape)}"
        must = f"the first axis must be the {rows} examples of the batch"
        raise ConfigError(f"{name} returned {shape}: {must}")
    given = "a scalar" if isinstance(values, torch.Tensor) else f"a {type(values).__name__}"
    must = 'must be a value per example; use reduction="none" in the loss function'
    raise ConfigError(f"{name} returned {given}: {must}")


def _check_weights(name: str, values: torch.Tensor, weights: object) -> torch.Tensor:
    if not isinstance(weights, torch.Tensor):
        given = f"{type(weights).__name__} weights"
        raise ConfigError(f"{name} returned {given}: must be a tensor of the values' shape")
    if weights.shape != values.shape or weights.requires_grad:
        have = f"shape {tuple(weights.shape)}"
        have = "a gradient" if weights.requires_grad else have
        must = f"must be detached and of the values' shape {tuple(values.shape)}"
        raise ConfigError(f"{name} returned weights with {have}: {must}")
    return weights


class Means:
    """Weighted sums by name, kept on the device; the ranks' sums meet once, when they are read.

    A row is what one step (or one evaluation) added; rows are summed in order and in float64. With
    `leaves`, what each micro-batch added is kept until then, and summed in the order of all ranks'
    micro-batches: then a sum has the same bits on any number of ranks.
    """

    def __init__(self, leaves: Leaves | None = None) -> None:
        self._leaves = leaves
        self._open: dict[str, list[Row]] = {}
        self._rows: dict[str, list[list[Row]]] = {}
        self._reduced: dict[str, torch.Tensor] = {}

    def add(self, name: str, values: torch.Tensor, weights: torch.Tensor | None) -> None:
        values = values.detach()
        weighted = values if weights is None else values * weights
        weight = values.numel() if weights is None else weights.sum(dtype=torch.float64)
        self.count(name, weighted.sum(dtype=torch.float64), weight)

    def count(self, name: str, total: torch.Tensor, weight: torch.Tensor | float) -> None:
        """Add values that are summed already."""
        row = self._open.setdefault(name, [])
        if row and self._leaves is None:
            before, weight_before = row.pop()
            total = total + before
            weight = weight + weight_before
        row.append((total, weight))

    def end_row(self) -> None:
        for name, row in self._open.items():
            self._rows.setdefault(name, []).append(row)
        self._open = {}

    def names(self) -> list[str]:
        return sorted({*self._open, *self._rows, *self._reduced})

    def clear(self) -> None:
        self._open = {}
        self._rows = {}
        self._reduced = {}

    def reduced(self, group: Group) -> dict[str, torch.Tensor]:
        """The rows of every name, (rows, 2) of (sum, weight) over all ranks. A collective.

        In float64 on the CPU.
        """
        self.end_row()
        names = sorted(self._rows)
        if names:
            local = [row for name in names for row in self._rows[name]]
            if self._leaves is None:
                total = group.total(_stack([row[0] for row in local]))
            else:
                total = self._sum_leaves(local, group)
            sizes = [len(self._rows[name]) for name in names]
            for name, rows in zip(names, total.split(sizes), strict=True):
                before = self._reduced.get(name)
                self._reduced[name] = rows if before is None else torch.cat([before, rows])
        self._rows = {}
        return dict(self._reduced)

    def _sum_leaves(self, rows: list[list[Row]], group: Group) -> torch.Tensor:
        """(rows, 2), each the sum over all leaves in their order."""
        leaves = self._leaves
        assert leaves is not None
        if any(len(row) % leaves.count for row in rows):
            what = "a metric or loss was returned for some micro-batches only"
            raise ConfigError(f"strategy=exact: {what}; return it always, with weights of 0")
        passes = max(len(row) for row in rows) // leaves.count
        table = torch.zeros(len(rows), passes, leaves.total, 2, dtype=torch.float64)
        for number, row in enumerate(rows):
            found = _stack(row).view(-1, leaves.count, 2)
            table[number, : len(found), leaves.first : leaves.first + leaves.count] = found
        columns = group.total(table).view(len(rows), -1, 2).unbind(1)
        return functools.reduce(torch.add, columns)

    def read(self, group: Group) -> dict[str, float]:
        """The mean by name over everything since the last read; nan where nothing weighs.

        Over all ranks. A collective.
        """
        rows = self.reduced(group)
        self.clear()
        means = {}
        for name, table in rows.items():
            total, weight = (sum(column) for column in table.t().tolist())
            means[name] = total / weight if weight else math.nan
        return means

    def load(self, rows: dict[str, torch.Tensor]) -> None:
        """Continue from what `reduced` returned."""
        self.clear()
        self._reduced = {name: table.clone() for name, table in rows.items()}


def _stack(rows: list[Row]) -> torch.Tensor:
    """(rows, 2) in float64 on the CPU; one copy each from the device for totals and weights."""
    totals = torch.stack([total for total, _ in rows]).cpu()
    on_device = [weight for _, weight in rows if isinstance(weight, torch.Tensor)]
    read = iter(torch.stack(on_device).tolist() if on_device else [])
    weights = [next(read) if isinstance(weight, torch.Tensor) else weight for _, weight in rows]
    return torch.stack([totals.double(), torch.tensor(weights, dtype=torch.float64)], dim=1)
