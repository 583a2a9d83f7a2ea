"""Digests of examples: eight bytes for the content of one row, whatever its type."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

SIZE = 8  # bytes
MOST_DEPTH = 6
MARK = 16  # elements
MOST_MARKS = 8
IGNORED = -100  # label that torch's losses leave out


def digest(value: Any) -> str:
    """Return the digest of an example: tensors, arrays, numbers, strings and trees of them."""
    made = hashlib.blake2b(digest_size=SIZE)
    _add(made, value, MOST_DEPTH)
    return made.hexdigest()


def _add(made: Any, value: Any, depth: int) -> None:
    if isinstance(value, torch.Tensor):
        _add_tensor(made, value)
    elif isinstance(value, (np.ndarray, np.generic)):
        array = np.ascontiguousarray(value)
        made.update(f"{array.dtype}{array.shape}".encode())
        made.update(repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes())
    elif value is None or isinstance(value, (str, bytes, int, float, complex, bool)):
        made.update(f"{type(value).__name__}{value!r}".encode())
    elif depth == 0:
        made.update(type(value).__name__.encode())
    elif isinstance(value, Mapping):
        for key in value:
            made.update(repr(key).encode())
            _add(made, value[key], depth - 1)
    elif isinstance(value, (list, tuple)):
        made.update(f"[{len(value)}".encode())
        for each in value:
            _add(made, each, depth - 1)
    elif hasattr(value, "tobytes"):  # an image of PIL
        made.update(value.tobytes())
    else:
        made.update(type(value).__name__.encode())
        _add(made, getattr(value, "__dict__", None), depth - 1)


def _add_tensor(made: Any, value: torch.Tensor) -> None:
    plain = value.detach()
    if plain.layout != torch.strided:
        plain = plain.to_dense()
    made.update(f"{plain.dtype}{tuple(plain.shape)}".encode())
    made.update(plain.cpu().contiguous().flatten().view(torch.uint8).numpy().data)


def leaves(value: Any, depth: int = MOST_DEPTH) -> list[torch.Tensor]:
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
    found = []
    for leaf in leaves(value)[:MOST_MARKS]:
        if leaf.numel():
            rows = -(-MARK * len(leaf) // leaf.numel())
            first = leaf.detach()[:rows].reshape(-1)[:MARK]
            found.append(digest(first.double() if first.is_floating_point() else first))
    return found


def weigh(items: Any, batch: Any) -> dict[str, float]:
    """Return numbers by which a micro-batch could be weighted: its rows, sizes and labels."""
    weights: dict[str, float] = {}
    if isinstance(items, (list, tuple)):
        weights["rows"] = len(items)
        weights["elements"] = sum(leaf.numel() for item in items for leaf in _sized(item))
    else:
        first = leaves(batch)
        weights["rows"] = len(first[0]) if first else 1
    for number, leaf in enumerate(leaves(batch)):
        if leaf.dtype.is_floating_point or leaf.dim() < 2:
            continue
        for name, part in (("", leaf), ("shifted ", leaf[:, 1:])):
            num_labels = int((part != IGNORED).sum())
            weights[f"{name}padded {number}"] = part.numel()
            if num_labels < part.numel():
                weights[f"{name}labels {number}"] = num_labels
        weights[f"non-zero {number}"] = int((leaf != 0).sum())
        weights[f"shifted non-zero {number}"] = int((leaf[:, 1:] != 0).sum())
    return weights


def _sized(item: Any) -> list[torch.Tensor]:
    """Return the first field of an example that has a length."""
    found = leaves(item)[:1]
    if not found and isinstance(item, Mapping):
        lists = [v for v in item.values() if isinstance(v, (list, str))]
        found = [torch.empty(len(v), device="meta") for v in lists[:1]]
    return found
