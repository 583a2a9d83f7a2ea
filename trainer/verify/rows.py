"""Values of single examples, to show in what they differ between ranks."""

from __future__ import annotations

import math
from operator import itemgetter
from typing import Any

import torch
from torch.utils._pytree import keystr, tree_flatten_with_path

OF_A_PROBE = 4096  # elements of each tensor that are kept
OF_A_STEP = 64  # of each of its examples

Row = dict[str, list[float]]  # of one example: its elements by the tensor's name


def rows_of(inputs: Any, targets: Any, most: int) -> list[Row]:
    """Return the first elements of each example, at most `most` of each tensor."""
    named = [
        (root + keystr(path), leaf)
        for root, tree in (("inputs", inputs), ("targets", targets))
        for path, leaf in tree_flatten_with_path(tree)[0]
        if isinstance(leaf, torch.Tensor) and leaf.dim()
    ]
    columns = {
        name: _real(leaf.detach()).reshape(len(leaf), -1)[:, :most].cpu().double().tolist()
        for name, leaf in named
        if len(leaf) == len(named[0][1])
    }
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _real(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def describe_difference(one: Row, other: Row, place: str) -> str:
    """Return the two values that differ most, `other` of them there; empty if all are equal."""
    for name in one.keys() & other.keys():
        sizes = len(one[name]), len(other[name])
        if sizes[0] != sizes[1]:
            return f"{name} has {sizes[1]} elements there and {sizes[0]} on {place}"
    apart = [
        (_distance(a, b), name, number, a, b)
        for name, values in one.items()
        for number, (a, b) in enumerate(zip(values, other.get(name, []), strict=False))
    ]
    size, name, number, a, b = max(apart, key=itemgetter(0), default=(0.0, "", 0, 0.0, 0.0))
    if not size:
        return ""
    return f"{name}[{number}] is {b:.9g} there and {a:.9g} on {place}, {size:.0e} apart"


def _distance(a: float, b: float) -> float:
    """Return how far two values are apart; two NaN are equal."""
    if math.isnan(a) or math.isnan(b) or a == b:
        return 0.0 if a == b or (math.isnan(a) and math.isnan(b)) else math.inf
    return abs(a - b)
