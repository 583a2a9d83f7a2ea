"""Outputs that share the memory of a gathered parameter, which FSDP2 frees after a forward pass.

Reading one ended all ranks with SIGSEGV (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from trainer.errors import ConfigError

ADVICE = "return .clone() of it"


def is_freed(tensor: torch.Tensor) -> bool:
    """Return True for a tensor with elements whose memory was freed."""
    has_memory = not tensor.is_meta and torch._C._has_storage(tensor)
    return bool(has_memory and tensor.numel() and not tensor.untyped_storage().nbytes())


def gathered_parameters(unit: Any) -> Iterator[Any]:
    """Yield what FSDP2 keeps for each parameter of a unit."""
    for group in parameter_groups(unit):
        yield from group.fsdp_params


def parameter_groups(unit: Any) -> Iterator[Any]:
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    yield from filter(None, groups)


@contextmanager
def outputs_checked(
    units: Iterable[nn.Module], modules: Mapping[nn.Module, str], names: Mapping[torch.Tensor, str]
) -> Iterator[None]:
    """Raise ConfigError in the block for an output of a unit that is a part of its parameters.

    `modules` and `names` are the names of modules and of sharded parameters.
    """

    def check(unit: nn.Module, _: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and is_freed(leaf):
                what = f"the output of {modules.get(unit) or 'the model'}"
                of = _find_parameter(unit, leaf, names)
                why = f"{what} shares memory with {of}, which fsdp frees after the forward pass"
                raise ConfigError(f"strategy.mesh: {why}; {ADVICE}")

    hooks = [unit.register_forward_hook(check) for unit in units]  # after FSDP2's
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _find_parameter(unit: nn.Module, leaf: torch.Tensor, names: Mapping[torch.Tensor, str]) -> str:
    memory = leaf.untyped_storage()._cdata
    for each in gathered_parameters(unit):
        whole = getattr(each, "_unsharded_param", None)
        if whole is not None and whole.untyped_storage()._cdata == memory:
            return f"the parameter {names.get(each.sharded_param, '')}".rstrip()
    return "a parameter"
