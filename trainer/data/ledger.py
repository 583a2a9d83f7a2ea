"""The ledger: a hash chain over the examples that the steps of a run really took, held in every checkpoint.

A step's digest is a sum over its (position in the global batch, example index) pairs, so the ranks' parts add up to the
same number however the batch is laid out; the chain goes over the steps in order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from trainer.data.order import BatchPlan, Order
from trainer.distributed.group import Group

CLOSE_EVERY = 4096  # steps whose indices are kept until then


class Ledger:
    """`note` each step as its batches are taken; `close` when the chain is wanted. Every rank does both."""

    def __init__(self, plan: BatchPlan, rank: int):
        self.step = 0
        self.chain = ""
        self._start = plan.micro_batches(rank)[0][0]
        self._pending: list[Sequence[torch.Tensor]] = []

    def restore(self, step: int, chain: str) -> None:
        """Continue after `step`, whose chain a checkpoint holds."""
        self.step = step
        self.chain = chain

    def note(self, indices: Sequence[torch.Tensor], group: Group) -> None:
        """This rank's example indices of the next step, a tensor for each micro-batch."""
        self._pending.append(indices)
        if len(self._pending) == CLOSE_EVERY:
            self.close(group)

    def close(self, group: Group) -> None:
        """Enter the steps noted so far. A collective."""
        if not self._pending:
            return
        table = torch.cat([part for step in self._pending for part in step]).view(
            len(self._pending), -1
        )
        parts = group.gather(digests(table, self._start))
        for digest in sum(part.cpu() for part in parts).tolist():  # type: ignore[union-attr]
            self.chain = extend(self.chain, self.step, digest)
            self.step += 1
        self._pending.clear()


def digests(indices: torch.Tensor, start: int = 0) -> torch.Tensor:
    """(steps,) int64 from example indices (steps, rows), the rows at `start` and after in the global batch.

    Integer arithmetic modulo 2**64, with splitmix64's finalizer (Steele et al., OOPSLA 2014): equal on every device.
    """
    positions = torch.arange(start, start + indices.shape[1], device=indices.device)
    mixed = indices * 0x1E3779B97F4A7C15 + positions * 0x3F58476D1CE4E5B9 + 1
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * 0x14D049BB133111EB
    return (mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)).sum(1)


def extend(chain: str, step: int, digest: int) -> str:
    return hashlib.blake2b(f"{chain}/{step}/{digest}".encode(), digest_size=16).hexdigest()


def expected(
    seed: int,
    num_examples: int,
    global_batch: int,
    num_steps: int,
    replaced: Mapping[str, int] | None = None,
) -> Iterator[tuple[int, str, torch.Tensor]]:
    """(step, chain after it, its example indices) for each step of an undisturbed run.

    `replaced` holds "<epoch>/<index>" of examples that could not be read, and what was taken.
    """
    chain, per_epoch = "", num_examples // global_batch
    for first in range(0, num_steps, per_epoch):
        steps, epoch, taken = (
            min(per_epoch, num_steps - first),
            first // per_epoch,
            torch.arange(num_examples),
        )
        for place, other in (replaced or {}).items():
            of, index = map(int, place.split("/"))
            taken[index] = other if of == epoch else taken[index]
        order = taken[Order(seed, epoch, num_examples)(torch.arange(steps * global_batch))].view(
            steps, -1
        )
        for number, digest in enumerate(digests(order).tolist()):
            chain = extend(chain, first + number, digest)
            yield first + number + 1, chain, order[number]
