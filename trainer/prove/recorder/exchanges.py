"""Exchanges of tensors between ranks: without one of gradients or weights, each trains alone.

A barrier sends nothing, and a loss for a log is small. DDP reduces in C++, which its wrapper tells.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from .wrapping import quietly

MOST_ELEMENTS_OF_A_METRIC = 1  # a number for a log, and no gradient
COLLECTIVES_OF_A_GROUP = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "allgather", "gather", "scatter"),
    *("_allgather_base", "allgather_coalesced", "allgather_into_tensor_coalesced"),
    *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
    *("alltoall", "alltoall_base", "send", "recv", "recv_anysource"),
)
FUNCTIONAL = ("all_reduce", "all_gather_tensor", "reduce_scatter_tensor", "all_to_all_single")
MOST_DEPTH_OF_ARGUMENTS = 3  # of lists of tensors


class Exchanges:
    """The number of elements that this rank has sent or received since its last step."""

    def __init__(self) -> None:
        self._num_elements = 0
        self._is_open = False

    def open(self) -> None:
        """Begin to count at the first call that trains: first weights may be sent before it."""
        if not self._is_open:
            self._is_open = True
            self._num_elements = 0

    def take(self) -> int:
        """Return the number, and begin to count again."""
        count, self._num_elements = self._num_elements, 0
        return count

    @quietly
    def note(self, arguments: Any) -> None:
        """Count the tensors of a collective, unless they are small."""
        count = _count(arguments, MOST_DEPTH_OF_ARGUMENTS)
        self._num_elements += count if count > MOST_ELEMENTS_OF_A_METRIC else 0

    def watch(self, owner: Any, name: str) -> None:
        """Count what a function is given from now on."""
        original: Callable[..., Any] | None = getattr(owner, name, None)
        if original is None:
            return

        @functools.wraps(original)
        def call(*arguments: Any, **options: Any) -> Any:
            if not torch.compiler.is_compiling():
                self.note((arguments, options))
            return original(*arguments, **options)

        setattr(owner, name, call)


def _count(value: Any, depth: int) -> int:
    """Return the number of elements of the largest tensor of a collective.

    It gets its inputs and outputs; the loss of a rank, gathered from many, is small.
    """
    if isinstance(value, torch.Tensor):
        return value.numel()
    if not depth:
        return 0
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return max((_count(each, depth - 1) for each in value), default=0)
    return 0


EXCHANGES = Exchanges()


def watch_exchanges() -> None:
    """Count every collective of Python code from now on."""
    if not dist.is_available():
        return
    for name in COLLECTIVES_OF_A_GROUP:
        EXCHANGES.watch(dist.ProcessGroup, name)
    functional = getattr(dist, "_functional_collectives", None)
    for name in FUNCTIONAL:
        EXCHANGES.watch(functional, name)
