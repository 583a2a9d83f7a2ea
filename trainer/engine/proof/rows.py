"""The rows of a proof: those of the run in every layout, whole and cut into micro-batches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trainer.data.batches import Batches
from trainer.data.preparation import MicroBatch
from trainer.engine.proof.limits import limit_of_type
from trainer.rng.philox import generators_kept
from trainer.strategy.mesh_model.mesh_proof import apart

Cuts = tuple[int, ...]  # row numbers, of which neighbours bound a micro-batch

LEAST = 8  # rows, times run.norm_rows
MOST = 256  # of a data set on the device
MOST_READ = 32  # of one whose examples are read one by one
FEW = ((0, 2, 4), (0, 1, 2))
FP64_FLOPS = 2e10  # more of them are computed in fewer bits, on fewer rows
CHEAP_FLOPS = 2e9  # a part of a second in fp64 on a core: as many rows as cost that are tried
CHEAP_BYTES = 2**26  # of inputs and targets


@dataclass(frozen=True)
class Costs:
    """Costs of a row, which is one of the run's or `run.norm_rows` of them, on any rank."""

    flops: float  # of a forward pass, divided by how much faster an accelerator is
    size: int  # bytes of inputs and targets
    is_resident: bool


def count_rows_to_try(costs: Costs, global_batch: int) -> int:
    """Return how many rows are tried: up to the global batch, as many as cost little.

    It depends on the run alone, so a proof tries the same rows in every layout.
    """
    most = min(MOST if costs.is_resident else MOST_READ, global_batch)
    most = min(most, int(CHEAP_FLOPS / max(costs.flops, 1)), CHEAP_BYTES // max(costs.size, 1))
    return max(LEAST, most)


def list_cuts(count: int, flops: float) -> list[Cuts]:
    """Return the cuts to try in turn, from the most rows to the fewest that are needed.

    Two parts are of one size: a model may keep state as long as that stays. `flops` are a row's.
    """
    if 2 * LEAST * flops >= FP64_FLOPS:
        return [(0, 1, 3), (0, 2, 4)] if 6 * flops <= FP64_FLOPS else [(0, 1, 2), (0, 2, 4)]
    large = 3 * count // 8
    small = (2 * large + 2,) if count >= 2 * LEAST else ()
    return [(0, large, 2 * large, *small, count), *FEW[:1]]


@dataclass(frozen=True)
class ProofRows:
    """Rows of the run, prepared together.

    `prepared` has the rows between neighbouring `cuts`, prepared alone, if they have other sizes or
    values then: it is the values if `is_mixed`. Without `has_rows` some tensor has no axis of
    rows, such as the nodes of graphs.
    """

    batch: MicroBatch
    indices: torch.Tensor
    cuts: Sequence[Cuts]
    prepared: Mapping[tuple[int, int], MicroBatch]
    is_mixed: bool
    has_rows: bool


class RowReader:
    """Reads rows of the run, the same on every rank."""

    def __init__(self, batches: Batches, devices: Sequence[torch.device], unit: int):
        self._batches = batches
        self._devices = devices
        self._unit = unit

    def read(self, first: int, cuts: Sequence[Cuts]) -> ProofRows:
        """Read the rows of the largest of these cuts, from the `first` one of the run."""
        scaled: list[Cuts] = [tuple(self._unit * number for number in each) for each in cuts]
        most = max(scaled, key=max)
        indices = self._batches.first_examples(first, most[-1])
        whole = self.prepare(indices)
        bounds = list(pairwise(most))
        parts = [self.prepare(indices[slice(*each)]) for each in bounds]
        is_mixed = not is_prepared_alike(whole, parts)
        has_rows = _has_rows(whole, len(indices))
        prepared: dict[tuple[int, int], MicroBatch] = {}
        if is_mixed or has_other_sizes(whole, parts) or not has_rows:
            prepared = dict(zip(bounds, parts, strict=True))
            wanted = {each for cut in scaled for each in (*pairwise(cut), (0, cut[-1]))}
            for each in wanted - prepared.keys():
                prepared[each] = self.prepare(indices[slice(*each)])
        return ProofRows(whole, indices, scaled, prepared, is_mixed, has_rows)

    def prepare(self, indices: torch.Tensor) -> MicroBatch:
        """Prepare these examples as a micro-batch, with the generators as they were."""
        with generators_kept(self._devices):
            return next(iter(self._batches.of_examples(indices)))


def is_prepared_alike(whole: Any, parts: Sequence[Any]) -> bool:
    """Return False if rows of a micro-batch differ from the same rows prepared in parts.

    Rows of other sizes, as those that are padded to the longest, are not compared.
    """
    every = zip(*map(tree_leaves, (whole, *parts)), strict=False)
    for one, *others in every:
        if not isinstance(one, torch.Tensor) or not one.dim():
            continue
        if all(other.dim() and other.shape[1:] == one.shape[1:] for other in others):
            joined = torch.cat(others)
            limit = limit_of_type(one.dtype) if one.is_floating_point() else 0.0
            if joined.shape == one.shape and not apart(joined, one) <= limit:
                return False
    return True


def has_other_sizes(whole: Any, parts: Sequence[Any]) -> bool:
    """Return True if rows are of other sizes in parts, such as padded to the longest one."""
    sizes = [
        [leaf.shape[1:] for leaf in tree_leaves(each) if isinstance(leaf, torch.Tensor)]
        for each in (whole, *parts)
    ]
    return any(each != sizes[0] for each in sizes[1:])


def _has_rows(batch: Any, rows: int) -> bool:
    """Return True if each tensor with an axis has one of the rows, unlike nodes of graphs."""
    leaves = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
    return all(len(leaf) == rows for leaf in leaves if leaf.dim())
