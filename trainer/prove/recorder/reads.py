"""Reads: numbers that the script takes from tensors, as for a log, and if it averages any."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from .log import LOG
from .wrapping import Given, watch

SMALL = 8  # elements: a tensor of numbers for a log, and no gradient
COLLECTIVES = (
    *("all_reduce", "reduce", "all_gather", "gather"),
    *("all_gather_into_tensor", "all_gather_single"),  # its name from torch 2.13 on
)
READS: deque[float] = deque(maxlen=64)  # since the last step


def watch_reads() -> None:
    """Note each number from now on, and each collective of small tensors or objects."""
    for name in ("item", "__float__"):
        watch(torch.Tensor, name, after=_note_number)
    for name in (*COLLECTIVES, "all_gather_object", "gather_object"):
        if hasattr(dist, name):
            watch(dist, name, after=_note_collective)


def _note_number(_: Given, result: Any) -> None:
    if isinstance(result, float):
        READS.append(result)


def _note_collective(given: Given, _: Any) -> None:
    if all(each.numel() <= SMALL for each in given.values() if isinstance(each, torch.Tensor)):
        LOG.add("averaged")
