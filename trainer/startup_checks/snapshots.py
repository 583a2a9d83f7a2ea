"""Snapshots of Python state: marks that change with a value, and copies that are compared.

Marks tell that something has changed between two moments of this process. Copies are of plain
values: they can be compared up to rounding, and their digests between ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainer.base.codec import digest
from trainer.base.same import relative
from trainer.base.same.distance import apart
from trainer.core.state.scopes import (
    Scope,
    is_own,
    list_surroundings,
    scope_of_task,
    scopes_of_model,
)
from trainer.core.state.walk import MOST_BYTES, Walk

MOST_SAMPLES = 1000  # values of a tensor in its mark
MOST_MARKED = 20_000  # values of an attribute
Named = Iterable[tuple[str, Any]]
Snapshot = dict[str, Any]  # copies by the name of what holds the value


# What is watched ----------------------------------------------------------------------------------


def scopes_of(model: nn.Module, task: Any) -> list[Scope]:
    """Return all that forward passes and losses may change besides buffers."""
    return [scope_of_task(task), *scopes_of_model(model), *list_surroundings(model, task)]


def constants_of(model: nn.Module) -> list[object]:
    """Return the modules and the tensors of a model, which are compared by themselves."""
    return [*model.modules(), *model.parameters(), *model.buffers()]


def state_of(model: nn.Module, task: Any) -> Iterator[tuple[str, Any]]:
    """Yield all that forward passes and losses may change besides buffers, by name."""
    for scope in scopes_of(model, task):
        yield from scope.named()


def of_dataset(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a data set."""
    yield from getattr(dataset, "__dict__", {}).items()


def held_by(dataset: Any, task: Any) -> list[tuple[str, Any]]:
    """Return what reading a data set may change, by name: its attributes, and the task's."""
    kinds = [vars(kind) for kind in reversed(type(dataset).__mro__) if is_own(kind)]
    held = {key: value for kind in kinds for key, value in kind.items() if not callable(value)}
    held = {k: v for k, v in held.items() if not k.startswith("__")} | dict(of_dataset(dataset))
    of_data = ((f"{key} of the data set", value) for key, value in held.items())
    return [*of_data, *state_of(nn.Identity(), task)]


# Marks --------------------------------------------------------------------------------------------


