"""Reunion: the whole model on each rank, from the parts of all ranks, to compute without them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.codec import bytes_of
from trainer.distributed import accelerator
from trainer.distributed.world import RankGroup, World
from trainer.strategy.mesh_model.materialize import copy_structure
from trainer.strategy.modules.activation_checkpoint import ActivationCheckpoint
from trainer.strategy.shards import Shard, join_boxes, list_boxes, replace_tensors

PROVED_BYTES = 2**30  # of a model whose outputs are compared at each start


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


HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def copy_modules(model: nn.Module) -> nn.Module:
    """Return a model of the same tensors without FSDP's classes and hooks.

    Its tensors can be replaced; FSDP's own must stay in their places.
    """
    made: dict[nn.Module, nn.Module] = {}
    for module in model.modules():
        kind = type(module)
        is_sharded = hasattr(module, "unshard")  # FSDP has put its class before the user's
        copied: Any = object.__new__(kind.__bases__[1] if is_sharded else kind)
        made[module] = copied
        vars(copied).update(vars(module))
        if isinstance(vars(copied).get("forward"), ActivationCheckpoint):  # of the divided module
            del vars(copied)["forward"]
        for registry in ("_parameters", "_buffers", "_modules", *HOOKS):
            vars(copied)[registry] = type(vars(module)[registry])(vars(module)[registry])
        for name in HOOKS:
            hooks = vars(copied)[name]
            for key in [k for k, hook in hooks.items() if _is_of_sharding(hook)]:
                del hooks[key]
    for copied in made.values():
        for key, child in copied._modules.items():
            copied._modules[key] = None if child is None else made[child]
    return made[model]


def _is_of_sharding(hook: Any) -> bool:
    owner = getattr(hook, "__self__", None) or getattr(hook, "func", hook)
    name = getattr(owner, "__module__", None) or type(owner).__module__
    return name.startswith(("torch.distributed.", "trainer.strategy.sharded."))


@contextmanager
def seeded(device: torch.device) -> Iterator[None]:
    """Give a loss that draws the same random numbers in each of these blocks."""
    with accelerator.fork_rng([device]):
        torch.manual_seed(0)
        yield
