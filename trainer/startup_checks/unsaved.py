"""State that no checkpoint holds: attributes of a task, a model, optimizers and the schedule.

A task that counts in an attribute, or an optimizer that keeps a number in one, starts from the
first value again after a resume. Such attributes are found by comparing them before and after a
call, or with those at the start, and named.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import islice
from operator import length_hint
from types import GeneratorType
from typing import Any

import numpy
import torch
from torch import nn
from torch.optim import Optimizer

from trainer.core.schedule import Schedule
from trainer.core.state import MOST_BYTES, MOST_ITEMS, OF_A_MODULE, OF_A_TASK
from trainer.core.state.outside import COPIED, HOOKS, is_own, of_outside, place_of

PLAIN_TYPES = (bool, int, float, complex, str, bytes, type(None))
MOST_COMPARED_VALUES = 1_000  # compared of a container or tensor
MOST_NODES_OF_AN_ATTRIBUTE = 20_000  # compared of an attribute
DEEPEST_READ = 6
FIRST_VALUE_DEPTH = 3  # of containers of first values
NO_FIRST_VALUE = object()


@cache
def of_an_optimizer() -> set[str]:
    """Return the attributes that torch itself gives an optimizer.

    The first optimizer of a process imports torch._dynamo, 0.9 s, which a run of `use` never needs.
    """
    return {
        *vars(torch.optim.SGD([torch.zeros(1)])),
        *("grad_scale", "found_inf", "_opt_called", "_step_count", "_numel_cache"),
        *("_need_device_dtype_check_for_fused", "_step_supports_amp_scaling"),
    }


# What a call changes ------------------------------------------------------------------------------


class AttributeSnapshot:
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


def of_model(model: nn.Module, has_private: bool = False) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of all modules, except parameters, buffers and submodules.

    Those that begin with _ are left out, unless it `has_private`.
    """
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in OF_A_MODULE and (has_private or not key.startswith("_")):
                yield f"{name}.{key}" if name else key, value


def of_task(task: Any) -> Iterator[tuple[str, Any]]:
    """Yield attributes of the task, of its class, and variables of the module that defines it."""
    kind = type(task)
    for key, value in vars(task).items():
        if key not in OF_A_TASK:
            yield f"self.{key}", value
    for base in kind.__mro__:
        if base.__module__.startswith(("trainer.", "builtins")):
            continue
        for key, value in vars(base).items():
            if not key.startswith("__") and not callable(value):
                yield f"{base.__name__}.{key}", value
        for key, value in vars(sys.modules[base.__module__]).items():
            kinds = (list, deque, dict, set, int, float, torch.Tensor, torch.Generator)
            if isinstance(value, kinds) and not key.startswith("__"):
                yield key, value


def held_by(dataset: Any, task: Any) -> list[tuple[str, Any]]:
    """Return what reading a data set may change, by name: its attributes, and the task's."""
    kinds = [vars(kind) for kind in reversed(type(dataset).__mro__) if is_own(kind)]
    held = {key: value for kind in kinds for key, value in kind.items() if not callable(value)}
    held = {k: v for k, v in held.items() if not k.startswith("__")} | dict(of_dataset(dataset))
    return [*((f"{key} of the data set", value) for key, value in held.items()), *of_task(task)]


def state_of(model: nn.Module, task: Any) -> list[tuple[str, Any]]:
    """Return what forward passes and losses may change besides buffers, by name."""
    return [*of_model(model, has_private=True), *of_task(task), *of_outside(model, task)]


def of_dataset(dataset: Any) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of a data set."""
    yield from getattr(dataset, "__dict__", {}).items()


def _mark(value: Any, depth: int = 2) -> Any:
    """Return a mark that changes with the value, also when the value is changed in place."""
    if isinstance(value, torch.Tensor):
        return None if value.is_inference() else value._version
    if isinstance(value, PLAIN_TYPES):
        return value
    if (state := _state_of(value)) is not None:
        return state
    if isinstance(value, (list, tuple, dict, set, deque)):
        if not depth or len(value) > MOST_ITEMS:
            return len(value)
        items = value.items() if isinstance(value, Mapping) else value
        return [_mark(item, depth - 1) for item in items]
    if hasattr(value, "tobytes") and hasattr(value, "size"):  # a numpy array
        return value.tobytes() if value.size <= MOST_ITEMS else value.ravel()[:MOST_ITEMS].tobytes()
    if depth and is_own(type(value)) and not isinstance(value, nn.Module):
        return [_mark(held, depth - 1) for held in _held_by(value)]
    return None


def _held_by(value: Any) -> list[Any]:
    """Return the values of an object's attributes."""
    slots = [slot for kind in type(value).__mro__ for slot in vars(kind).get("__slots__", ())]
    held = [getattr(value, slot, None) for slot in slots if isinstance(slot, str)]
    return [*held, *getattr(value, "__dict__", {}).values()]


def _state_of(value: Any) -> Any:
    """Return where a generator of numbers, an iterator or a generator is; None for other values."""
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, numpy.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        state: Any = value.get_state(legacy=False)["state"]
        return state["pos"], state["key"].tobytes()
    if isinstance(value, COPIED):
        return repr(value), length_hint(value, -1)
    if isinstance(value, GeneratorType):
        return repr(place_of(value))  # None at its end
    return None


# What training changes ----------------------------------------------------------------------------


def list_owners(task: object, model: nn.Module) -> Iterator[tuple[str, object, set[str]]]:
    """Yield a name, the task or a module of the model, and attributes that are not its own."""
    yield type(task).__name__, task, OF_A_TASK - {"options"}
    for name, module in model.named_modules():
        # the old nn.utils.weight_norm computes `weight` from the parameter `weight_g`
        computed_names = {name.rpartition("_")[0] for name in dict(module._parameters)}
        # those of an LSTM are its parameters
        yield f"model.{name}".rstrip("."), module, OF_A_MODULE | {"_flat_weights"} | computed_names


