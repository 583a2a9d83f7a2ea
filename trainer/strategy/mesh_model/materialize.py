"""Values of a divided model: rank 0 builds it, and every rank gets each tensor when it is cut.

So the initial weights have the same bits on every mesh, and a host holds one model at a time.
Building on torch's meta device everywhere would not do: `trunc_normal_`, `orthogonal_` and others
silently do nothing there (torch 2.13), and DTensors draw the same numbers on every shard.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from trainer.codec import bytes_of
from trainer.distributed.world import World
from trainer.errors import ConfigError
from trainer.strategy.shards import replace_tensors
from trainer.strategy.tensor_parallel.plan import MatrixPart

Take = Callable[[torch.Tensor], "tuple[MatrixPart | None, bool]"]


def build_structure(build: Callable[[], nn.Module], task: object) -> nn.Module | None:
    """Build a model without values on torch's meta device; None if it cannot be built there.

    It cannot if building reads values, or makes tensors that are neither parameters nor buffers,
    or gives the task a tensor or module, such as a teacher.
    """
    try:
        with torch.device("meta"):
            model = build()
    except Exception:  # any error of the task's code: it is built for real then, where it shows
        return None
    kept = [v for key, v in vars(task).items() if key != "_run"]
    tensors = [v for module in model.modules() for v in vars(module).values()] + kept
    for teacher in (v for v in kept if isinstance(v, nn.Module) and v is not model):
        tensors += [*teacher.parameters(), *teacher.buffers()]
    if any(isinstance(tensor, torch.Tensor) and tensor.is_meta for tensor in tensors):
        return None
    return model


class Values:
    """The values of a model's parameters and buffers, kept on rank 0 until they are handed over."""

    def __init__(self, model: nn.Module, world: World, dtype: torch.dtype):
        """Take the values out of a model, which keeps its structure on the meta device.

        Raises ConfigError for a lazy layer, whose parameters do not exist yet, and for a hook on a
        parameter, which is replaced.
        """
        self._device = world.device
        self._dtype = dtype
        self._real: dict[torch.Tensor, torch.Tensor] = {}
        self._filled: dict[torch.Tensor, Any] = {}
        for name, module in model.named_modules():
            if any(is_lazy(p) for p in module.parameters(recurse=False)):
                given = f"{name} is a {type(module).__name__}"
                raise ConfigError(f"strategy.mesh: {given}; give its sizes, or use ddp")
        for name, parameter in model.named_parameters():
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                why = f"a divided {name} would lose the hook on its gradient"
                raise ConfigError(f"strategy.mesh: {why}; leave the hook out, or use ddp")
        self._is_kept = world.rank == 0
        replace_tensors(model, self._take_value)

    def _take_value(self, _: str, tensor: torch.Tensor) -> torch.Tensor:
        is_converted = tensor.is_floating_point()
        dtype = self._dtype if is_converted else tensor.dtype
        empty: torch.Tensor = torch.empty_like(tensor, device="meta", dtype=dtype)
        if isinstance(tensor, nn.Parameter):
            empty = nn.Parameter(empty, tensor.requires_grad)
        vars(empty).update(vars(tensor))  # such as a mark for the optimizer
        if self._is_kept:
            self._real[empty] = tensor.detach()
        return empty

    def fill(self, model: nn.Module, take: Take) -> None:
        """Give the tensors of a model, or a part of it, their values, sent by rank 0. A collective.

        `take(empty)` returns the cut of a tensor that has been divided, else None, and whether this
        rank has a part of it.
        """

        def fill(_: str, tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_meta:
                return tensor
            if tensor not in self._filled:  # sent once, also to ranks that have no part of it
                self._filled[tensor] = self._received(tensor, *take(tensor))
            return self._filled[tensor]

        replace_tensors(model, fill)

    def _received(
        self, tensor: torch.Tensor, cut: MatrixPart | None, is_held: bool
    ) -> torch.Tensor:
        whole = tensor if cut is None else cut.source
        made: torch.Tensor = torch.empty(whole.shape, dtype=whole.dtype, device=self._device)
        if (real := self._real.pop(whole, None)) is not None:
            made.copy_(real)
        dist.broadcast(bytes_of(made), 0)
        if not is_held:
            return tensor
        if cut is not None:
            made = cut.part(made).contiguous()
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
        vars(made).update(vars(tensor))
        return made


def copy_structure(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device, with the marks of its parameters."""
    made = copy.deepcopy(model)
    for old, new in zip(model.parameters(), made.parameters(), strict=True):
        vars(new).update(vars(old))
    return made


def inner_first(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks, inner ones first.

    Raises ConfigError for a block that shares a parameter with the rest of the model: FSDP would
    separate the two.
    """
    names = {module: name for name, module in model.named_modules()}
    holders: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        holders.setdefault(parameter, []).append(name)
    for block in blocks:
        prefix = f"{names[block]}."
        for parameter in block.parameters():
            outside = [name for name in holders[parameter] if not name.startswith(prefix)]
            if outside:
                why = f"shares a parameter with {outside[0]}; leave it out of blocks"
                raise ConfigError(f"blocks(model): {names[block]} {why}")
    return sorted(blocks, key=lambda block: -names[block].count("."))
