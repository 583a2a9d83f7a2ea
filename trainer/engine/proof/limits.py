"""How far two computations of the same may be apart: by rounding only."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

NARROW = 0.2
LIMITS = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative; of narrower types NARROW
# Of a model in fp64 with layers that compute in fewer bits by hand: only their rounding is there.
BY_HAND = {torch.float64: 1e-9, torch.float32: 1e-5}
NARROW_BY_HAND = 0.05
LEAST_OF_ALL = 1e-12  # of all gradients: those that are zero but for rounding are that small
OF_RANKS = 1e-6  # machines may round differently
NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
_SUMS = (torch.ops.aten.sum, torch.ops.aten.mean)


def limit_of_type(dtype: torch.dtype) -> float:
    return LIMITS.get(dtype, NARROW)


class NarrowestDtype(TorchDispatchMode):
    """Finds the narrowest dtype of products of matrices, and of sums in 16 bits: `found`.

    Its rounding is that of the whole step: other operations give each row nearly the same bits in
    any layout, and a sum in fp32 in an fp64 model is mostly one to be logged. `limit` allows for
    any operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = torch.float64
        self.limit = 0.0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @property
    def name(self) -> str:
        return NAMES[self.found]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
                self.limit = max(self.limit, BY_HAND.get(leaf.dtype, NARROW_BY_HAND))
        packet = func._overloadpacket
        if packet in flop_registry or packet in _SUMS:
            for leaf in tree_leaves((args, out)):
                if isinstance(leaf, torch.Tensor) and leaf.dtype in NAMES:
                    is_narrower = leaf.dtype.itemsize < self.found.itemsize
                    if is_narrower and (packet in flop_registry or leaf.dtype.itemsize == 2):
                        self.found = leaf.dtype
        return out
