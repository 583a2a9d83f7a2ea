"""Digests and sketches of tensors: equal rows are found, and sums of parts compared.

Element i of the flattened tensor is added to sum i mod NUM with a sign that depends on i alone (a
count sketch: Charikar, Chen and Farach-Colton, 2002). A sketch is linear: the sketch of a mean over
ranks is the mean of the ranks' sketches, and the sketches of distinct shards add up to that of the
whole. The norm of a sketch estimates the norm of the tensor within 2 / sqrt(NUM).
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

NUM = 16
PERIOD = 1 << 16  # of the table of signs; whole periods have a further sign each
ELEMENTS_OF_A_CHUNK = 32 * PERIOD  # converted to fp64 at a time
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
    for start in range(0, len(flat), ELEMENTS_OF_A_CHUNK):
        piece = flat[start : start + ELEMENTS_OF_A_CHUNK].double()
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


SIZE = 8  # bytes
MOST_DEPTH_OF_AN_EXAMPLE = 6
ELEMENTS_OF_A_MARK = 16
MOST_MARKS = 8
IGNORED = -100  # label that torch's losses leave out


def digest(value: Any) -> str:
    """Return the digest of an example: tensors, arrays, numbers, strings and trees of them."""
    hasher = hashlib.blake2b(digest_size=SIZE)
    _add(hasher, value, MOST_DEPTH_OF_AN_EXAMPLE)
    return hasher.hexdigest()


def _add(hasher: Any, value: Any, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        _add_tensor(hasher, value)
    elif isinstance(value, (np.ndarray, np.generic)):
        array = np.ascontiguousarray(value)
        hasher.update(f"{array.dtype}{array.shape}".encode())
        hasher.update(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())
    elif value is None or isinstance(value, (str, bytes, int, float, complex, bool)):
        hasher.update(f"{type(value).__name__}{value!r}".encode())
    elif depth == 0:
        hasher.update(type(value).__name__.encode())
    elif isinstance(value, Mapping):
        for key in value:
            hasher.update(repr(key).encode())
            _add(hasher, value[key], depth - 1)
    elif isinstance(value, (list, tuple)):
        hasher.update(f"[{len(value)}".encode())
        for each in value:
            _add(hasher, each, depth - 1)
    elif hasattr(value, "tobytes"):  # an image of PIL
        hasher.update(value.tobytes())
    else:
        hasher.update(type(value).__name__.encode())
        _add(hasher, getattr(value, "__dict__", None), depth - 1)


def _add_tensor(hasher: Any, value: torch.Tensor) -> None:
    plain = value.detach()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    hasher.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
    hasher.update(plain.cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def leaves(value: Any, depth: int = MOST_DEPTH_OF_AN_EXAMPLE) -> list[torch.Tensor]:
    """Return the tensors of a tree with at least one dimension."""
    if isinstance(value, torch.Tensor):
        return [value] if value.dim() else []
    if isinstance(value, np.ndarray) and value.ndim and value.dtype.kind in "biuf":
        return [torch.from_numpy(value)]
    if depth and isinstance(value, Mapping):
        return [leaf for key in value for leaf in leaves(value[key], depth - 1)]
    if depth and isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in leaves(each, depth - 1)]
    return []


def split(batch: Any) -> list[str]:
    """Return the digest of each row of a batch: tensors are cut along their first dimension."""
    tensors = leaves(batch)
    if not tensors:
        return [digest(batch)]
    rows = len(tensors[0])
    tensors = [each for each in tensors if len(each) == rows]
    return [digest([each[row] for each in tensors]) for row in range(rows)]


def marks(value: Any) -> list[str]:
    """Return a digest of the first elements of each tensor, by which a batch is known again."""
    digests = []
    for leaf in leaves(value)[:MOST_MARKS]:
        if leaf.numel():
            rows = -(-ELEMENTS_OF_A_MARK * len(leaf) // leaf.numel())
            first = leaf.detach()[:rows].reshape(-1)[:ELEMENTS_OF_A_MARK]
            digests.append(digest(first.double() if first.is_floating_point() else first))
    return digests


def weigh(items: Any, batch: Any) -> dict[str, float]:
    """Return numbers by which a micro-batch could be weighted: its rows, sizes and labels."""
    weights: dict[str, float] = {}
    if isinstance(items, (list, tuple)):
        weights["rows"] = len(items)
        weights["elements"] = sum(leaf.numel() for item in items for leaf in _sized(item))
    else:
        first = leaves(batch)
        weights["rows"] = len(first[0]) if first else 1
    for leaf_index, leaf in enumerate(leaves(batch)):
        if leaf.dtype.is_floating_point or leaf.dim() < 2:
            continue
        for name, part in (("", leaf), ("shifted ", leaf[:, 1:])):
            num_labels = int((part != IGNORED).sum())
            weights[f"{name}padded {leaf_index}"] = part.numel()
            if num_labels < part.numel():
                weights[f"{name}labels {leaf_index}"] = num_labels
        weights[f"non-zero {leaf_index}"] = int((leaf != 0).sum())
        weights[f"shifted non-zero {leaf_index}"] = int((leaf[:, 1:] != 0).sum())
    return weights


def _sized(item: Any) -> list[torch.Tensor]:
    """Return the first field of an example that has a length."""
    fields = leaves(item)[:1]
    if not fields and isinstance(item, Mapping):
        lists = [v for v in item.values() if isinstance(v, (list, str))]
        fields = [torch.empty(len(v), device="meta") for v in lists[:1]]
    return fields
