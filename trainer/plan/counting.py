"""Groups of ranks that only count what they would send."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from trainer.distributed.world import RankGroup
from trainer.strategy.cost import reduced
from trainer.strategy.mesh import AXES, DATA, Mesh

ALL_REDUCE, ALL_GATHER = "all-reduce", "all-gather"
Note = Callable[[str, str, float], None]  # (axis, kind of collective, bytes that a rank sends)


def unnoticed(axis: str, kind: str, num_bytes: float) -> None:
    """Do nothing with what a group would send."""


@dataclass(frozen=True)
class CountedGroup(RankGroup):
    """A group without processes. Its collectives return tensors of the right size."""

    note: Note = field(default=unnoticed, repr=False, compare=False)

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        self.note(self.name, ALL_REDUCE, reduced(tensor.nbytes, self.size))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.note(self.name, ALL_GATHER, (self.size - 1) * tensor.nbytes)
        return [torch.empty_like(tensor) for _ in self.ranks]


def count_groups(mesh: Mesh, note: Note) -> dict[str, RankGroup]:
    """Return the groups of a rank by axis, and `data` for all ranks with rows of their own."""
    found: dict[str, RankGroup] = {}
    for name, axes in {**{axis: (axis,) for axis in AXES}, "data": DATA}.items():
        ranks = mesh.members(*axes)
        found[name] = CountedGroup(ranks, ranks.index(mesh.rank), None, name, note=note)
    return found
