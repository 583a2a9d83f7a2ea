"""Holders: attributes, other than buffers, that hold state.

Comparing them before and after a call finds state that a model, a loss or a data set changes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

MOST_ITEMS = 1000  # of a container that are compared
_OF_A_TASK = {"config", "world", "options", "_run"}
_OF_A_MODULE = {"_parameters", "_buffers", "_modules", "training"}


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


def of_dataset(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a data set."""
    yield from getattr(dataset, "__dict__", {}).items()


def _mark(value: Any, depth: int = 2) -> Any:
    """Return a mark that changes with the value, also when the value is changed in place."""
    if isinstance(value, torch.Tensor):
        return value._version
    if isinstance(value, torch.Generator):
        return value.get_state().sum().item()
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
