"""Ranks compared: the same rows must have the same tensors, loss and gradients on every rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from trainer.engine.proof.passes import Passed

CLOSE = 1e-5  # relative, of digests of rows
RESULTS = 4  # numbers of `digest_pass`


def digest_rows(tree: Any) -> list[float]:
    """Return a number per example that changes if its tensors change.

    It is the same on every device up to rounding. Empty if no tensor has a batch axis.
    """
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    leaves = [leaf for leaf in leaves if len(leaf) == len(leaves[0])]
    if not leaves:
        return []
    total = torch.zeros(len(leaves[0]), dtype=torch.float64, device=leaves[0].device)
    for leaf in leaves:
        flat = leaf.detach().reshape(len(leaf), -1).double()
        places = torch.arange(1, flat.shape[1] + 1, device=flat.device, dtype=torch.float64)
        total = total + (flat * torch.cos(places)).sum(1) + 3 * flat.sum(1)
    return total.tolist()


def digest_pass(passed: Passed) -> list[float]:
    """Return numbers that change with the sums or the gradients of a pass."""
    norms = [float(g.double().norm()) for g in passed.gradients.values() if g is not None]
    return [*passed.sums.tolist(), sum(norm * norm for norm in norms) ** 0.5]


def padded(values: Sequence[float], count: int) -> list[float]:
    """Return `count` finite numbers that begin with these."""
    finite = [value if math.isfinite(value) else 0.0 for value in values]
    return (finite + [0.0] * count)[:count]


def is_alike(most: Sequence[float], least: Sequence[float]) -> bool:
    """Return True if the ranks' largest facts equal the smallest, which have the other sign."""
    pairs = zip(most, least, strict=True)
    return all(abs(one + other) <= 1e-9 * (1e-30 + abs(one)) for one, other in pairs)


def find_rank(facts: Sequence[Sequence[float]], limit: float) -> tuple[int, int] | None:
    """Return the first rank with other facts than rank 0, and the number of the fact."""
    for rank, own in enumerate(facts):
        for number, (one, other) in enumerate(zip(facts[0], own, strict=False)):
            if not abs(one - other) <= limit * (1e-30 + abs(one)) and one == one:
                return rank, number
    return None


def explain_rows(rank: int, index: int) -> str:
    why = "the data set, or augment, depends on the rank or draws unseeded random numbers"
    return f"example {index} differs on rank {rank}: {why}; draw from augment's Random argument"


def explain_kept(rank: int, names: Sequence[str]) -> str:
    has = f"rank {rank} has other values of {', '.join(names[:3])}"
    why = "on which its updates depend: they are made of its own rows, or of the rank"
    advice = "make them of the rows of all ranks, in loss with gather_rows or by torch.distributed"
    return f"{has}, {why}; {advice}"


def explain_results(rank: int) -> str:
    why = "the same rows have another loss or gradient there: they depend on the rank"
    advice = "leave self.world and the order of sets out of model and loss"
    return f"model or loss differ on rank {rank}: {why}; {advice}"
