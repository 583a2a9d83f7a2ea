"""torch's flags of the whole process, and MKL's vector functions, resolved early."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

FUNCTIONS = (
    torch.acos,
    torch.asin,
    torch.atan,
    torch.cos,
    torch.erf,
    torch.erfc,
    torch.erfinv,
    torch.exp,
    torch.log,
    torch.log10,
    torch.log2,
    torch.sin,
    torch.sqrt,
    torch.tan,
    torch.tanh,
    torch.trunc,
)  # which torch computes by MKL on an x86 CPU


def resolve_vector_functions() -> None:
    """Call each function once, on this thread: 1 to 3 ms.

    MKL chooses the kernel of a function at its first call in a process. If several threads make
    that call together, MKL 2024.2, which torch's wheels contain, may give one of them a kernel with
    11 correct bits for all its elements (pytorch#188792). 3 of 4,000 processes whose first
    `torch.cos` ran on 8 threads were wrong by 1.5e-4; after a call on one thread, none.
    """
    for dtype in (torch.float32, torch.float64):
        values = torch.full((8,), 0.5, dtype=dtype, device="cpu")
        for function in FUNCTIONS:
            function(values)


@contextmanager
def torch_flags_kept() -> Iterator[None]:
    """Give the flags back at the end of the block, so that a second run does not inherit them."""
    threads = torch.get_num_threads()
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    allowed = (matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.use_deterministic_algorithms(is_deterministic, warn_only=warns_only)
        matmul.allow_tf32, cudnn.allow_tf32, cudnn.benchmark = allowed
