"""Sample order as a function, `index = order(seed, epoch, position)`, without stored state."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch.utils.data import Sampler

from trainer.data.batch_plan import BatchPlan
from trainer.distributed import accelerator
from trainer.rng.permutation import Permutation

if TYPE_CHECKING:
    from trainer.data.sampling.base import Sampling

BLOCK = 8192  # positions computed at once, in 1.7 ms; 65,536 take 8 ms, in which a GPU would idle


class Order(Permutation):
    """The order of a plain epoch: a keyed permutation of range(size)."""

    def __init__(self, seed: int, epoch: int, size: int):
        super().__init__(size, seed, "order", epoch)


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
            for row in accelerator.send(self.order(positions), self.device):
                yield from row.split(sizes) if len(sizes) > 1 else (row,)
