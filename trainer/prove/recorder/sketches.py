"""Sketches: a tensor as NUM sums in fp64, so that sums and means of tensors can be checked later.

Element i of the flattened tensor is added to sum i mod NUM with a sign that depends on i alone (a
count sketch: Charikar, Chen and Farach-Colton, 2002). A sketch is linear: the sketch of a mean over
ranks is the mean of the ranks' sketches, and the sketches of distinct shards add up to that of the
whole. The norm of a sketch estimates the norm of the tensor within 2 / sqrt(NUM).
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any

import torch

NUM = 16
PERIOD = 1 << 16  # of the table of signs; whole periods have a further sign each
CHUNK = 32 * PERIOD  # elements that are converted to fp64 at a time
SAME = 1e-12  # relative
_tables: dict[torch.device, torch.Tensor] = {}


def _mix(numbers: torch.Tensor) -> torch.Tensor:
    """Return a sign of 1 or -1 for each integer."""
    mixed = (numbers + 1) * 0x2545F4914F6CDD1D
    mixed = (mixed ^ (mixed >> 29)) * 0x369DEA0F31A53F85
    return ((mixed >> 41) & 1).double() * 2 - 1


def _signs(device: torch.device) -> torch.Tensor:
    if device not in _tables:
        _tables[device] = _mix(torch.arange(PERIOD, device=device))
    return _tables[device]


def _folded(values: torch.Tensor) -> torch.Tensor:
    """Return the NUM sums of signed values whose first has index 0 modulo NUM."""
    rest = -len(values) % NUM
    return torch.nn.functional.pad(values, (0, rest)).view(-1, NUM).sum(0)


def sketch(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sketch of a plain tensor, shape (NUM,), on its device."""
    flat = _plain(tensor).reshape(-1)
    signs = _signs(flat.device)
    total = torch.zeros(NUM, dtype=torch.float64, device=flat.device)
    for start in range(0, len(flat), CHUNK):
        piece = flat[start : start + CHUNK].double()
        num_whole = len(piece) // PERIOD
        if num_whole:
            whole = piece[: num_whole * PERIOD].view(num_whole, PERIOD)
            first = start // PERIOD
            blocks = _mix(torch.arange(first, first + num_whole, device=flat.device) + PERIOD)
            total += _folded((blocks[:, None] * whole).sum(0) * signs)
        rest = piece[num_whole * PERIOD :]
        if len(rest):
            block = _mix(torch.tensor([start // PERIOD + num_whole], device=flat.device) + PERIOD)
            total += _folded(rest * signs[: len(rest)] * block)
    return total


def sketch_part(local: torch.Tensor, shape: Sequence[int], offset: Sequence[int]) -> torch.Tensor:
    """Return what a part of a tensor of `shape` adds to its sketch; `offset` is its first index."""
    values = _plain(local)
    index = torch.zeros((), dtype=torch.int64, device=values.device)
    stride = 1
    for dim in reversed(range(len(shape))):
        own = torch.arange(values.shape[dim], device=values.device) + offset[dim]
        index = index + own.view(-1, *[1] * (len(shape) - 1 - dim)) * stride
        stride *= shape[dim]
    index = index.expand(values.shape).reshape(-1)
    blocks = _mix((index >> 16) + PERIOD)
    signed = values.reshape(-1).double() * _signs(values.device)[index & (PERIOD - 1)] * blocks
    total = torch.zeros(NUM, dtype=torch.float64, device=values.device)
    return total.index_add_(0, index & (NUM - 1), signed)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.cpu() if tensor.device.type == "mps" else tensor  # which has no fp64


def is_apart(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two sketches are not of the same values."""
    return bool((one - other).norm() > SAME * one.norm())


def encode(sketches: Sequence[torch.Tensor | None]) -> list[str | None]:
    """Return base64 of each sketch, with one copy from the device for all."""
    there = [each for each in sketches if each is not None]
    if not there:
        return [None] * len(sketches)
    rows = iter(torch.stack([each.to(there[0].device) for each in there]).cpu().numpy())
    texts: list[str | None] = []
    for each in sketches:
        row: Any = None if each is None else next(rows)
        texts.append(None if row is None else base64.b64encode(row.tobytes()).decode())
    return texts
