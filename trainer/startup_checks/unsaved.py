"""State that no checkpoint holds: attributes of a task, a model, optimizers and the schedule.

A task that counts in an attribute, or an optimizer that keeps a number in one, starts from the
first value again after a resume. Such attributes are found by comparing them before and after a
call, or with those at the start, and named.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim import Optimizer

from trainer.core.schedule import Schedule
from trainer.core.state.scopes import HOOKS, OF_A_TASK, Scope, scope_of_task, scopes_of_model
from trainer.core.state.walk import MOST_BYTES, Walk, left_out_of
from trainer.startup_checks.snapshots import Marks, constants_of

NO_FIRST_VALUE = object()


def list_owners(task: object, model: nn.Module) -> Iterator[Scope]:
    """Yield the attributes of a task and of the modules of its model, without those of torch."""
    yield scope_of_task(task, type(task).__name__, OF_A_TASK - {"options"})
    for scope, module in zip(scopes_of_model(model), model.modules(), strict=True):
        # the old nn.utils.weight_norm computes `weight` from the parameter `weight_g`
        computed_names = {name.rpartition("_")[0] for name in dict(module._parameters)}
        # those of an LSTM are its parameters
        left_out = {*left_out_of(module), "_flat_weights", *computed_names}
        yield Scope(f"model.{scope.naming}", scope.variables, left_out)


class UnsavedState:
    """The attributes of a task and of what it trains with, as they are at the start.

    Of objects, those of the user's classes and of `packages` are looked into; others are constant.
    """

    def __init__(
        self,
        task: object,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        schedule: object,
        packages: Sequence[str],
    ):
        self._task = task
        self._model = model
        self._optimizers = optimizers
        self._schedule = schedule
        self._packages = {each.partition(".")[0] for each in (*packages, type(task).__module__)}
        self._before = self._read()

    def changed(self) -> list[str]:
        """Return the names of the attributes that differ from those at the start."""
        return [
            name
            for name, fingerprint in self._read().items()
            if self._before.get(name) != fingerprint
        ]

    def _scopes(self) -> Iterator[Scope]:
        yield from list_owners(self._task, self._model)
        for optimizer in self._optimizers:
            if not type(optimizer).__module__.startswith("torch."):  # those keep caches only
                name, left_out = type(optimizer).__name__, left_out_of(optimizer)
                yield Scope(f"{name}.{{}}", vars(optimizer), left_out)
        schedule = self._schedule
        factor = schedule.factor if isinstance(schedule, Schedule) else schedule
        if hasattr(factor, "__dict__"):
            yield Scope(f"{type(factor).__name__}.{{}}", vars(factor))

    def _read(self) -> dict[str, Any]:
        model = self._model
        saved = [*constants_of(model), *self._optimizers]
        walk = Marks(saved, self._packages - {"trainer"})
        marks: dict[str, Any] = {}
        for scope in self._scopes():
            marks |= {name: walk.begin(value) for name, value in scope.named()}
        for name, module in model.named_modules():
            counts = [len(getattr(module, hooks)) for hooks in HOOKS]
            marks[f"the hooks of {f'model.{name}'.rstrip('.')}"] = counts
        for name, parameter in model.named_parameters():
            marks[f"requires_grad of {name}"] = parameter.requires_grad
        return marks


class FirstValues:
    """Attributes of a task and of the modules of a model, and buffers, as a run begins with them.

    Their names are those of `UnsavedState`, and of buffers.
    """

    def __init__(self, task: Any, model: nn.Module):
        self._task = task
        self._model = model
        walk = PlainCheck(constants_of(model))
        self._values = {
            name: copy.deepcopy(values[key])
            for name, values, key in self._places(model)
            if walk.begin(values[key])
        }
        self._known = {name for name, _, _ in self._places(model)}

    def knows(self, name: str) -> bool:
        """Return True if `reset` can give this its first value, or remove it.

        It has none of an optimizer, the schedule or hooks: no trial could tell what they change.
        """
        if name in self._known:
            return name in self._values
        return any(name == each for each, _, _ in self._places(self._model))

    def reset(self, model: nn.Module, names: set[str]) -> None:
        """Give what has these names its first value."""
        for name, values, key in list(self._places(model)):
            if name not in names:
                continue
            first = self._values.get(name, NO_FIRST_VALUE)
            if first is NO_FIRST_VALUE:
                del values[key]
            else:
                values[key] = copy.deepcopy(first)

    def _places(self, model: nn.Module) -> Iterator[tuple[str, MutableMapping[str, Any], str]]:
        """Yield each name, the dict that holds its value, and the key there."""
        for scope in list_owners(self._task, model):
            for key, _ in scope.items():
                yield scope.naming.format(key), scope.variables, key
        for owner_name, module in model.named_modules():
            for key in dict(module._buffers):  # TorchScript's is no dict
                yield f"{owner_name}.{key}".lstrip("."), module._buffers, key


class PlainCheck(Walk[bool]):
    """Answers True for numbers, strings and small tensors, and for containers of them."""

    def plain(self, value: Any) -> bool:
        return True

    def closed(self, value: Any) -> bool:
        return False

    def tensor(self, value: torch.Tensor) -> bool:
        return value.is_leaf and not value.is_meta and value.nbytes <= MOST_BYTES

    def array(self, value: numpy.ndarray) -> bool:
        return value.dtype.kind in "biuf" and value.nbytes <= MOST_BYTES

    def position(self, state: Any, restore: Any) -> bool:
        return False

    def container(self, value: Any, parts: list[Any]) -> bool:
        return all(is_plain for _, is_plain in parts)

    def owner(self, value: Any, parts: list[Any]) -> bool:
        return False
