"""Sandbox: run a block without lasting changes to model, task, optimizers and generators.

    with sandbox(keep_passes(model), keep_attributes(model, task), keep_generators(devices)):

Each `keep_` function notes how something is, and returns a function that puts it back.
"""

from __future__ import annotations

import copy
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from types import ModuleType
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainer.core.distributed import accelerator
from trainer.core.state.outside import HOOKS, copy_iterator, keep_outside

Restore = Callable[[], Any]
ATTRIBUTE_DEPTH = 4  # of attributes of attributes
MOST_BYTES = 2**24  # of a tensor whose changes in place are undone
MOST_ITEMS = 1000  # of a container that are compared
KEPT_BYTES = 2**30  # of parameters, which are copied for a pass
LARGE_PARAMETER_BYTES = 2**20  # statistics are smaller, whose operations hide what they write
PLAIN = (bool, int, float, str, type(None))
OF_A_TASK = {"config", "world", "options", "_run"}
OF_A_MODULE = {*vars(nn.Module()), "_compiled_call_impl"}
_NOTEBOOK = ("IPython", "ipykernel", "traitlets")  # which other threads change
_NOT_OWN = ("torch", "numpy", "trainer.", "builtins", "collections", "threading", "_", *_NOTEBOOK)


@contextmanager
def sandbox(*restores: Restore) -> Iterator[None]:
    """Run a block, then call these functions, the last one first, after an error too."""
    with ExitStack() as stack:
        for restore in restores:
            stack.callback(restore)
        yield


def keep_generators(devices: Sequence[torch.device] = ()) -> Restore:
    """Keep Python's, numpy's and torch's generators, of the CPU and of devices."""
    stack = ExitStack()
    stack.enter_context(accelerator.fork_rng(devices))
    stack.callback(random.setstate, random.getstate())
    stack.callback(numpy.random.set_state, numpy.random.get_state())
    return stack.close


# Models -------------------------------------------------------------------------------------------


def keep_modes(model: nn.Module) -> Restore:
    """Keep which modules of a model are in training."""
    modes = [(each, each.training) for each in model.modules()]

    def restore() -> None:
        for each, mode in modes:  # outer modules first
            each.train(mode)

    return restore


def keep_hooks(model: nn.Module) -> Restore:
    """Keep the hooks of a model's modules, which a train_step may add to."""
    registries = [getattr(each, name) for each in model.modules() for name in HOOKS]
    copies = [(registry, dict(registry)) for registry in registries]

    def restore() -> None:
        for registry, before in copies:
            if registry.keys() != before.keys():
                registry.clear()
                registry.update(before)

    return restore


def keep_tensors(model: nn.Module) -> Restore:
    """Keep which tensors are a model's parameters and buffers; not their values."""
    registers = [(each, dict(each._parameters), dict(each._buffers)) for each in model.modules()]

    def restore() -> None:
        for owner, parameters, buffers in registers:
            _put_back(owner, owner._parameters, parameters)
            _put_back(owner, owner._buffers, buffers)

    return restore


def _put_back(owner: nn.Module, register: dict[str, Any], before: dict[str, Any]) -> None:
    registered = dict(register)  # TorchScript's is no dict
    for key in registered.keys() - before.keys():
        del register[key]
    for key, tensor in before.items():
        if tensor is None:
            register[key] = None
        elif registered.get(key) is not tensor:
            setattr(owner, key, tensor)


class BufferCopies(dict[str, torch.Tensor]):
    """Copies of a model's buffers by name, and the tensors that held them in `originals`."""

    def __init__(self, model: nn.Module):
        self._model = model
        self.originals = {name: b for name, b in model.named_buffers() if not is_lazy(b)}
        self._versions = {name: b._version for name, b in self.originals.items()}
        super().__init__({name: b.clone() for name, b in self.originals.items()})

    def is_assigned(self, name: str, buffer: torch.Tensor) -> bool:
        """Return True if this buffer is another tensor now."""
        return self.originals.get(name, buffer) is not buffer

    def is_written(self, name: str, buffer: torch.Tensor) -> bool:
        """Return True if this buffer was written, even if its values are what they were."""
        return name in self._versions and buffer._version != self._versions[name]

    @torch.no_grad()
    def restore(self) -> None:
        """Give the buffers their values back."""
        for name, buffer in list(self._model.named_buffers()):
            if name in self and buffer.shape == self[name].shape:
                buffer.copy_(self[name])
            elif name in self:  # such as a cache that grows
                module_name, _, key = name.rpartition(".")
                self._model.get_submodule(module_name)._buffers[key] = self[name]


def keep_passes(
    model: nn.Module,
    buffers: BufferCopies | None = None,
    most_bytes: int = KEPT_BYTES,
    has_large: bool = True,
) -> Restore:
    """Keep what passes write: buffers, plain values, parameters; drop gradients at the end.

    Parameters that a forward pass writes are restored, up to `most_bytes` of them, but not those of
    FSDP, and not large frozen ones unless `has_large`. New attributes that hold tensors or plain
    values, such as caches, are removed.
    """
    before = BufferCopies(model) if buffers is None else buffers
    parameters = [p for p in model.parameters() if not is_lazy(p) and not p.is_meta]
    parameters = [p for p in parameters if has_large or not is_large_frozen(p)]
    # FSDP gathers parameters on a stream of its own, and only its hooks wait for them
    is_gathered = any(hasattr(each, "unshard") for each in model.modules())
    is_kept = not is_gathered and sum(p.nbytes for p in parameters) <= most_bytes
    copies = [(p, p._version, p.detach().clone()) for p in parameters if is_kept]
    flags = [(each, _flags_of(each), {*vars(each)}) for each in model.modules()]

    def restore() -> None:
        for module, plain, names in flags:
            vars(module).update(plain)
            for key in _new_values(module, names):
                delattr(module, key)
        with torch.no_grad():
            for parameter, version, values in copies:
                is_written = parameter._version != version or not torch.equal(parameter, values)
                if is_written and parameter.shape == values.shape:  # by parameter.data, too
                    parameter.copy_(values)
        before.restore()
        model.zero_grad(set_to_none=True)

    return restore


