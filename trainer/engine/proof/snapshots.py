"""Values that a task and a model keep: after a step, to find which of two differ, and at first."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import nn

from trainer.engine.proof.holders import (
    MOST_BYTES,
    MOST_ITEMS,
    OF_A_MODULE,
    OF_A_TASK,
    of_model,
    of_task,
)
from trainer.strategy.mesh_model.mesh_proof import apart

DEPTH = 3  # of containers, and of attributes of attributes
ABSENT = object()
Snapshot = dict[str, Any]  # by the name of what holds the value


def take_snapshot(model: nn.Module, task: Any) -> Snapshot:
    """Return copies of the attributes of a task and a model, and of the model's buffers."""
    return {name: copy_plain(value, DEPTH) for name, value in _named(model, task)}


def _named(model: nn.Module, task: Any) -> Iterator[tuple[str, Any]]:
    yield from of_model(model)
    yield from of_task(task)
    yield from model.named_buffers()


def find_different(one: Snapshot, other: Snapshot, limit: float) -> list[str]:
    """Return the names whose values differ by more than rounding."""
    return [name for name in one if name in other and _differ(one[name], other[name], limit)]


def digest_snapshot(snapshot: Snapshot) -> dict[str, float]:
    """Return a number for each name, the same for equal values."""
    return {name: _number(value) for name, value in snapshot.items()}


def find_unequal(ranks: Sequence[Mapping[str, float]], rank: int) -> list[str]:
    """Return the names whose values on a rank differ from those on rank 0, from their digests."""
    return [name for name, value in ranks[0].items() if ranks[rank].get(name) != value]


def copy_plain(value: Any, depth: int) -> Any:
    """Return a plain copy of a value; None for what cannot be compared."""
    if isinstance(value, torch.Tensor):
        is_readable = not value.is_meta and value.layout is torch.strided
        return value.detach().clone() if is_readable and value.nbytes <= MOST_BYTES else None
    if isinstance(value, numpy.ndarray):
        is_number = value.dtype.kind in "biuf" and value.nbytes <= MOST_BYTES
        return torch.from_numpy(numpy.array(value)) if is_number else None
    if isinstance(value, (bool, int, float, str)):
        return value
    if not depth:
        return None
    if isinstance(value, nn.Module):
        return {n: copy_plain(t, 1) for n, t in value.state_dict(keep_vars=True).items()}
    if isinstance(value, (list, tuple, deque)) and len(value) <= MOST_ITEMS:
        return [copy_plain(item, depth - 1) for item in value]
    if isinstance(value, Mapping) and len(value) <= MOST_ITEMS:
        return {str(key): copy_plain(item, depth - 1) for key, item in value.items()}
    is_own = isinstance(getattr(value, "__dict__", None), dict)
    if is_own and not type(value).__module__.startswith(("torch", "numpy", "trainer.")):
        return {key: copy_plain(item, depth - 1) for key, item in vars(value).items()}
    return None


def _differ(one: Any, other: Any, limit: float) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return not apart(one, other) <= limit
    if isinstance(one, list) and isinstance(other, list):
        pairs = zip(one, other, strict=False)
        return len(one) != len(other) or any(_differ(*pair, limit) for pair in pairs)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() != other.keys() or any(_differ(one[k], other[k], limit) for k in one)
    if isinstance(one, float) and isinstance(other, float):
        return not math.isclose(one, other, rel_tol=limit) and not (one != one and other != other)
    return type(one) is not type(other) or bool(one != other)


def _number(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        flat = value.detach().double().flatten().nan_to_num()
        places = torch.arange(1, len(flat) + 1, device=flat.device, dtype=torch.float64)
        return float((flat * torch.cos(places)).sum()) + len(flat)
    if isinstance(value, list):
        return sum((n + 1) * _number(item) for n, item in enumerate(value)) + len(value)
    if isinstance(value, dict):
        return sum((n + 1) * _number(item) for n, item in enumerate(value.values())) + len(value)
    if isinstance(value, (int, float)):
        return float(value) if math.isfinite(value) else -1.0
    return float(len(value)) if isinstance(value, str) else 0.0


class FirstValues:
    """Attributes of a task and of the modules of a model, and buffers, as a run begins with them.

    Their names are those of `PythonState`, and of buffers.
    """

    def __init__(self, task: Any, model: nn.Module):
        self._task = task
        self._values = {
            name: copy.deepcopy(values[key])
            for name, values, key in self._places(model)
            if _is_plain(values[key], DEPTH)
        }
        self._known = {name for name, _, _ in self._places(model)}

    def knows(self, name: str) -> bool:
        """Return True if `reset` can give this its first value, or remove it."""
        return name in self._values or name not in self._known

    def reset(self, model: nn.Module, names: set[str]) -> None:
        """Give what has these names its first value."""
        for name, values, key in list(self._places(model)):
            if name not in names:
                continue
            first = self._values.get(name, ABSENT)
            if first is ABSENT:
                del values[key]
            else:
                values[key] = copy.deepcopy(first)

    def _places(self, model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield each name, the dict that holds its value, and the key there."""
        for key in vars(self._task).keys() - OF_A_TASK:
            yield f"{type(self._task).__name__}.{key}", vars(self._task), key
        for place, module in model.named_modules():
            for key in vars(module).keys() - OF_A_MODULE:
                yield f"model.{place}".rstrip(".") + f".{key}", vars(module), key
            for key in dict(module._buffers):  # TorchScript's is no dict
                yield f"{place}.{key}".lstrip("."), module._buffers, key


def _is_plain(value: Any, depth: int) -> bool:
    """Return True for numbers, strings and small tensors, and for containers of them."""
    if isinstance(value, torch.Tensor):
        return value.is_leaf and not value.is_meta and value.nbytes <= MOST_BYTES
    if isinstance(value, numpy.ndarray):
        return value.dtype.kind in "biuf" and value.nbytes <= MOST_BYTES
    if isinstance(value, (list, tuple, set, deque, dict)):
        items = value.values() if isinstance(value, dict) else value
        return (
            depth > 0 and len(value) <= MOST_ITEMS and all(_is_plain(v, depth - 1) for v in items)
        )
    return isinstance(value, (bool, int, float, str, bytes, type(None)))
