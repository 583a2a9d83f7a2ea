"""Holders: attributes, other than buffers, that hold state.

Comparing them before and after a call finds state that a model, a loss or a data set changes.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainer.engine.proof.outside import copy_iterator, keep_outside
from trainer.strategy.modules.dry_run import untouched
from trainer.strategy.shards import replace_tensors

Restore = Callable[[], Any]
DEPTH = 4  # of attributes of attributes
MOST_BYTES = 2**24  # of a tensor whose changes in place are undone
MOST_ITEMS = 1000  # of a container that are compared
OF_A_TASK = {"config", "world", "options", "_run"}
_LIBRARIES = ("torch", "numpy", "trainer.", "builtins", "collections", "threading", "_")
OF_A_MODULE = set(vars(nn.Module()))


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
            if key not in OF_A_MODULE and not key.startswith("_"):
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


@contextmanager
def attributes_kept(model: nn.Module, task: Any) -> Iterator[None]:
    """Give attributes of a task and a model, and variables around them, their values back.

    Else caches of another dtype, or state that a checkpoint holds, would stay.
    """
    seen = {id(each) for each in model.modules()}
    keepers = [_keep_attributes(each, DEPTH, seen) for each in (*model.modules(), task)]
    try:
        with outside_kept(model, task):
            yield
    finally:
        for restore in keepers:
            restore()


@contextmanager
def outside_kept(model: nn.Module, task: Any) -> Iterator[None]:
    """Give the variables around a task and a model their values back after the block."""
    seen = {id(each) for each in model.modules()}
    keepers = keep_outside(model, task, lambda value: _keep(value, DEPTH - 1, seen))
    try:
        yield
    finally:
        for restore in keepers:
            restore()


@contextmanager
def undone(model: nn.Module, task: Any) -> Iterator[None]:
    """Run a block, then give tensors and attributes of a model and a task their values back."""
    with untouched(model), attributes_kept(model, task):
        yield


@contextmanager
def tensors_borrowed(
    module: nn.Module, copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone
) -> Iterator[None]:
    """Give a model copies of its tensors in the block, with the hooks on their gradients."""

    @torch.no_grad()
    def make(_: str, tensor: torch.Tensor) -> torch.Tensor:
        if is_lazy(tensor):
            return tensor
        values = copy(tensor).detach()
        if not isinstance(tensor, nn.Parameter):
            return values
        copied = nn.Parameter(values, tensor.requires_grad)
        vars(copied).update(vars(tensor))
        for hook in (tensor._backward_hooks or {}).values():
            copied.register_hook(hook)
        return copied

    with _tensors_kept(module):
        replace_tensors(module, make)
        yield


@contextmanager
def _tensors_kept(module: nn.Module) -> Iterator[None]:
    """Put the tensors that a model has now back at the end of the block."""
    kept = [(each, dict(each._parameters), dict(each._buffers)) for each in module.modules()]
    try:
        yield
    finally:
        for owner, parameters, buffers in kept:
            _put_back(owner, owner._parameters, parameters)
            _put_back(owner, owner._buffers, buffers)


def _put_back(owner: nn.Module, register: dict[str, Any], before: dict[str, Any]) -> None:
    now = dict(register)  # TorchScript's is no dict
    for key in now.keys() - before.keys():
        del register[key]
    for key, tensor in before.items():
        if tensor is None:
            register[key] = None
        elif now.get(key) is not tensor:
            setattr(owner, key, tensor)


def _keep_attributes(owner: Any, depth: int, seen: set[int]) -> Restore:
    """Return a function that gives the attributes of an object their values back."""
    left_out = OF_A_MODULE if isinstance(owner, nn.Module) else OF_A_TASK
    now = vars(owner)
    before = {key: copy_iterator(v) for key, v in now.items() if key not in left_out}
    inner = [_keep(value, depth - 1, seen) for value in before.values()]

    def restore() -> None:
        for key in now.keys() - before.keys() - left_out:
            del now[key]
        now.update(before)
        _call_all(inner)

    return restore


def _keep(value: Any, depth: int, seen: set[int]) -> Restore | None:
    """Return a function that undoes later changes of a value in place, None if it needs none."""
    if depth < 0 or id(value) in seen or isinstance(value, (type, ModuleType)):
        return None
    seen.add(id(value))
    if isinstance(value, torch.Tensor):
        return _keep_tensor(value)
    if isinstance(value, torch.Generator):
        return partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return partial(value.setstate, value.getstate())
    if isinstance(value, numpy.random.Generator):
        return partial(setattr, value.bit_generator, "state", value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return partial(value.set_state, value.get_state())
    if isinstance(value, numpy.ndarray):
        is_small = value.nbytes <= MOST_BYTES and value.flags.writeable
        return partial(numpy.copyto, value, value.copy()) if is_small else None
    if isinstance(value, nn.Module):
        return _keep_module(value, depth, seen)
    if isinstance(value, Optimizer):
        return _keep_optimizer(value)
    if isinstance(value, (list, deque, dict, set)) and len(value) <= MOST_ITEMS:
        return _keep_items(value, depth, seen)
    if isinstance(value, tuple):
        return partial(_call_all, [_keep(item, depth - 1, seen) for item in value])
    is_own = not type(value).__module__.startswith(_LIBRARIES)
    # that of dict[str, int], a type in a variable, is the one of dict, which cannot be written
    has_own = isinstance(getattr(value, "__dict__", None), dict)
    return _keep_attributes(value, depth, seen) if is_own and has_own else None


def _keep_tensor(tensor: torch.Tensor) -> Restore | None:
    if tensor.is_inference() or tensor.nbytes > MOST_BYTES:
        return None
    version, values = tensor._version, tensor.detach().clone()

    @torch.no_grad()
    def restore() -> None:
        if tensor._version != version and tensor.shape == values.shape:
            tensor.copy_(values)

    return restore


def _keep_module(module: nn.Module, depth: int, seen: set[int]) -> Restore:
    """Keep a module that is not a part of the model, such as a teacher."""
    kept = [_keep_tensor(tensor) for tensor in (*module.buffers(), *module.parameters())]
    new = [each for each in module.modules() if each is module or id(each) not in seen]
    seen |= {id(each) for each in new}
    return partial(_call_all, [*kept, *(_keep_attributes(each, depth - 1, seen) for each in new)])


@contextmanager
def optimizers_kept(optimizers: Iterable[Optimizer]) -> Iterator[None]:
    """Give optimizers their options, state and own attributes back after the block.

    Their state is not copied: in the block nobody steps them, but a step may call their methods.
    """
    seen: set[int] = set()
    keepers: list[Restore] = []
    for optimizer in optimizers:
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        seen |= {id(optimizer.state), id(optimizer.param_groups)}
        pairs = zip(optimizer.param_groups, groups, strict=True)
        keepers += [partial(dict.update, *pair) for pair in pairs]
        keepers.append(_keep_attributes(optimizer, DEPTH, seen))
    try:
        yield
    finally:
        _call_all(keepers)


def _keep_optimizer(optimizer: Optimizer) -> Restore:
    """Keep the state and the options of an optimizer that the task holds, and its parameters."""
    groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    inner = [_keep_tensor(tensor) for tensor in tensors]
    state = {p: {k: _cloned(v) for k, v in held.items()} for p, held in optimizer.state.items()}

    def restore() -> None:
        for group, before in zip(optimizer.param_groups, groups, strict=False):
            group.update(before)
        optimizer.state.clear()
        optimizer.state.update({p: dict(held) for p, held in state.items()})
        _call_all(inner)

    return restore


def _cloned(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _keep_items(value: Any, depth: int, seen: set[int]) -> Restore:
    before = copy.copy(value)
    items = value.values() if isinstance(value, dict) else value
    inner = [_keep(item, depth - 1, seen) for item in items]

    def restore() -> None:
        if not _has_same(value, before):
            value.clear()
            (value.extend if isinstance(value, (list, deque)) else value.update)(before)
        _call_all(inner)

    return restore


def _call_all(functions: Iterable[Restore | None]) -> None:
    for function in functions:
        if function is not None:
            function()


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
        return None if value.is_inference() else value._version
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, numpy.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        state: Any = value.get_state(legacy=False)["state"]
        return state["pos"], state["key"].tobytes()
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
