"""Split of a global batch into parts of ranks, and of these into micro-batches."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from trainer.errors import ConfigError


@dataclass(frozen=True)
class Cut:
    """Rules of a run for splitting a global batch: rows per unit and per micro-batch.

    The rows of a unit stay together in one micro-batch. With `is_fixed`, every micro-batch of
    training and evaluation has `micro_batch` rows in any layout.
    """

    unit: int = 1
    micro_batch: int | None = None
    is_fixed: bool = False


@dataclass(frozen=True)
class Leaves:
    """The micro-batches of one rank (leaves), where all micro-batches of a batch have one size.

    The rank has `count` of the batch's `total` leaves, beginning with number `first`.
    """

    first: int
    count: int
    total: int


@dataclass(frozen=True)
class BatchPlan:
    """Split of a global batch into one part per rank, and of each part into micro-batches.

    The ranks' parts are contiguous, in rank order, and differ by at most one `unit` of rows. So do
    the micro-batches of a part. No micro-batch is empty; a rank with fewer units may have fewer
    micro-batches.
    """

    num_examples: int
    global_batch: int
    micro_batch: int
    ranks: int
    unit: int = 1

    @cached_property
    def accumulation(self) -> int:
        """The number of micro-batches of rank 0; no rank has more."""
        units = math.ceil(self.global_batch / self.unit / self.ranks)
        return math.ceil(units / (self.micro_batch // self.unit))

    @cached_property
    def steps_per_epoch(self) -> int:
        return self.num_examples // self.global_batch

    def micro_batches(self, rank: int) -> list[tuple[int, int]]:
        """Return (start, end) in the global batch for each micro-batch of a rank."""
        first, last = split((0, self.global_batch // self.unit), self.ranks, rank)
        count = min(self.accumulation, last - first)
        parts = [split((first, last), count, number) for number in range(count)]
        return [(start * self.unit, end * self.unit) for start, end in parts]

    def first(self, rank: int) -> int:
        """Return the number of a rank's first micro-batch among those of the global batch."""
        units = self.global_batch // self.unit
        return rank * self.accumulation - max(0, rank - units % self.ranks) * self._is_uneven

    @property
    def _is_uneven(self) -> bool:
        return self.global_batch // self.unit // self.ranks < self.accumulation


def split(rows: tuple[int, int], parts: int, number: int) -> tuple[int, int]:
    """Return (start, end) of part `number` of rows (start, end); larger parts come first."""
    start, end = rows
    size, larger = divmod(end - start, parts)
    first = start + number * size + min(number, larger)
    return first, first + size + (number < larger)


def check_batch(global_batch: int, cut: Cut, ranks: int) -> int:
    """Return the micro-batch size in use, a multiple of the unit.

    The unit divides the global batch. Raises ConfigError if a micro-batch would be empty.
    """
    units = global_batch // cut.unit
    if units < ranks:
        least = f"must be at least the {ranks} data-parallel ranks"
        if cut.unit > 1:
            least = f"must be at least {ranks} groups of {cut.unit} rows, one for each rank"
        raise ConfigError(f"data.global_batch={global_batch}: {least}")
    largest = -(-units // ranks) * cut.unit
    micro_batch = min(cut.micro_batch or largest, largest)
    accumulation = -(-largest // micro_batch)
    rows = global_batch // ranks
    if cut.unit == 1 and rows < accumulation:
        why = f"some ranks have {rows} rows for {accumulation} micro-batches, so one would be empty"
        advice = f"use data.micro_batch={micro_batch + 1}, or a global batch divisible by {ranks}"
        raise ConfigError(f"data.micro_batch={micro_batch}: {why}; {advice}")
    return micro_batch
