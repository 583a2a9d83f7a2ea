"""Sample order as a function, `index = order(seed, epoch, position)`, and its split over ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.utils.data import Sampler

from trainer.base.errors import ConfigError
from trainer.core.data.sampling import Sampling
from trainer.core.distributed import accelerator


@dataclass(frozen=True)
class BatchSplit:
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
        parts = [split((first, last), count, part) for part in range(count)]
        return [(start * self.unit, end * self.unit) for start, end in parts]

    def first(self, rank: int) -> int:
        """Return the number of a rank's first micro-batch among those of the global batch."""
        units = self.global_batch // self.unit
        return rank * self.accumulation - max(0, rank - units % self.ranks) * self._is_uneven

    @property
    def _is_uneven(self) -> bool:
        return self.global_batch // self.unit // self.ranks < self.accumulation


def split(rows: tuple[int, int], parts: int, part: int) -> tuple[int, int]:
    """Return (start, end) of part `part` of rows (start, end); larger parts come first."""
    start, end = rows
    size, larger = divmod(end - start, parts)
    first = start + part * size + min(part, larger)
    return first, first + size + (part < larger)


def check_batch(global_batch: int, batch_split: BatchSplit, ranks: int) -> int:
    """Return the micro-batch size in use, a multiple of the unit.

    The unit divides the global batch. Raises ConfigError if a micro-batch would be empty.
    """
    units = global_batch // batch_split.unit
    if units < ranks:
        least = f"must be at least the {ranks} data-parallel ranks"
        if batch_split.unit > 1:
            least = f"must be at least {ranks} groups of {batch_split.unit} rows, one for each rank"
        raise ConfigError(f"data.global_batch={global_batch}: {least}")
    largest = -(-units // ranks) * batch_split.unit
    micro_batch = min(batch_split.micro_batch or largest, largest)
    accumulation = -(-largest // micro_batch)
    rows = global_batch // ranks
    if batch_split.unit == 1 and rows < accumulation:
        raise ConfigError(f"""data.micro_batch={micro_batch}:
            some ranks have {rows} rows for {accumulation} micro-batches, so one would be empty;
            use data.micro_batch={micro_batch + 1}, or a global batch divisible by {ranks}""")
    return micro_batch


POSITIONS_AT_ONCE = 8192  # computed in 1.7 ms; 65,536 take 8 ms, in which a GPU would idle


class IndexSampler(Sampler[torch.Tensor]):
    """Sampler of index tensors, one for each micro-batch of an epoch."""

    epoch = 0


class EpochSampler(IndexSampler):
    """One rank's micro-batches of an epoch, in order, as index tensors on `device`."""

    def __init__(
        self, plan: BatchPlan, sampling: Sampling, seed: int, rank: int, device: torch.device
    ):
        self.plan = plan
        self.sampling = sampling
        self.seed = seed
        self.device = device
        self.pieces = plan.micro_batches(rank)
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Select the epoch, and its 0-based step `start` to begin with."""
        self.epoch = epoch
        self.start = start
        self.order = self.sampling.order(self.seed, epoch, self.plan.global_batch)

    def rows_of_node(self, num_nodes: int, node: int) -> tuple[int, int]:
        """Return (start, end) of a global batch's rows that the ranks of this node read."""
        first, end = split((0, self.plan.global_batch), num_nodes, node)
        return min(self.pieces[0][0], first), max(self.pieces[-1][1], end)

    def __len__(self) -> int:
        return (self.plan.steps_per_epoch - self.start) * len(self.pieces)

    def __iter__(self) -> Iterator[torch.Tensor]:
        first = self.pieces[0][0]
        last = self.pieces[-1][1]
        sizes = [end - start for start, end in self.pieces]
        steps = max(1, POSITIONS_AT_ONCE // (last - first))
        for begin in range(self.start, self.plan.steps_per_epoch, steps):
            batches = torch.arange(begin, min(begin + steps, self.plan.steps_per_epoch))
            positions = batches.unsqueeze(1) * self.plan.global_batch + torch.arange(first, last)
            for row in accelerator.send(self.order(positions), self.device):
                yield from row.split(sizes) if len(sizes) > 1 else (row,)
