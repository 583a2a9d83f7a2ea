"""The ledger: a hash chain over the examples used in every step, saved in each checkpoint.

The digest of a step is a sum over its pairs (position in the global batch, example index), so the
ranks' parts add up to the same number in any layout. The chain hashes the digests in step order.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from trainer.data.batch_plan import BatchPlan
from trainer.distributed.group import Group

CLOSE_EVERY = 4096  # steps, whose indices stay in memory until `close`


class Ledger:
    """Hash chain over the steps of a run, after `step` steps.

    Every rank calls `note` at each step, and `close` before it reads `chain`.
    """

    def __init__(self, plan: BatchPlan, rank: int, is_counted: bool = True):
        """`is_counted` is True on one of the ranks that share the rows of `rank`."""
        self.step = 0
        self.chain = ""
        self._is_counted = is_counted
        self._start = plan.micro_batches(rank)[0][0]
        self._pending: list[Sequence[torch.Tensor]] = []

    def restore(self, step: int, chain: str) -> None:
        """Continue after `step` with the chain from a checkpoint."""
        self.step = step
        self.chain = chain

    def note(self, indices: Sequence[torch.Tensor], group: Group) -> None:
        """Record this rank's example indices of the next step, one tensor for each micro-batch.

        Collective at every 4096th step, when it calls `close`.
        """
        self._pending.append(indices)
        if len(self._pending) == CLOSE_EVERY:
            self.close(group)

    def close(self, group: Group) -> None:
        """Add the recorded steps to the chain. Collective: every rank must call it."""
        if not self._pending:
            return
        indices = torch.cat([part for step in self._pending for part in step])
        parts = digests(indices.view(len(self._pending), -1), self._start)
        if not self._is_counted:
            parts = torch.zeros_like(parts)
        for digest in group.total(parts).tolist():
            self.chain = extend(self.chain, self.step, digest)
            self.step += 1
        self._pending.clear()


def digests(indices: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Return (steps,) int64 digests of example indices (steps, rows).

    `start` is the position of the first row in the global batch. Integer arithmetic modulo 2**64
    with splitmix64's finalizer (Steele et al., OOPSLA 2014) gives the same bits on every device.
    """
    positions = torch.arange(start, start + indices.shape[1], device=indices.device)
    mixed = indices * 0x1E3779B97F4A7C15 + positions * 0x3F58476D1CE4E5B9 + 1
    mixed = (mixed ^ ((mixed >> 30) & 0x3FFFFFFFF)) * 0x3F58476D1CE4E5B9
    mixed = (mixed ^ ((mixed >> 27) & 0x1FFFFFFFFF)) * 0x14D049BB133111EB
    return (mixed ^ ((mixed >> 31) & 0x1FFFFFFFF)).sum(1)


def extend(chain: str, step: int, digest: int) -> str:
    return hashlib.blake2b(f"{chain}/{step}/{digest}".encode(), digest_size=16).hexdigest()
