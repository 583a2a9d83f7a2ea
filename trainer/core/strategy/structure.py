"""The structure of a model without its values, on torch's meta device."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer.base.errors import ConfigError
from trainer.core.state.walk import OF_A_MODULE
from trainer.core.strategy.tensor_shards import replace_tensors

DEPTH_OF_CONTAINERS = 3
PROVED_BYTES = 2**30  # of a model whose outputs are compared at each start


def build_structure(build: Callable[[], nn.Module], task: object) -> nn.Module | None:
    """Build a model without values on torch's meta device; None if it cannot be built there.

    It cannot if building reads values, or makes tensors that are neither parameters nor buffers,
    or gives the task or a layer a tensor or module of its own, such as a teacher in a list.
    """
    try:
        with torch.device("meta"):
            model = build()
    except Exception:  # any error of the task's code: it is built for real then, where it shows
        return None
    if not isinstance(model, nn.Module):
        return None
    seen = {id(each) for each in (*model.modules(), *model.parameters(), *model.buffers())}
    attributes = [v for key, v in vars(task).items() if key != "_run"]
    attributes += [
        v for m in model.modules() for key, v in vars(m).items() if key not in OF_A_MODULE
    ]
    is_own = any(
        tensor.is_meta
        for value in attributes
        for tensor in _tensors_of(value, seen, DEPTH_OF_CONTAINERS)
    )
    return None if is_own else model


def _tensors_of(value: Any, seen: set[int], depth: int) -> Iterator[torch.Tensor]:
    """Yield the tensors in a value, in containers and in modules, that were not `seen`."""
    if id(value) in seen:
        return
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, nn.Module):
        yield from (*value.parameters(), *value.buffers())
    elif isinstance(value, (list, tuple, dict, deque)) and depth:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _tensors_of(item, seen, depth - 1)


def without_values(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a tensor of the same form on the meta device, with the marks of a parameter."""
    empty: torch.Tensor = torch.empty_like(tensor, device="meta", dtype=dtype)
    if isinstance(tensor, nn.Parameter):
        empty = nn.Parameter(empty, tensor.requires_grad)
    vars(empty).update(vars(tensor))  # such as a mark for the optimizer
    return empty


def drop_values(model: nn.Module) -> None:
    """Leave a model its structure only. Raises ConfigError for one that cannot be divided."""
    check_divisible(model)
    replace_tensors(model, lambda _, tensor: without_values(tensor))


def check_divisible(model: nn.Module) -> None:
    """Raise ConfigError for a lazy layer, whose parameters do not exist yet, for TorchScript, and
    for a hook on a parameter, which is replaced."""
    for name, module in model.named_modules():
        if any(is_lazy(p) for p in module.parameters(recurse=False)):
            raise ConfigError(f"""strategy.mesh: {name} is a {type(module).__name__};
                give its sizes, or use ddp""")
        if isinstance(module, torch.jit.ScriptModule):  # takes no hooks, and is not copied
            raise ConfigError(f"""strategy.mesh: {name} is TorchScript, which cannot be divided;
                leave torch.jit out, or use ddp""")
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ConfigError(f"""strategy.mesh: a divided {name} would lose
                the hook on its gradient; leave the hook out, or use ddp""")
