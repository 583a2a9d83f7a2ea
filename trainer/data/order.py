"""Sample order as a function, `index = order(seed, epoch, position)`, without stored state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.utils.data import Sampler

from trainer.errors import ConfigError
from trainer.rng.philox import key_of

_MASK = 0xFFFFFFFF
_ROUNDS = 8
BLOCK = 65536  # positions computed at once: 17 to 62 ms, under 1 us each


class Order:
    """A keyed permutation of range(size): a Feistel network over Z_a x Z_b with cycle walking.

    After Black and Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002).
    a = ceil(sqrt(size)) and b = ceil(size / a), so a * b exceeds the size by less than a, and
    few positions need a second encryption (a step of the cycle walk).
    """

    def __init__(self, seed: int, epoch: int, size: int):
        self.size = size
        self.a = math.isqrt(size - 1) + 1
        self.b = -(-size // self.a)
        self.keys = [key_of(seed, "order", epoch, r) & 0x7FFFFFFF for r in range(_ROUNDS)]

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the example indices at `positions`: int64 of any shape, in range(size)."""
        return self._walk(self._encrypt, positions)

    def invert(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the positions of example indices."""
        return self._walk(self._decrypt, indices)

    def _walk(self, step: Callable[..., torch.Tensor], values: torch.Tensor) -> torch.Tensor:
        values = step(values)
        while (outside := values >= self.size).any():
            values[outside] = step(values[outside])
        return values

    def _encrypt(self, values: torch.Tensor) -> torch.Tensor:
        left, right = values // self.b, values % self.b
        for number, key in enumerate(self.keys):
            if number % 2:
                right = (right + _scramble(left, key)) % self.b
            else:
                left = (left + _scramble(right, key)) % self.a
        return left * self.b + right

    def _decrypt(self, values: torch.Tensor) -> torch.Tensor:
        left, right = values // self.b, values % self.b
        for number, key in reversed([*enumerate(self.keys)]):
            if number % 2:
                right = (right - _scramble(left, key)) % self.b
            else:
                left = (left - _scramble(right, key)) % self.a
        return left * self.b + right


def _scramble(values: torch.Tensor, key: int) -> torch.Tensor:
    """Return 31 bits for each value, by a finalizer of MurmurHash3's form.

    Factors below 2**31 keep the products in int64.
    """
    mixed = (values ^ key) & _MASK
    mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B5) & _MASK
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & _MASK
    return (mixed ^ (mixed >> 16)) >> 1


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


def counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


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


class IndexSampler(Sampler[torch.Tensor]):
    """Sampler of index tensors, one for each micro-batch of an epoch."""

    epoch = 0


class EpochSampler(IndexSampler):
    """One rank's micro-batches of an epoch, in order, as index tensors on `device`."""

    def __init__(self, plan: BatchPlan, seed: int, rank: int, device: torch.device):
        self.plan = plan
        self.seed = seed
        self.device = device
        self.pieces = plan.micro_batches(rank)
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Select the epoch, and its 0-based step `start` to begin with."""
        self.epoch = epoch
        self.start = start
        self._order = Order(self.seed, epoch, self.plan.num_examples)

    def __len__(self) -> int:
        return (self.plan.steps_per_epoch - self.start) * len(self.pieces)

    def __iter__(self) -> Iterator[torch.Tensor]:
        first = self.pieces[0][0]
        last = self.pieces[-1][1]
        sizes = [end - start for start, end in self.pieces]
        steps = max(1, BLOCK // (last - first))
        for begin in range(self.start, self.plan.steps_per_epoch, steps):
            batches = torch.arange(begin, min(begin + steps, self.plan.steps_per_epoch))
            positions = batches.unsqueeze(1) * self.plan.global_batch + torch.arange(first, last)
            for row in self._order(positions).to(self.device):
                yield from row.split(sizes) if len(sizes) > 1 else (row,)


class ShardSampler(IndexSampler):
    """One rank's contiguous shard of the evaluation data, in micro-batches.

    Shards are padded to equal length, so that every rank calls the model equally often. A padding
    row is example 0 at the end of a micro-batch, and is cut off before anything is counted.
    """

    def __init__(
        self,
        num_examples: int,
        micro_batch: int,
        rank: int,
        ranks: int,
        device: torch.device,
        is_fixed: bool = False,
    ):
        """Split `num_examples` over `ranks`.

        With `is_fixed`, every micro-batch has `micro_batch` rows; the last ones are padded.
        """
        length = -(-num_examples // ranks)
        self.leaves: Leaves | None = None
        if is_fixed:
            each = -(-length // micro_batch)
            length = each * micro_batch
            self.leaves = Leaves(rank * each, each, ranks * each)
        self.first = rank * -(-length // micro_batch)  # number of this rank's first micro-batch
        self._num_examples = num_examples
        self._micro_batch = micro_batch
        self._start = rank * length
        self._end = self._start + length
        self._device = device

    def __len__(self) -> int:
        return -(-(self._end - self._start) // self._micro_batch)

    @property
    def is_padding(self) -> bool:
        """Return True if this shard is padding only."""
        return self._start >= self._num_examples

    def rows(self) -> Iterator[int]:
        """Iterate over the number of real rows in each micro-batch."""
        for first, last in self._parts():
            yield min(last, self._num_examples) - min(first, self._num_examples)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for first, last in self._parts():
            positions = torch.arange(first, last)
            yield torch.where(positions < self._num_examples, positions, 0).to(self._device)

    def _parts(self) -> Iterator[tuple[int, int]]:
        for first in range(self._start, self._end, self._micro_batch):
            yield first, min(first + self._micro_batch, self._end)
