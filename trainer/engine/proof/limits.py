"""How far two computations of the same may be apart: by rounding only."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

NARROW = 0.2
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative; of narrower types NARROW
# Of a model in fp64 with layers that compute in fewer bits by hand: only their rounding is there.
BY_HAND = {torch.float64: 1e-9, torch.float32: 1e-5}
NARROW_BY_HAND = 0.05
LEAST_OF_ALL = 1e-12  # of all gradients: those that are zero but for rounding are that small
OF_RANKS = 1e-6  # machines may round differently


def limit_of_type(dtype: torch.dtype) -> float:
    return LIMITS.get(dtype, NARROW)


class NarrowTypes(TorchDispatchMode):
    """A context that finds the limit for what is computed in it, from its narrowest type.

    A model may compute a layer in bfloat16 itself, whatever the run's precision.
    """

    def __init__(self) -> None:
        super().__init__()
        self.limit = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self.limit = max(self.limit, BY_HAND.get(leaf.dtype, NARROW_BY_HAND))
        return out
