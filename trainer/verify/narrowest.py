"""The narrowest dtype in which a step sums: its rounding is that of the whole step."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

NAMES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
}
_SUMS = (torch.ops.aten.sum, torch.ops.aten.mean)


class NarrowestDtype(TorchDispatchMode):
    """Finds the narrowest dtype of products of matrices, and of sums in 16 bits.

    Other operations give each row the same bits in any layout, and a sum in fp32 in an fp64 model
    is mostly one to be logged.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found = torch.float64

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    @property
    def name(self) -> str:
        return NAMES[self.found]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in flop_registry or packet in _SUMS:
            for leaf in tree_leaves((args, out)):
                if isinstance(leaf, torch.Tensor) and leaf.dtype in NAMES:
                    is_narrower = leaf.dtype.itemsize < self.found.itemsize
                    if is_narrower and (packet in flop_registry or leaf.dtype.itemsize == 2):
                        self.found = leaf.dtype
        return out
