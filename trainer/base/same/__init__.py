"""Comparison of results: distances between numbers, the share of rounding, and the odd rank.

One rule: a number that is not finite is infinitely far from a finite one, and a number from a
missing one. Two that are not finite are equal: another order of summation may turn infinity into
NaN, and files have null for both. Distances are relative to the first value; two zeros are 0 apart.
Where another rule holds, the code says so.

It needs no torch, so that `prove` can use it; distance.py compares tensors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

# Sizes by which is divided, at least: of a number, and of a tensor or its digest.
TINY = 1e-300
SMALL = 1e-30


def gap(one: float | None, other: float | None) -> float:
    """Return the absolute difference of two numbers; None for one that is not there."""
    if one is None or other is None:
        return 0.0 if one is other else math.inf
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf if math.isfinite(one) or math.isfinite(other) else 0.0
    return abs(one - other)


def relative(one: float | None, other: float | None, least: float = TINY) -> float:
    """Return the difference relative to the first number, which counts as `least` at least."""
    apart = gap(one, other)
    return apart / max(abs(one), least) if one is not None and 0 < apart < math.inf else apart


class Limits(NamedTuple):
    """The relative distance up to which a difference is rounding, by where it is computed."""

    fp64: float
    fp32: float
    narrower: float  # of anything in 16 bits, mixed precision included

    def of(self, kind: object) -> float:
        """Return the limit of a precision, by its name, or of a dtype of torch."""
        if str(kind) in ("fp64", "torch.float64"):
            return self.fp64
        return self.fp32 if str(kind) in ("fp32", "torch.float32") else self.narrower


FP64 = 1e-9  # of the same rows, in another order of summation
ROWS = Limits(FP64, 1e-3, 0.2)  # of passes over the same rows in other micro-batches
# Of a model in fp64 with layers that compute in fewer bits by hand: only their rounding is there.
BY_HAND = Limits(FP64, 1e-5, 0.05)
DIVIDED = Limits(FP64, 1e-3, 0.1)  # of a model that a mesh divides, and the whole one
LOOSER = 3  # times DIVIDED, for gradients
RUNS = Limits(1e-6, 1e-5, 1e-2)  # of losses and norms of weights of two runs
OF_RANKS = 1e-6  # of the same pass: machines may round differently
CLOSE = 1e-5  # of digests of rows, which devices round differently


def find_odd_rank(facts: Sequence[Sequence[float]], limit: float) -> tuple[int, int] | None:
    """Return the first rank with other facts than rank 0, and the number of the fact.

    Where rank 0 has NaN, as the digest of data with NaN is, nothing is compared.
    """
    for rank, own in enumerate(facts):
        for number, (one, other) in enumerate(zip(facts[0], own, strict=False)):
            if not math.isnan(one) and relative(one, other, SMALL) > limit:
                return rank, number
    return None
