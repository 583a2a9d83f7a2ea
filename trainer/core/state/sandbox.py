"""Sandbox: run a block without lasting changes to model, task, optimizers and generators.

    with sandbox(keep_passes(model), keep_attributes(model, task), keep_generators(devices)):

Each `keep_` function notes how something is, and returns a function that puts it back.
"""

from __future__ import annotations

import copy
import math
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence, Set
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from trainer.core.distributed import accelerator
from trainer.core.state.scopes import (
    HOOKS,
    Scope,
    list_surroundings,
    scope_of_task,
    scopes_of_model,
)
from trainer.core.state.walk import (
    DEPTH,
    MOST_BYTES,
    PLAIN,
    Parts,
    Restore,
    Walk,
    copy_iterator,
    left_out_of,
)

KEPT_BYTES = 2**30  # of parameters, which are copied for a pass
LARGE_PARAMETER_BYTES = 2**20  # statistics are smaller, whose operations hide what they write


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
    keep = Keeper([*model.modules(), task])
    modules = zip(model.modules(), scopes_of_model(model), strict=True)
    own = [scope for module, scope in modules if not isinstance(module, LazyModuleMixin)]
    scopes = [scope_of_task(task), *own, *list_surroundings(model, task)]
    return _all_of([keep.visit_scope(scope) for scope in scopes])


def keep_optimizers(optimizers: Iterable[Optimizer]) -> Restore:
    """Keep the options and attributes of optimizers.

    Their state is not copied: in the block nobody steps them, but a step may call their methods.
    """
    restores: list[Restore | None] = []
    for optimizer in optimizers:
        keep = Keeper([optimizer.state, optimizer.param_groups])
        options = [Scope("{}", group, {"params"}) for group in optimizer.param_groups]
        restores += [keep.visit_scope(each) for each in (*options, Scope("{}", vars(optimizer)))]
    return _all_of(restores)


class Keeper(Walk[Restore | None]):
    """Makes functions that undo later changes of values in place; None where none can come.

    What cannot be kept, such as a sparse tensor, stays as it is.
    """

    repeats = False
    _most_bytes: float = MOST_BYTES

    def visit(self, value: Any, depth: int = DEPTH) -> Restore | None:
        before = self._most_bytes
        if isinstance(value, Optimizer):
            self._most_bytes = math.inf  # its state is as large as its parameters
        try:
            return super().visit(value, depth)
        except Exception:
            return None
        finally:
            self._most_bytes = before

    def plain(self, value: Any) -> None:
        return None

    def closed(self, value: Any) -> None:
        return None

    def tensor(self, value: torch.Tensor) -> Restore | None:
        if is_lazy(value) or value.is_inference() or value.nbytes > self._most_bytes:
            return None
        version, values = value._version, value.detach().clone()

        @torch.no_grad()
        def restore() -> None:
            if value.dtype != values.dtype:  # as Module.to does it, such as that of a teacher
                value.data = values.clone()
            elif value.shape == values.shape and (
                value._version != version or not _have_same_bits(value, values)
            ):
                value.copy_(values)

        return restore

    def array(self, value: numpy.ndarray) -> Restore | None:
        is_small = value.nbytes <= self._most_bytes and value.flags.writeable
        return partial(numpy.copyto, value, value.copy()) if is_small else None

    def position(self, state: Any, restore: Restore | None) -> Restore | None:
        return restore

    def container(self, value: Any, parts: Parts[Restore | None]) -> Restore:
        inner = _all_of([restore for _, restore in parts])
        if not isinstance(value, (list, deque, set, dict)):
            return inner
        before = copy.copy(value)

        def restore() -> None:
            if not _has_same(value, before):
                value.clear()
                (value.extend if isinstance(value, (list, deque)) else value.update)(before)
            inner()

        return restore

    def owner(self, value: Any, parts: Parts[Restore | None]) -> Restore | None:
        if isinstance(value, LazyModuleMixin):  # gets its sizes in a dry run
            return None
        own = Scope("{}", getattr(value, "__dict__", {}), left_out_of(value))
        return _all_of([_keep_variables(own), *(restore for _, restore in parts)])

    def visit_scope(self, scope: Scope) -> Restore:
        """Keep variables, and what their values are."""
        restores: list[Restore | None] = [_keep_variables(scope)]
        restores += [self.visit(value, DEPTH - 1) for _, value in scope.items()]
        return _all_of(restores)


def _keep_variables(scope: Scope) -> Restore:
    """Keep which values variables have; new ones are removed, but not around task and model."""
    before = {key: copy_iterator(value) for key, value in scope.items()}

    def restore() -> None:
        values = dict(scope.items())
        for key in values.keys() - before.keys() if not scope.is_around else ():
            del scope.variables[key]
        for key, value in before.items():
            if key not in values or values[key] is not value:
                scope.variables[key] = value

    return restore


def _all_of(restores: Iterable[Restore | None]) -> Restore:
    chosen = [restore for restore in restores if restore is not None]

    def restore_all() -> None:
        with ExitStack() as stack:  # all, even if one raises
            for restore in reversed(chosen):
                stack.callback(restore)

    return restore_all


def _have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compare plain tensors, as batch norm's kernels write some without a new version."""
    is_plain = type(one) in (torch.Tensor, nn.Parameter) and one.layout is torch.strided
    if not is_plain or one.is_meta:
        return True
    bits = [
        each.detach().reshape(-1).contiguous().view(torch.uint8) for each in (one, other)
    ]  # NaN, too
    return torch.equal(*bits)


def _has_same(one: Any, other: Any) -> bool:
    """Return True if two containers have the same objects."""
    ids = [
        list(map(_identity, each.items() if isinstance(each, dict) else each))
        for each in (one, other)
    ]
    return ids[0] == ids[1]


def _identity(item: Any) -> Any:
    return tuple(map(id, item)) if isinstance(item, tuple) else id(item)