def is_large_frozen(parameter: nn.Parameter) -> bool:
    """Return True for a frozen weight that passes share and do not copy, unless they write it."""
    is_plain = type(parameter) is nn.Parameter and parameter.layout is torch.strided
    return is_plain and not parameter.requires_grad and parameter.nbytes > LARGE_PARAMETER_BYTES


def _new_values(module: nn.Module, names: Set[str]) -> list[str]:
    if isinstance(module, LazyModuleMixin):
        return []
    kinds = (*PLAIN, torch.Tensor)
    return [k for k, v in vars(module).items() if k not in names and isinstance(v, kinds)]


def _flags_of(module: nn.Module) -> dict[str, Any]:
    """Return the plain values that a module keeps, such as whether it has seen a batch."""
    if isinstance(module, LazyModuleMixin):  # gets its sizes in a dry run
        return {}
    return {k: v for k, v in vars(module).items() if isinstance(v, PLAIN) and k != "training"}


# Attributes ---------------------------------------------------------------------------------------


def keep_attributes(model: nn.Module, task: Any) -> Restore:
    """Keep the attributes of a task and a model, and the variables around them.

    Else caches of another dtype, or state that a checkpoint holds, would stay.
    """
    seen = {id(each) for each in model.modules()}
    restores = [_keep_attributes(each, ATTRIBUTE_DEPTH, seen) for each in (*model.modules(), task)]
    seen = {id(each) for each in model.modules()}
    around = keep_outside(model, task, lambda value: _keep(value, ATTRIBUTE_DEPTH - 1, seen))
    return partial(_call_all, [*around, *restores])


def _keep_attributes(owner: Any, depth: int, seen: set[int]) -> Restore:
    """Return a function that gives the attributes of an object their values back."""
    if isinstance(owner, LazyModuleMixin):  # gets its sizes in a dry run
        return lambda: None
    left_out = OF_A_MODULE if isinstance(owner, nn.Module) else OF_A_TASK
    attributes = vars(owner)
    before = {key: copy_iterator(v) for key, v in attributes.items() if key not in left_out}
    inner = [_keep(value, depth - 1, seen) for value in before.values()]

    def restore() -> None:
        for key in attributes.keys() - before.keys() - left_out:
            del attributes[key]
        attributes.update(before)
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
        is_namespace = isinstance(value, dict) and "__spec__" in value  # without builtins all ends
        return None if is_namespace else _keep_items(value, depth, seen)
    if isinstance(value, tuple):
        return partial(_call_all, [_keep(item, depth - 1, seen) for item in value])
    is_own = not type(value).__module__.startswith(_NOT_OWN)
    # that of dict[str, int], a type in a variable, is the one of dict, which cannot be written
    has_own = isinstance(getattr(value, "__dict__", None), dict)
    return _keep_attributes(value, depth, seen) if is_own and has_own else None


def _keep_tensor(tensor: torch.Tensor) -> Restore | None:
    if tensor.is_inference() or tensor.nbytes > MOST_BYTES:
        return None
    version, values = tensor._version, tensor.detach().clone()

    @torch.no_grad()
    def restore() -> None:
        if tensor.dtype != values.dtype:  # as Module.to does it, such as that of a teacher
            tensor.data = values.clone()
        elif tensor._version != version and tensor.shape == values.shape:
            tensor.copy_(values)

    return restore


def _keep_module(module: nn.Module, depth: int, seen: set[int]) -> Restore:
    """Keep a module that is not a part of the model, such as a teacher."""
    inner = [_keep_tensor(tensor) for tensor in (*module.buffers(), *module.parameters())]
    new = [each for each in module.modules() if each is module or id(each) not in seen]
    seen |= {id(each) for each in new}
    return partial(_call_all, [*inner, *(_keep_attributes(each, depth - 1, seen) for each in new)])


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


# Optimizers ---------------------------------------------------------------------------------------


def keep_optimizers(optimizers: Iterable[Optimizer]) -> Restore:
    """Keep the options, state and own attributes of optimizers.

    Their state is not copied: in the block nobody steps them, but a step may call their methods.
    """
    seen: set[int] = set()
    restores: list[Restore | None] = []
    for optimizer in optimizers:
        restores.append(_keep_options(optimizer))
        seen |= {id(optimizer.state), id(optimizer.param_groups)}
        restores.append(_keep_attributes(optimizer, ATTRIBUTE_DEPTH, seen))
    return partial(_call_all, restores)


def _keep_options(optimizer: Optimizer) -> Restore:
    groups = [(g, {k: v for k, v in g.items() if k != "params"}) for g in optimizer.param_groups]
    return partial(_call_all, [partial(dict.update, *pair) for pair in groups])


def _keep_optimizer(optimizer: Optimizer) -> Restore:
    """Keep the state and the options of an optimizer that the task holds, and its parameters."""
    tensors = [p for group in optimizer.param_groups for p in group["params"]]
    inner = [_keep_options(optimizer), *map(_keep_tensor, tensors)]
    state = {p: {k: _cloned(v) for k, v in held.items()} for p, held in optimizer.state.items()}

    def restore() -> None:
        optimizer.state.clear()
        optimizer.state.update({p: dict(held) for p, held in state.items()})
        _call_all(inner)

    return restore
