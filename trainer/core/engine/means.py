"""Weighted means: checks of the values of a loss or metric, their sums, and the sums over ranks."""

from __future__ import annotations

import functools
import json
import math
import zlib
from collections.abc import Mapping
from types import MappingProxyType

import torch

from trainer.base.errors import ConfigError
from trainer.core.data.order import Leaves
from trainer.core.distributed import accelerator
from trainer.core.distributed.group import Group, most

Row = tuple[torch.Tensor, torch.Tensor | float]  # (sum, weight)
Rows = dict[str, list[list[Row]]]  # by name


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
        reading = Reading(rows, self._leaves, group)
        for name, table in reading.tables(_now(reading)).items():
            before = self._reduced.get(name)
            self._reduced[name] = table if before is None else torch.cat([before, table])
        return dict(self._reduced)

    def take(self, group: Group) -> Reading:
        """Return a reading of what was counted since the last one, and clear."""
        self.end_row()
        reading = Reading(self._rows, self._leaves, group, self._reduced)
        self.clear()
        return reading

    def read(self, group: Group) -> dict[str, float]:
        """Return the means since the last read, and clear; the host waits. A collective."""
        reading = self.take(group)
        return reading.means(_now(reading))

    def load(self, rows: dict[str, torch.Tensor]) -> None:
        """Continue from what `reduced` returned."""
        self.clear()
        self._reduced = {name: table.clone() for name, table in rows.items()}


class Reading:
    """Rows of this rank by name, read in two collectives.

        reading.means(reading.sums(reading.counts()))

    Each returns a tensor whose copy on the host the next one needs. So the host can go on with
    other work while a device computes it.
    """

    def __init__(
        self,
        rows: Rows,
        leaves: Leaves | None,
        group: Group,
        before: Mapping[str, torch.Tensor] = MappingProxyType({}),
    ):
        """`before` are the tables of earlier rows."""
        self._rows = rows
        self._leaves = leaves
        self._group = group
        self._before = before
        self._counts = {name: len(each) for name, each in sorted(rows.items())}

    def counts(self) -> torch.Tensor:
        """Return (2,): the largest checksum of the counts of any rank, and minus the smallest.

        Some ranks may have fewer rows: a stage of a pipeline has no outputs, and a task may record
        a value in some steps only. A collective.
        """
        checksum = zlib.crc32(json.dumps(self._counts).encode())
        both = torch.tensor([checksum, -checksum], dtype=torch.float64)
        if self._group.world.world_size == 1:
            return both
        firsts = (row[0][0] for each in self._rows.values() for row in each)
        device = next((first.device for first in firsts), self._group.world.device)
        return most(self._group, accelerator.send(both, device))

    def sums(self, compared: torch.Tensor) -> torch.Tensor:
        """Return (all rows, 2), or those of each leaf, summed over all ranks. A collective."""
        largest, smallest = compared.tolist()
        if largest != -smallest:
            for others in self._group.gather(self._counts):
                for name, count in others.items():
                    self._counts[name] = max(count, self._counts.get(name, 0))
        names = sorted(self._counts)
        if not names:
            return torch.zeros(0, 2)
        local = [row for name in names for row in self._padded(name, self._counts[name])]
        if self._leaves is None:
            return self._group.total(_stack([row[0] for row in local]))
        return self._group.total(self._place_leaves(local))

    def tables(self, totals: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return (rows, 2) of each name: sums and weights, on the host."""
        names = sorted(self._counts)
        sizes = [self._counts[name] for name in names]
        if self._leaves is not None and names:
            parts = totals.view(sum(sizes), -1, 2).unbind(1)
            totals = functools.reduce(torch.add, parts)
        return dict(zip(names, totals.split(sizes) if names else (), strict=True))

    def means(self, totals: torch.Tensor) -> dict[str, float]:
        """Return the mean by name over all values of all ranks; nan if the total weight is 0."""
        tables = self.tables(totals)
        means = {}
        for name in sorted({*tables, *self._before}):
            parts = [each[name] for each in (self._before, tables) if name in each]
            total, weight = (sum(column) for column in torch.cat(parts).t().tolist())
            means[name] = total / weight if weight else math.nan
        return means

    def _padded(self, name: str, count: int) -> list[list[Row]]:
        """Return the rows of a name, and empty ones where other ranks have more."""
        own = self._rows.get(name, [])
        zero = next((row[0][0] for each in self._rows.values() for row in each), torch.zeros(()))
        empty: list[Row] = [(torch.zeros_like(zero), 0.0)] * (
            self._leaves.count if self._leaves else 1
        )
        return own + [empty] * (count - len(own))

    def _place_leaves(self, rows: list[list[Row]]) -> torch.Tensor:
        """Return (rows, passes, leaves, 2): this rank's leaves in their places, and zeros."""
        leaves = self._leaves
        assert leaves is not None
        if any(len(row) % leaves.count for row in rows):
            raise ConfigError("""strategy=exact: a metric or loss was returned
                for some micro-batches only; always return it, if need be with weights 0""")
        passes = max(len(row) for row in rows) // leaves.count
        stacked = [_stack(row).view(-1, leaves.count, 2) for row in rows]
        table = stacked[0].new_zeros(len(rows), passes, leaves.total, 2)
        for row_index, sums in enumerate(stacked):
            table[row_index, : len(sums), leaves.first : leaves.first + leaves.count] = sums
        return table


def _now(reading: Reading) -> torch.Tensor:
    """Return the sums of a reading on the host, which waits for them. A collective."""
    return reading.sums(reading.counts().cpu()).cpu()


def _stack(rows: list[Row]) -> torch.Tensor:
    """Return (rows, 2) float64 of sums and weights, on the device of the sums."""
    totals = torch.stack([total.double() for total, _ in rows])
    numbers = [0.0 if isinstance(weight, torch.Tensor) else weight for _, weight in rows]
    if any(numbers):
        weights = accelerator.send(torch.tensor(numbers, dtype=torch.float64), totals.device)
    else:
        weights = torch.zeros_like(totals)
    on_device = [weight if isinstance(weight, torch.Tensor) else None for _, weight in rows]
    if any(weight is not None for weight in on_device):
        zero = torch.zeros((), dtype=torch.float64, device=totals.device)
        weights = weights + torch.stack([zero if w is None else w.double() for w in on_device])
    return torch.stack([totals, weights], dim=1)
