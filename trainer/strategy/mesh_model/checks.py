"""Checks of a divided model after its first pass, on all ranks together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import nn

from trainer.distributed.world import World
from trainer.errors import ConfigError
from trainer.strategy.mesh_model.gradient_sums import GradientSums
from trainer.strategy.mesh_model.tensors import DividedTensors
from trainer.strategy.modules.dry_run import changed_buffers

COPIED = 1e-2  # a smaller relative difference of the gradients of copies is rounding


@torch.no_grad()
def check_copies(tensors: DividedTensors, sums: GradientSums, world: World) -> None:
    """Raise ConfigError if the ranks of the tensor axis find other gradients of a whole parameter.

    Such a parameter is between a layer of columns and one of rows: each rank uses it on the outputs
    of its own columns.
    """
    axis = world.groups["tensor"]
    if axis.size == 1:
        return
    names = [name for name, p in tensors.structure.named_parameters() if p.requires_grad]
    ends = torch.zeros(4, len(names), dtype=torch.float64, device=world.device)
    for number, name in enumerate(names):
        part = tensors.parameters.get(name)
        if part is not None and part.grad is not None and sums.is_copied(name):
            gradient = part.grad.double()
            each = torch.stack([gradient.norm(), gradient.sum()])
            ends[:, number] = torch.cat([each, -each])
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=axis.group)
    most, spread = ends[0], (ends[:2] + ends[2:]).amax(0)
    partial = (spread > COPIED * most.clamp_min(COPIED * most.max())).byte()
    dist.all_reduce(partial, dist.ReduceOp.MAX)
    for name in (names[number] for number in partial.nonzero().flatten().tolist()):
        why = f"each rank would find a part of the gradient of {name}"
        advice = "use it outside of the divided layers, or leave these out of tensor_plan"
        raise ConfigError(f"strategy.mesh.tensor={axis.size}: {why}; {advice}")


def check_shared(
    module: nn.Module, shared: Sequence[str], before: Mapping[str, torch.Tensor], world: World
) -> None:
    """Raise ConfigError if a buffer of `shared`, which several stages use, has changed."""
    changed = set(changed_buffers(module, before))
    named = {name: b in changed for name, b in module.named_buffers()}
    flags = torch.tensor([named.get(name, False) for name in shared])
    if len(flags):
        every = flags.byte().to(world.device)
        dist.all_reduce(every, dist.ReduceOp.MAX)
        for number in every.nonzero().flatten().tolist():
            why = f"{shared[number]} changes, and several stages use it"
            raise ConfigError(f"strategy.mesh.pipeline: {why}; use it in one place")
