"""The whole model on each rank from the parts of all, and its parts from a model of rank 0.

Rank 0 builds the model, so the initial weights have the same bits on every mesh, and a host holds
one model at a time. Building on torch's meta device everywhere would not do: `trunc_normal_`,
`orthogonal_` and others silently do nothing there (torch 2.13), and DTensors draw the same numbers
on every shard.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.base.codec import bytes_of
from trainer.base.errors import ConfigError
from trainer.core.distributed.world import RankGroup, World
from trainer.core.state.sandbox import keep_generators, sandbox
from trainer.core.state.scopes import HOOKS
from trainer.core.strategy.modules.tensor_memory import ActivationCheckpoint, find_narrow
from trainer.core.strategy.structure import check_divisible, without_values
from trainer.core.strategy.tensor_shards import Shard, join_boxes, list_boxes, replace_tensors
from trainer.mesh.split_plan import MatrixPart


@torch.no_grad()
def reunite(structure: nn.Module, shards: Mapping[str, Shard], world: World) -> nn.Module:
    """Return the whole model with the values of all ranks' parts. A collective.

    `shards` are this rank's parts of all parameters and buffers.
    """
    ranks = tuple(range(world.world_size))
    every = RankGroup(ranks, world.rank, dist.group.WORLD).gather(list_boxes(shards))

    def move(box: torch.Tensor, source: int) -> torch.Tensor:
        sent = torch.empty(box.shape, dtype=box.dtype, device=world.device)
        if source == world.rank:
            sent.copy_(box)
        dist.broadcast(bytes_of(sent), source)
        return sent

    return _filled(structure, join_boxes(every, shards, world.rank, move))


def _filled(structure: nn.Module, values: Mapping[str, torch.Tensor]) -> nn.Module:
    def make(name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(values[name], tensor.requires_grad) if is_parameter else values[name]

    model = copy_structure(structure)
    replace_tensors(model, make)
    return model.train(structure.training)


def copy_modules(model: nn.Module) -> nn.Module:
    """Return a model of the same tensors without FSDP's classes and hooks.

    Its tensors can be replaced; FSDP's own must stay in their places.
    """
    copies: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        kind = type(module)
        is_sharded = hasattr(module, "unshard")  # FSDP has put its class before the user's
        copied: Any = object.__new__(kind.__bases__[1] if is_sharded else kind)
        copies[module] = copied
        vars(copied).update(vars(module))
        if isinstance(vars(copied).get("forward"), ActivationCheckpoint):  # of the divided module
            del vars(copied)["forward"]
        for registry in ("_parameters", "_buffers", "_modules", *HOOKS):
            vars(copied)[registry] = type(vars(module)[registry])(vars(module)[registry])
        for name in HOOKS:
            hooks = vars(copied)[name]
            for key in [k for k, hook in hooks.items() if _is_of_sharding(hook)]:
                del hooks[key]
    for copied in copies.values():
        for key, child in copied._modules.items():
            copied._modules[key] = None if child is None else copies[child]
    return copies[model]


def _is_of_sharding(hook: Any) -> bool:
    owner = getattr(hook, "__self__", None) or getattr(hook, "func", hook)
    name = getattr(owner, "__module__", None) or type(owner).__module__
    return name.startswith(("torch.distributed.", "trainer.mesh.fully_shard"))


@contextmanager
def seeded(device: torch.device) -> Iterator[None]:
    """Give a loss that draws the same random numbers in each of these blocks."""
    with sandbox(keep_generators([device])):
        torch.manual_seed(0)
        yield


Take = Callable[[torch.Tensor], "tuple[MatrixPart | None, bool]"]


class Values:
    """The values of a model's parameters and buffers, kept on rank 0 until they are handed over."""

    def __init__(
        self,
        model: nn.Module,
        world: World,
        dtype: torch.dtype | None = None,
        autocast: torch.dtype | None = None,
    ):
        """Take the values out of a model, which keeps its structure on the meta device.

        Floating-point tensors get `dtype`, but those that `find_narrow` finds for `autocast`.
        Raises ConfigError for a model that cannot be divided, as `check_divisible` does.
        """
        self._device = world.device
        self._real: dict[torch.Tensor, torch.Tensor] = {}
        self._filled: dict[torch.Tensor, Any] = {}
        check_divisible(model)
        self._is_kept = world.rank == 0
        self._dtype = dtype
        self._narrow = find_narrow(model, autocast)
        replace_tensors(model, self._take_value)

    def _take_value(self, _: str, tensor: torch.Tensor) -> torch.Tensor:
        is_converted = tensor.is_floating_point() and tensor not in self._narrow
        dtype = self._dtype if is_converted and self._dtype is not None else tensor.dtype
        empty = without_values(tensor, dtype)
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
        received: torch.Tensor = torch.empty(whole.shape, dtype=whole.dtype, device=self._device)
        if (real := self._real.pop(whole, None)) is not None:
            received.copy_(real)
        dist.broadcast(bytes_of(received), 0)
        if not is_held:
            return tensor
        if cut is not None:
            received = cut.part(received).contiguous()
        if isinstance(tensor, nn.Parameter):
            received = nn.Parameter(received, tensor.requires_grad)
        vars(received).update(vars(tensor))
        return received


def copy_structure(model: nn.Module) -> nn.Module:
    """Return a copy of a model on the meta device, with the marks of its parameters."""
    structure = copy.deepcopy(model)
    for old, new in zip(model.parameters(), structure.parameters(), strict=True):
        vars(new).update(vars(old))
    return structure


def inner_first(model: nn.Module, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the blocks, inner ones first.

    Raises ConfigError for a block that shares a parameter with the rest of the model: FSDP would
    separate the two.
    """
    names = {module: name for name, module in model.named_modules()}
    names_of: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(parameter, []).append(name)
    for block in blocks:
        prefix = f"{names[block]}."
        for parameter in block.parameters():
            outside = [name for name in names_of[parameter] if not name.startswith(prefix)]
            if outside:
                raise ConfigError(f"""blocks(model):
                    {names[block]} shares a parameter with {outside[0]}; leave it out of blocks""")
    return sorted(blocks, key=lambda block: -names[block].count("."))
