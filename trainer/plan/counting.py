"""Groups of ranks that only count what they would send."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from trainer.distributed.world import RankGroup
from trainer.strategy.cost import reduced
from trainer.strategy.mesh import AXES, DATA, Mesh

ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER = KINDS = ("all-reduce", "all-gather", "reduce-scatter")
Note = Callable[[str, str, float], None]  # (axis, kind of collective, bytes that a rank sends)


def unnoticed(axis: str, kind: str, num_bytes: float) -> None:
    """Do nothing with what a group would send."""


@dataclass(frozen=True)
class CountedGroup(RankGroup):
    """A group without processes. Its collectives return tensors of the right size."""

    note: Note = field(default=unnoticed, repr=False, compare=False)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        self.note(self.name, ALL_REDUCE, reduced(tensor.nbytes, self.size))

    def all_gather_into(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        self.note(self.name, ALL_GATHER, whole.nbytes - part.nbytes)

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        self.note(self.name, REDUCE_SCATTER, whole.nbytes - part.nbytes)


class Traffic:
    """The groups of a rank, which report what they would send.

    `groups` has them by axis, and `data` for all ranks with rows of their own.
    """

    def __init__(self, mesh: Mesh):
        self.groups: dict[str, RankGroup] = {}
        self._note: Note = unnoticed
        for name, axes in {**{axis: (axis,) for axis in AXES}, "data": DATA}.items():
            ranks = mesh.members(*axes)
            number = ranks.index(mesh.rank)
            self.groups[name] = CountedGroup(ranks, number, None, name, note=self._send)

    @contextmanager
    def noting(self, note: Note) -> Iterator[None]:
        """Call `note` during the block with what the groups would send."""
        self._note = note
        try:
            yield
        finally:
            self._note = unnoticed

    def _send(self, axis: str, kind: str, num_bytes: float) -> None:
        self._note(axis, kind, num_bytes)
