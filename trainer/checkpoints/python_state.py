"""Python state: attributes that training changes and that a checkpoint does not hold.

A task that counts in an attribute, or an optimizer that keeps a number in one, starts from the
first value again after a resume. Such attributes are found by comparing fingerprints, and named.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.strategy.mesh_model.full_model import HOOKS

PLAIN = (bool, int, float, complex, str, bytes, type(None))
OF_A_MODULE = {*vars(nn.Module()), "_flat_weights"}  # the latter are an LSTM's parameters
OF_AN_OPTIMIZER = {
    *vars(torch.optim.SGD([torch.zeros(1)])),
    *("grad_scale", "found_inf", "_opt_called", "_step_count"),
    *("_need_device_dtype_check_for_fused", "_step_supports_amp_scaling"),
}
OF_A_TASK = {"config", "world", "_run"}
MOST_VALUES = 1_000  # compared of a container or tensor
MOST_NODES = 20_000  # compared of an attribute
DEEPEST = 6


class PythonState:
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
        return [name for name, now in self._read().items() if self._before.get(name) != now]

    def _roots(self) -> Iterator[tuple[str, object, set[str]]]:
        """Yield the name of each object, the object, and attributes to leave out."""
        yield type(self._task).__name__, self._task, OF_A_TASK
        for optimizer in self._optimizers:
            yield type(optimizer).__name__, optimizer, OF_AN_OPTIMIZER
        if hasattr(self._schedule, "__dict__"):
            yield type(self._schedule).__name__, self._schedule, set()
        for name, module in self._model.named_modules():
            # the old nn.utils.weight_norm computes `weight` from the parameter `weight_g`
            made = {name.rpartition("_")[0] for name in dict(module._parameters)}
            yield f"model.{name}".rstrip("."), module, OF_A_MODULE | made

    def _read(self) -> dict[str, Any]:
        held = [*self._model.modules(), *self._model.parameters(), *self._model.buffers()]
        reader = _Reader([*held, *self._optimizers], self._packages)
        prints: dict[str, Any] = {}
        for place, root, known in self._roots():
            for key, value in list(vars(root).items()):
                if key not in known:
                    prints[f"{place}.{key}"] = reader.read(value)
            if isinstance(root, nn.Module):
                prints[f"the hooks of {place}"] = [len(getattr(root, hooks)) for hooks in HOOKS]
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
        self._left = MOST_NODES
        print_ = self._read(value, 0)
        return print_ if self._left > 0 else type(value).__name__

    def _read(self, value: Any, depth: int) -> Any:
        self._left -= 1
        if isinstance(value, PLAIN):
            return repr(value)
        if id(value) in self._held or depth > DEEPEST or self._left < 0:
            return type(value).__name__
        if isinstance(value, torch.Tensor):
            return _sample(value)
        if isinstance(value, (list, tuple, deque)):
            return len(value), [self._read(v, depth + 1) for v in islice(value, MOST_VALUES)]
        if isinstance(value, (set, frozenset)):
            return len(value), sorted(str(self._read(v, depth + 1)) for v in value)
        if isinstance(value, dict):
            pairs = islice(value.items(), MOST_VALUES)
            return len(value), [[self._read(each, depth + 1) for each in pair] for pair in pairs]
        if isinstance(value, random.Random):
            return hash(value.getstate())
        if isinstance(value, torch.Generator):
            return value.get_state().tolist()
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
            yield {key: v for key, v in vars(value).items() if key not in OF_AN_OPTIMIZER}
        elif type(value).__module__.partition(".")[0] in self._packages:
            yield getattr(value, "__dict__", None)


def _sample(tensor: torch.Tensor) -> Any:
    """Return the number of changes of a tensor, which `.data` hides, and some of its values."""
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
    if not is_plain or tensor.is_meta or tensor.is_inference() or tensor.grad_fn is not None:
        return type(tensor).__name__
    flat = tensor.detach().reshape(-1)
    values = flat[:: max(1, len(flat) // MOST_VALUES)].tolist()
    return tuple(tensor.shape), tensor._version, repr(values)


def _sample_numpy(value: Any) -> Any:
    if hasattr(value, "bit_generator"):
        return repr(value.bit_generator.state)
    if hasattr(value, "get_state"):
        return repr(value.get_state())
    if getattr(value, "size", 1) > 1:
        value = value.reshape(-1)[:: max(1, value.size // MOST_VALUES)].tolist()
    return repr(value)