class UnsavedState:
    """The attributes of a task and of what it trains with, as they are at the start.

    Objects of other classes than those of `packages` are taken for constant, if they are neither
    containers nor modules.
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
        self._packages = {*packages, type(task).__module__}
        self._before = self._read()

    def changed(self) -> list[str]:
        """Return the names of the attributes that differ from those at the start."""
        return [
            name
            for name, fingerprint in self._read().items()
            if self._before.get(name) != fingerprint
        ]

    def _roots(self) -> Iterator[tuple[str, object, set[str]]]:
        """Yield the name of each object, the object, and attributes to leave out."""
        of_task, *of_modules = list_owners(self._task, self._model)
        yield of_task
        for optimizer in self._optimizers:
            if not type(optimizer).__module__.startswith("torch."):  # those keep caches only
                yield type(optimizer).__name__, optimizer, of_an_optimizer()
        schedule = self._schedule
        factor = schedule.factor if isinstance(schedule, Schedule) else schedule
        if hasattr(factor, "__dict__"):
            yield type(factor).__name__, factor, set()
        yield from of_modules

    def _read(self) -> dict[str, Any]:
        held = [*self._model.modules(), *self._model.parameters(), *self._model.buffers()]
        reader = _Reader([*held, *self._optimizers], self._packages)
        prints: dict[str, Any] = {}
        for owner_name, root, left_out in self._roots():
            for key, value in list(vars(root).items()):
                if key not in left_out:
                    prints[f"{owner_name}.{key}"] = reader.read(value)
            if isinstance(root, nn.Module):
                prints[f"the hooks of {owner_name}"] = [
                    len(getattr(root, hooks)) for hooks in HOOKS
                ]
        for name, parameter in self._model.named_parameters():
            prints[f"requires_grad of {name}"] = parameter.requires_grad
        return prints


class _Reader:
    """Makes fingerprints. What is `held` by checkpoints counts as constant."""

    def __init__(self, held: Sequence[object], packages: set[str]):
        self._held = {id(each) for each in held}
        self._packages = {package.partition(".")[0] for package in packages} - {"trainer"}
        self._left = 0

    def read(self, value: Any) -> Any:
        self._left = MOST_NODES_OF_AN_ATTRIBUTE
        print_ = self._read(value, 0)
        return print_ if self._left > 0 else type(value).__name__

    def _read(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if isinstance(value, PLAIN_TYPES):
            return repr(value)
        if id(value) in self._held or depth > DEEPEST_READ or self._left < 0:
            return type(value).__name__
        if isinstance(value, torch.Tensor):
            return _sample(value)
        if isinstance(value, (list, tuple, deque)):
            return len(value), [
                self._read(v, depth + 1) for v in islice(value, MOST_COMPARED_VALUES)
            ]
        if isinstance(value, (set, frozenset)):
            return len(value), sorted(str(self._read(v, depth + 1)) for v in value)
        if isinstance(value, dict):
            pairs = islice(value.items(), MOST_COMPARED_VALUES)
            return len(value), [[self._read(each, depth + 1) for each in pair] for pair in pairs]
        if (state := _state_of(value)) is not None:
            return state
        if type(value).__module__.partition(".")[0] == "numpy":
            return _sample_numpy(value)
        return [self._read(each, depth + 1) for each in self._parts(value)]

    def _parts(self, value: Any) -> Iterator[Any]:
        """Yield the attributes of a module, an optimizer, or an object of the user's packages."""
        if isinstance(value, nn.Module):
            yield from [*value.parameters(), *value.buffers()]
            for module in value.modules():
                yield {key: v for key, v in vars(module).items() if key not in OF_A_MODULE}
        elif isinstance(value, Optimizer):
            yield dict(value.state)
            yield {key: v for key, v in vars(value).items() if key not in of_an_optimizer()}
        elif type(value).__module__.partition(".")[0] in self._packages:
            yield getattr(value, "__dict__", None)


def _sample(tensor: torch.Tensor) -> Any:
    """Return the number of changes of a tensor, which `.data` hides, and some of its values."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not is_plain or tensor.is_meta or tensor.is_inference() or tensor.grad_fn is not None:
        return type(tensor).__name__
    flat = tensor.detach().reshape(-1)
    values = flat[:: max(1, len(flat) // MOST_COMPARED_VALUES)].tolist()
    return tuple(tensor.shape), tensor._version, repr(values)


def _sample_numpy(value: Any) -> Any:
    if getattr(value, "size", 1) > 1:
        value = value.reshape(-1)[:: max(1, value.size // MOST_COMPARED_VALUES)].tolist()
    return repr(value)


class FirstValues:
    """Attributes of a task and of the modules of a model, and buffers, as a run begins with them.

    Their names are those of `UnsavedState`, and of buffers.
    """

    def __init__(self, task: Any, model: nn.Module):
        self._task = task
        self._model = model
        self._values = {
            name: copy.deepcopy(values[key])
            for name, values, key in self._places(model)
            if _is_plain(values[key], FIRST_VALUE_DEPTH)
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

    def _places(self, model: nn.Module) -> Iterator[tuple[str, dict[str, Any], str]]:
        """Yield each name, the dict that holds its value, and the key there."""
        for owner_name, owner, left_out in list_owners(self._task, model):
            for key in vars(owner).keys() - left_out:
                yield f"{owner_name}.{key}", vars(owner), key
        for owner_name, module in model.named_modules():
            for key in dict(module._buffers):  # TorchScript's is no dict
                yield f"{owner_name}.{key}".lstrip("."), module._buffers, key


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
