"""Sample order as a function, `index = order(seed, epoch, position)`, without stored state."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch.utils.data import Sampler

from trainer.data.batch_plan import BatchPlan
from trainer.distributed import accelerator
from trainer.rng.philox import key_of

_MASK = 0xFFFFFFFF
_ROUNDS = 8
BLOCK = 8192  # positions computed at once, in 1.7 ms; 65,536 take 8 ms, in which a GPU would idle


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
            for row in accelerator.send(self._order(positions), self.device):
                yield from row.split(sizes) if len(sizes) > 1 else (row,)