class Marks(Walk[Any]):
    """Makes marks that change with a value, also when it is changed in place.

    Of objects, only those of the user's own code and of `packages` are looked into.
    """

    samples = True
    most_values = MOST_MARKED

    def __init__(self, constant: Iterable[object] = (), packages: Iterable[str] = ()):
        super().__init__(constant)
        self._packages = {*packages}

    def enters(self, kind: type) -> bool:
        return is_own(kind) or kind.__module__.partition(".")[0] in self._packages

    def plain(self, value: Any) -> Any:
        return repr(value)

    def closed(self, value: Any) -> Any:
        return type(value).__name__

    def tensor(self, value: torch.Tensor) -> Any:
        """Return the number of changes of a tensor, which `.data` hides, and some of its values."""
        if is_lazy(value) or value.is_inference():
            return type(value).__name__
        is_plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
        if not is_plain or value.is_meta or value.grad_fn is not None:
            return type(value).__name__, value._version
        flat = value.detach().reshape(-1)
        sample = flat[:: max(1, len(flat) // MOST_SAMPLES)].contiguous().view(torch.uint8)
        return tuple(value.shape), value._version, sample.cpu().numpy().tobytes()

    def array(self, value: numpy.ndarray) -> Any:
        flat = value.reshape(-1)
        sample = flat[:: max(1, len(flat) // MOST_SAMPLES)]
        return value.shape, repr(sample.tolist()) if value.dtype.hasobject else sample.tobytes()

    def position(self, state: Any, restore: Any) -> Any:
        return state

    def container(self, value: Any, parts: list[Any]) -> Any:
        if isinstance(value, (set, frozenset)):
            return len(value), sorted(str(mark) for _, mark in parts)
        return len(value), [(self.visit(key, 1), mark) for key, mark in parts]

    def owner(self, value: Any, parts: list[Any]) -> Any:
        return list(parts)


class AttributeSnapshot:
    """Snapshot of attributes by name, to find those that change later."""

    def __init__(self, named: Named, constant: Iterable[object] = ()):
        """`constant` objects are not looked into, such as the modules of the model."""
        self._marks = Marks(constant)
        self._before = {name: (value, self._marks.begin(value)) for name, value in named}

    def changed(self, named: Named) -> list[str]:
        """Return the names whose values differ from the snapshot."""
        names = []
        for name, value in named:
            before, mark = self._before.get(name, (None, None))
            is_same = value is before or not isinstance(value, (torch.Tensor, torch.Generator))
            if not is_same or mark != self._marks.begin(value):
                names.append(name)
        return names


# Copies -------------------------------------------------------------------------------------------


class Copier(Walk[Any]):
    """Makes plain copies: numbers, texts, tensors, lists and dicts; None of anything else."""

    def enters(self, kind: type) -> bool:
        return is_own(kind)

    def plain(self, value: Any) -> Any:
        return value

    def closed(self, value: Any) -> Any:
        return None

    def tensor(self, value: torch.Tensor) -> Any:
        if is_lazy(value):
            return None
        is_readable = not value.is_meta and value.layout is torch.strided
        return value.detach().clone() if is_readable and value.nbytes <= MOST_BYTES else None

    def array(self, value: numpy.ndarray) -> Any:
        is_number = value.dtype.kind in "biuf" and value.nbytes <= MOST_BYTES
        return torch.from_numpy(numpy.array(value)) if is_number else None

    def position(self, state: Any, restore: Any) -> Any:
        return None

    def container(self, value: Any, parts: list[Any]) -> Any:
        if isinstance(value, dict):
            return {_name_of(key): part for key, part in parts}
        return None if isinstance(value, (set, frozenset)) else [part for _, part in parts]

    def owner(self, value: Any, parts: list[Any]) -> Any:
        return None if isinstance(value, Optimizer) else dict(parts)


def _name_of(key: Any) -> str:
    return str(key) if isinstance(key, (str, int, float, tuple, bytes)) else type(key).__name__


def take_snapshot(model: nn.Module, task: Any, has_private: bool = False) -> Snapshot:
    """Return copies of the attributes of a task and a model, and of the model's buffers.

    Attributes of a model that begin with _ are left out, unless it `has_private`.
    """
    of_model = (
        (scope.naming.format(key), value)
        for scope in scopes_of_model(model)
        for key, value in scope.items()
        if has_private or not key.startswith("_")
    )
    around = (scope for scope in list_surroundings(nn.Identity(), task) if scope.is_around)
    of_task = (pair for scope in (scope_of_task(task), *around) for pair in scope.named())
    named = [*of_model, *of_task, *model.named_buffers()]
    walk = Copier(model.modules())
    return {name: walk.begin(value) for name, value in named}


def find_different(one: Snapshot, other: Snapshot, limit: float) -> list[str]:
    """Return the names whose values differ by more than rounding."""
    return [name for name in one if name in other and _differ(one[name], other[name], limit)]


def digest_snapshot(snapshot: Snapshot) -> dict[str, float]:
    """Return a number for each name, the same for equal values."""
    return {name: _digest(value) for name, value in snapshot.items()}


def find_unequal(ranks: Sequence[Mapping[str, float]], rank: int) -> list[str]:
    """Return the names whose values on a rank differ from those on rank 0, from their digests."""
    return [name for name, value in ranks[0].items() if ranks[rank].get(name) != value]


def _differ(one: Any, other: Any, limit: float) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return not apart(one, other) <= limit
    if isinstance(one, list) and isinstance(other, list):
        pairs = zip(one, other, strict=False)
        return len(one) != len(other) or any(_differ(*pair, limit) for pair in pairs)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() != other.keys() or any(_differ(one[k], other[k], limit) for k in one)
    if isinstance(one, float) and isinstance(other, float):
        return relative(one, other, abs(other)) > limit
    return type(one) is not type(other) or bool(one != other)


def _digest(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return digest(value)
    if isinstance(value, list):
        return sum((n + 1) * _digest(item) for n, item in enumerate(value)) + len(value)
    if isinstance(value, dict):
        return sum((n + 1) * _digest(item) for n, item in enumerate(value.values())) + len(value)
    if isinstance(value, (int, float)):
        return float(value) if math.isfinite(value) else -1.0
    return float(len(value)) if isinstance(value, (str, bytes)) else 0.0
