"""Weighted means: checks of the values of a loss or metric, their sums, and the sums over ranks."""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from trainer.codec import name_of
from trainer.data.batch_plan import Leaves
from trainer.data.examples import find_flaw
from trainer.distributed import accelerator
from trainer.distributed.group import Group
from trainer.distributed.group import most as most_of
from trainer.engine.outcome import Reading, read_now
from trainer.errors import ConfigError

Values = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Row = tuple[torch.Tensor, torch.Tensor | float]  # (sum, weight)
Rows = dict[str, list[list[Row]]]  # by name


def weigh(
    name: str, returned: Values, rows: int, verb: str = "returned"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `values (rows, ...)` and their weights, None if each value has weight 1.

    Raises ConfigError for a scalar, for another first axis than `rows`, or for weights that have
    another shape or require a gradient.
    """
    values: object = returned
    weights: object = None
    subject = f"{name} {verb}"
    if isinstance(returned, tuple):
        if len(returned) != 2:
            given = f"a tuple of {len(returned)}"
            raise ConfigError(f"{subject} {given}: must be values, or (values, weights)")
        values, weights = returned
    if isinstance(values, torch.Tensor):
        _check_real(f"{subject} values", values)
    if not isinstance(values, torch.Tensor) or values.dim() == 0 or values.shape[0] != rows:
        _refuse_values(subject, values, rows)
    assert isinstance(values, torch.Tensor)
    if values.is_floating_point() and values.element_size() < 4:
        values = values.float()
    return values, None if weights is None else _check_weights(subject, values, weights)


def weigh_all(name: str, returned: Values, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `weigh` does, with weights of 1 where there are none."""
    values, weights = weigh(name, returned, rows)
    return values, torch.ones_like(values) if weights is None else weights


def sum_up(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return (3,) float64: the sums of values x weights, of their sizes, and of the weights."""
    weighted = values.detach().double() * weights
    return torch.stack([weighted.sum(), weighted.abs().sum(), weights.sum().double()])


def _check_real(subject: str, tensor: torch.Tensor) -> None:
    """Raise ConfigError for a tensor without real numbers to sum. Called in each micro-batch."""
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    if is_strided and not (tensor.is_complex() or tensor.is_quantized or tensor.is_meta):
        return
    if flaw := find_flaw(tensor, allows_gradient=True):
        raise ConfigError(f"{subject} in {flaw[0]}; {flaw[1]}")
    if tensor.is_complex():
        dtype = name_of(tensor.dtype)
        raise ConfigError(f"{subject} of dtype {dtype}: must be real; return tensor.abs() or .real")


def check_name(subject: str, name: object) -> None:
    """Raise ConfigError unless a value can be recorded under this name."""
    if not isinstance(name, str) or not name or not name.isprintable():
        must = "must be a string of printable characters"
        raise ConfigError(f"{subject} the name {name!r}: {must}")


def check_named(subject: str, returned: Any) -> dict[str, Any]:
    """Return what a hook returned as a dict. Raises ConfigError unless it has values by name."""
    if not isinstance(returned, Mapping):
        raise ConfigError(
            f"{subject} a {type(returned).__name__}: must be a dict of values by name"
        )
    for name in returned:
        check_name(subject, name)
    return dict(returned)


def as_number(subject: str, value: Any) -> float:
    """Return a hook's result as a float. Raises ConfigError if it is no real number."""
    try:
        if not isinstance(value, str):
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    given = f"a {type(value).__name__}"
    if isinstance(value, torch.Tensor):
        given = f"a tensor of shape {tuple(value.shape)}"
    raise ConfigError(f"{subject} {given}: must be a number")


def check_signs(name: str, weights: torch.Tensor | None) -> None:
    """Raise ConfigError for a negative weight. The host waits for the weights.

    One that is not finite may come from a bad example: run.on_bad_step handles its step.
    """
    if type(weights) is not torch.Tensor or not weights.numel():  # a fake one is of trainer.plan
        return
    least = float(weights.double().nan_to_num(0.0).min())
    if least < 0:
        must = "must be at least 0; multiply the values instead"
        raise ConfigError(f"{name} returned a weight of {least:g}: {must}")


def _refuse_values(subject: str, values: object, rows: int) -> None:
    if isinstance(values, torch.Tensor) and values.dim():
        shape = f"values of shape {tuple(values.shape)}"
        must = f"the first axis must be the {rows} examples of the batch"
        raise ConfigError(f"{subject} {shape}: {must}")
    if values is None or (isinstance(values, numpy.ndarray) and values.ndim):
        given = "None" if values is None else "a numpy array"
        raise ConfigError(f"{subject} {given}: must be a tensor with a value per example")
    given = "a scalar" if isinstance(values, torch.Tensor) else f"a {type(values).__name__}"
    must = 'must be a value per example; use reduction="none", and leave out .mean() and .item()'
    raise ConfigError(f"{subject} {given}: {must}")


def _check_weights(subject: str, values: torch.Tensor, weights: object) -> torch.Tensor:
    if not isinstance(weights, torch.Tensor):
        given = f"{type(weights).__name__} weights"
        raise ConfigError(f"{subject} {given}: must be a tensor of the values' shape")
    _check_real(f"{subject} weights", weights)
    if weights.shape != values.shape or weights.requires_grad:
        have = f"shape {tuple(weights.shape)}"
        have = "a gradient" if weights.requires_grad else have
        must = f"must be detached and of the values' shape {tuple(values.shape)}"
        raise ConfigError(f"{subject} weights with {have}: {must}")
    return weights


class Means:
    """Weighted sums by name, stored on the device and reduced over the ranks only when read.

    A row is the sum over one step, or over one evaluation. Rows are summed in order and in float64.
    With `leaves`, the sums of single micro-batches are stored until then, and summed in the order
    of all ranks' micro-batches, so a sum has the same bits on any number of ranks.
    """

    def __init__(self, leaves: Leaves | None = None) -> None:
        self._leaves = leaves
        self._open: dict[str, list[Row]] = {}
        self._rows: Rows = {}
        self._reduced: dict[str, torch.Tensor] = {}

    def add(self, name: str, values: torch.Tensor, weights: torch.Tensor | None) -> None:
        values = values.detach()
        weighted = values if weights is None else values * weights
        weight = values.numel() if weights is None else weights.sum(dtype=torch.float64)
        self.count(name, weighted.sum(dtype=torch.float64), weight)

    def count(self, name: str, total: torch.Tensor, weight: torch.Tensor | float) -> None:
        """Add values that are already summed."""
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
        """Return the rows of every name, (rows, 2) of (sum, weight) over all ranks.

        Tensors are float64 on the CPU. Collective: every rank must call it.
        """
        self.end_row()
        rows, self._rows = self._rows, {}
        for name, table in read_now(self._reducing(rows, group)).items():
            before = self._reduced.get(name)
            self._reduced[name] = table if before is None else torch.cat([before, table])
        return dict(self._reduced)

    def reading(self, group: Group) -> Reading[dict[str, float]]:
        """Return the mean by name over all values of all ranks since the last read, and clear.

        It is nan if the total weight is 0. Collective: every rank must call it.
        """
        self.end_row()
        rows, before = self._rows, self._reduced
        self.clear()
        tables = yield from self._reducing(rows, group)
        means = {}
        for name in sorted({*tables, *before}):
            parts = [each[name] for each in (before, tables) if name in each]
            total, weight = (sum(column) for column in torch.cat(parts).t().tolist())
            means[name] = total / weight if weight else math.nan
        return means

    def read(self, group: Group) -> dict[str, float]:
        """Return `reading`'s means; the host waits for them."""
        return read_now(self.reading(group))

    def _reducing(self, rows: Rows, group: Group) -> Reading[dict[str, torch.Tensor]]:
        """Return (rows, 2) of each name, float64 on the CPU, summed over all ranks."""
        counts = {name: len(each) for name, each in sorted(rows.items())}
        if group.world.world_size > 1:
            counts = yield from _agree_on(counts, rows, group)
        names = sorted(counts)
        if not names:
            return {}
        local = [row for name in names for row in self._padded(rows, name, counts[name])]
        sizes = [counts[name] for name in names]
        if self._leaves is None:
            total = yield group.total(_stack([row[0] for row in local]))
        else:
            columns = yield group.total(self._place_leaves(local))
            parts = columns.view(len(local), -1, 2).unbind(1)
            total = functools.reduce(torch.add, parts)
        return dict(zip(names, total.split(sizes), strict=True))

    def _padded(self, rows: Rows, name: str, count: int) -> list[list[Row]]:
        """Return the rows of a name, and empty ones where other ranks have more."""
        own = rows.get(name, [])
        zero = next((row[0][0] for each in rows.values() for row in each), torch.zeros(()))
        empty: list[Row] = [(torch.zeros_like(zero), 0.0)] * (
            self._leaves.count if self._leaves else 1
        )
        return own + [empty] * (count - len(own))

    def _place_leaves(self, rows: list[list[Row]]) -> torch.Tensor:
        """Return (rows, passes, leaves, 2): this rank's leaves in their places, and zeros."""
        leaves = self._leaves
        assert leaves is not None
        if any(len(row) % leaves.count for row in rows):
            why = "a metric or loss was returned for some micro-batches only"
            raise ConfigError(f"strategy=exact: {why}; always return it, if need be with weights 0")
        passes = max(len(row) for row in rows) // leaves.count
        stacked = [_stack(row).view(-1, leaves.count, 2) for row in rows]
        table = stacked[0].new_zeros(len(rows), passes, leaves.total, 2)
        for number, sums in enumerate(stacked):
            table[number, : len(sums), leaves.first : leaves.first + leaves.count] = sums
        return table

    def load(self, rows: dict[str, torch.Tensor]) -> None:
        """Continue from what `reduced` returned."""
        self.clear()
        self._reduced = {name: table.clone() for name, table in rows.items()}


def _agree_on(counts: dict[str, int], rows: Rows, group: Group) -> Reading[dict[str, int]]:
    """Return the most rows of each name that a rank has. A collective.

    Some ranks may have fewer: a stage of a pipeline has no outputs, and a task may record a
    value in some steps only.
    """
    number = zlib.crc32(json.dumps(counts).encode())
    device = next((row[0][0].device for each in rows.values() for row in each), group.world.device)
    both = torch.tensor([number, -number], dtype=torch.float64)
    most, least = (yield most_of(group, accelerator.send(both, device))).tolist()
    if most != -least:
        for others in group.gather(counts):
            for name, count in others.items():
                counts[name] = max(count, counts.get(name, 0))
    return counts


def _stack(rows: list[Row]) -> torch.Tensor:
    """Return (rows, 2) float64 of sums and weights, on the device of the sums."""
    totals = torch.stack([total.double() for total, _ in rows])
    numbers = [0.0 if isinstance(weight, torch.Tensor) else weight for _, weight in rows]
    if any(numbers):
        known = accelerator.send(torch.tensor(numbers, dtype=torch.float64), totals.device)
    else:
        known = torch.zeros_like(totals)
    on_device = [weight if isinstance(weight, torch.Tensor) else None for _, weight in rows]
    if any(weight is not None for weight in on_device):
        zero = torch.zeros((), dtype=torch.float64, device=totals.device)
        known = known + torch.stack([zero if w is None else w.double() for w in on_device])
    return torch.stack([totals, known], dim=1)
