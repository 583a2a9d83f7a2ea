"""Holders: attributes, other than buffers, that hold state.

Comparing them before and after a call finds state that a model, a loss or a data set changes.
"""

from __future__ import annotations

import copy
import sys
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

MOST_ITEMS = 1000  # of a container that are compared
_OF_A_TASK = {"config", "world", "options", "_run"}
_CONTAINERS = (list, dict, set, deque, OrderedDict)
_OF_A_MODULE = set(vars(nn.Module()))


class Holders:
    """Snapshot of attributes by name, to find those that change later."""

    def __init__(self, named: Iterable[tuple[str, Any]]):
        self._before = {name: (value, _mark(value)) for name, value in named}

    def changed(self, named: Iterable[tuple[str, Any]]) -> list[str]:
        """Return the names whose values differ from the snapshot."""
        names = []
        for name, value in named:
            before, mark = self._before.get(name, (None, None))
            is_same = value is before or not isinstance(value, (torch.Tensor, torch.Generator))
            if not is_same or mark != _mark(value):
                names.append(name)
        return names


def of_model(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the public attributes of all modules, except parameters, buffers and submodules."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _OF_A_MODULE and not key.startswith("_"):
                yield f"{name}.{key}" if name else key, value


def of_task(task: Any) -> Iterator[tuple[str, Any]]:
    """Yield attributes of the task, of its class, and variables of the module that defines it."""
    kind = type(task)
    for key, value in vars(task).items():
        if key not in _OF_A_TASK:
            yield f"self.{key}", value
    for base in kind.__mro__:
        if base.__module__.startswith(("trainer.", "builtins")):
            continue
        for key, value in vars(base).items():
            if not key.startswith("__") and not callable(value):
                yield f"{base.__name__}.{key}", value
        for key, value in vars(sys.modules[base.__module__]).items():
            if isinstance(value, (list, dict, set, int, float, torch.Tensor, torch.Generator)):
                yield key, value


@contextmanager
def attributes_kept(model: nn.Module, task: Any) -> Iterator[None]:
    """Give the attributes of a task and of a model's modules their values back after the block.

    Else caches of another dtype, or state that a checkpoint holds, would stay.
    """
    kept = []
    for owner in (*model.modules(), task):
        left_out = _OF_A_MODULE if isinstance(owner, nn.Module) else _OF_A_TASK
        values = {key: value for key, value in vars(owner).items() if key not in left_out}
        kept.append((owner, left_out, values, [(v, _copied(v)) for v in values.values()]))
    try:
        yield
    finally:
        for owner, left_out, values, copies in kept:
            now = vars(owner)
            for key in now.keys() - values.keys() - left_out:
                del now[key]
            now |= values
            for value, before in copies:
                _write(value, before)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return (value._version, value.detach().clone())
    if isinstance(value, torch.Generator):
        return value.get_state()
    return copy.copy(value) if type(value) in _CONTAINERS else None


@torch.no_grad()
def _write(value: Any, before: Any) -> None:
    """Give a value that may have been changed in place what `_copied` returned."""
    if isinstance(value, torch.Tensor):
        version, values = before
        if value._version != version and value.shape == values.shape:
            value.copy_(values)
    elif isinstance(value, torch.Generator):
        value.set_state(before)
    elif type(value) in _CONTAINERS and not _has_same(value, before):
        value.clear()
        (value.extend if isinstance(value, (list, deque)) else value.update)(before)


def _has_same(one: Any, other: Any) -> bool:
    """Return True if two containers have the same objects."""
    ids = [
        list(map(_identity, each.items() if isinstance(each, dict) else each))
        for each in (one, other)
    ]
    return ids[0] == ids[1]


def _identity(item: Any) -> Any:
    return tuple(map(id, item)) if isinstance(item, tuple) else id(item)


def of_dataset(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a data set."""
    yield from getattr(dataset, "__dict__", {}).items()


def _mark(value: Any, depth: int = 2) -> Any:
    """Return a mark that changes with the value, also when the value is changed in place."""
    if isinstance(value, torch.Tensor):
        return value._version
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, (int, float, complex, str, bytes, type(None))):
        return value
    if isinstance(value, (list, tuple, dict, set)):
        if not depth or len(value) > MOST_ITEMS:
            return len(value)
        items = value.items() if isinstance(value, Mapping) else value
        return [_mark(item, depth - 1) for item in items]
    if hasattr(value, "tobytes") and hasattr(value, "size"):  # a numpy array
        return value.tobytes() if value.size <= MOST_ITEMS else value.ravel()[:MOST_ITEMS].tobytes()
    return None
