"""Sample order as a function: `index = order(seed, epoch, position)`, with random access and no stored permutation."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch.utils.data import Sampler

from trainer.data.randomness import key_of
from trainer.errors import ConfigError

_MASK = 0xFFFFFFFF
_ROUNDS = 8
BLOCK = 65536  # positions computed ahead at once: 17 to 62 ms, under 1 us each


class Order:
    """A keyed permutation of range(size): a Feistel network over Z_a x Z_b with cycle walking.

    After Black and Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002): a = ceil(sqrt(size)) and
    b = ceil(size / a), so that a * b exceeds the size by less than a and hardly a position is walked twice.
    """

    def __init__(self, seed: int, epoch: int, size: int):
        self.size = size
        self.a = math.isqrt(size - 1) + 1
        self.b = -(-size // self.a)
        self.keys = [key_of(seed, "order", epoch, r) & 0x7FFFFFFF for r in range(_ROUNDS)]

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Example indices at `positions`, an int64 tensor of any shape with values in range(size)."""
        found = self._encrypt(positions)
        while (outside := found >= self.size).any():
            found[outside] = self._encrypt(found[outside])
        return found

    def _encrypt(self, values: torch.Tensor) -> torch.Tensor:
        left, right = values // self.b, values % self.b
        for number, key in enumerate(self.keys):
            if number % 2:
                right = (right + _scramble(left, key)) % self.b
            else:
                left = (left + _scramble(right, key)) % self.a
        return left * self.b + right


def _scramble(values: torch.Tensor, key: int) -> torch.Tensor:
    """31 bits each, from MurmurHash3's finalizer; factors below 2**31 so that no product leaves int64."""
    mixed = (values ^ key) & _MASK
    mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B5) & _MASK
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & _MASK
    return (mixed ^ (mixed >> 16)) >> 1


@dataclass(frozen=True)
class BatchPlan:
    """The arithmetic of the global batch: who takes which rows, in how many micro-batches.

    Shares are contiguous, rank-major and differ by at most one row; so do the micro-batches of a share. Every rank
    makes the same number of them, none empty.
    """

    num_examples: int
    global_batch: int
    micro_batch: int
    ranks: int

    @property
    def accumulation(self) -> int:
        return math.ceil(math.ceil(self.global_batch / self.ranks) / self.micro_batch)

    @property
    def steps_per_epoch(self) -> int:
        return self.num_examples // self.global_batch

    def micro_batches(self, rank: int) -> list[tuple[int, int]]:
        """(start, end) within the global batch of each micro-batch of a rank."""
        start, end = _cut(0, self.global_batch, self.ranks)[rank]
        return _cut(start, end, self.accumulation)

    def sentence(self) -> str:
        sizes = sorted(
            {end - start for rank in range(self.ranks) for start, end in self.micro_batches(rank)}
        )
        rows = str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} or {sizes[-1]}"
        return (
            f"A global batch of {self.global_batch:,} is {counted(self.ranks, 'rank')} x "
            f"{counted(self.accumulation, 'micro-batch', 'es')} of {rows} rows each."
        )


def _cut(start: int, end: int, parts: int) -> list[tuple[int, int]]:
    size, larger = divmod(end - start, parts)
    edges = [start + part * size + min(part, larger) for part in range(parts + 1)]
    return list(pairwise(edges))


def counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def check_batch(global_batch: int, micro_batch: int | None, ranks: int) -> int:
    """The micro-batch size in force. Raises ConfigError when some rank would have to make an empty micro-batch."""
    if global_batch < ranks:
        raise ConfigError(
            f"data.global_batch={global_batch}: must be at least the {ranks} data-parallel ranks"
        )
    largest = -(-global_batch // ranks)
    micro_batch = min(micro_batch or largest, largest)
    accumulation = -(-largest // micro_batch)
    if global_batch // ranks < accumulation:
        why = f"some ranks have {global_batch // ranks} rows for {accumulation} micro-batches, so one would be empty"
        advice = f"use data.micro_batch={micro_batch + 1}, or a global batch that {ranks} divides"
        raise ConfigError(f"data.micro_batch={micro_batch}: {why}; {advice}")
    return micro_batch


class EpochSampler(Sampler[torch.Tensor]):
    """One rank's micro-batches of an epoch, in order, as index tensors on `device`.

    `set_epoch(epoch, start)` chooses the epoch and the step in it to begin with; the Trainer calls it.
    """

    def __init__(self, plan: BatchPlan, seed: int, rank: int, device: torch.device):
        self.plan, self.seed, self.device = plan, seed, device
        self.pieces = plan.micro_batches(rank)
        self.set_epoch(0)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        self.epoch, self.start = epoch, start
        self._order = Order(self.seed, epoch, self.plan.num_examples)

    def __len__(self) -> int:
        return (self.plan.steps_per_epoch - self.start) * len(self.pieces)

    def __iter__(self) -> Iterator[torch.Tensor]:
        first, last, sizes = (
            self.pieces[0][0],
            self.pieces[-1][1],
            [end - start for start, end in self.pieces],
        )
        steps = max(1, BLOCK // (last - first))
        for begin in range(self.start, self.plan.steps_per_epoch, steps):
            batches = torch.arange(begin, min(begin + steps, self.plan.steps_per_epoch))
            positions = batches.unsqueeze(1) * self.plan.global_batch + torch.arange(first, last)
            for row in self._order(positions).to(self.device):
                yield from row.split(sizes) if len(sizes) > 1 else (row,)


class FixedSampler(Sampler[torch.Tensor]):
    """Given index tensors, in order, as of an epoch."""

    def __init__(self, batches: Sequence[torch.Tensor], epoch: int = 0):
        self.batches, self.epoch = batches, epoch

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[torch.Tensor]:
        return iter(self.batches)


class ShardSampler(FixedSampler):
    """One rank's contiguous shard for evaluation, in micro-batches; `rows` says how many of each are real.

    Shards are padded to equal length so that every rank calls the model equally often; what pads stands at the end of
    a micro-batch, is example 0, and is cut off before anything is counted.
    """

    def __init__(
        self, num_examples: int, micro_batch: int, rank: int, ranks: int, device: torch.device
    ):
        length = -(-num_examples // ranks)
        positions = torch.arange(rank * length, (rank + 1) * length)
        is_real = positions < num_examples
        super().__init__(torch.where(is_real, positions, 0).to(device).split(micro_batch))
        self.rows = [int(part.sum()) for part in is_real.split(micro_batch)]
