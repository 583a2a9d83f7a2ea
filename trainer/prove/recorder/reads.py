"""Reads: numbers that the script takes from tensors, as for a log, and if it averages any."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .log import LOG, quietly

SMALL = 8  # elements: a tensor of numbers for a log, and no gradient
COLLECTIVES = (
    *("all_reduce", "reduce", "all_gather", "gather"),
    *("all_gather_into_tensor", "all_gather_single"),  # its name from torch 2.13 on
)
READS: deque[float] = deque(maxlen=64)  # since the last step


def watch_reads() -> None:
    """Note each number from now on, and each collective of small tensors or objects."""
    for name in ("item", "__float__"):
        setattr(torch.Tensor, name, _noting(getattr(torch.Tensor, name), _note_number))
    for name in (*COLLECTIVES, "all_gather_object", "gather_object"):
        if hasattr(dist, name):
            setattr(dist, name, _noting(getattr(dist, name), _note_collective))


def _noting(original: Any, note: Callable[[Any, tuple[Any, ...]], None]) -> Any:
    @functools.wraps(original)
    def call(*arguments: Any, **options: Any) -> Any:
        result = original(*arguments, **options)
        note(result, (*arguments, *options.values()))
        return result

    return call


def _note_number(result: Any, _: tuple[Any, ...]) -> None:
    if isinstance(result, float):
        READS.append(result)


@quietly
def _note_collective(_: Any, given: tuple[Any, ...]) -> None:
    if all(each.numel() <= SMALL for each in given if isinstance(each, torch.Tensor)):
        LOG.add("averaged")
