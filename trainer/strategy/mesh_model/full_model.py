"""Reunion: the whole model on each rank, from the parts of all ranks, to compute without them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from trainer.distributed.world import RankGroup, World
from trainer.strategy.mesh_model.materialize import copy_structure
from trainer.strategy.shards import Shard, join_boxes, list_boxes, replace_tensors

PROVED_BYTES = 2**30  # of a model whose outputs are compared at each start
LOOSER = 3  # for gradients
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}  # relative; narrower types: 0.1

LEAST_OF_WEIGHTS = 1e-4  # relative: sums of 32 bits
ALONE = (
    "compute each value from its own row and position (shift targets in split_batch), and read no"
    " parameters in loss"
)
PROVED = (  # the outputs, the loss, and its weight, of the divided model beside the whole one
    (
        "the outputs of the divided model are {} from those of the whole",
        "check tensor_plan, and take positions as an input",
    ),
    ("the loss of the divided model is {} from that of the whole", ALONE),
    ("the weight of the loss of the divided model is {} from that of the whole", ALONE),
)


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
        dist.broadcast(sent, source)
        return sent

    return _filled(structure, join_boxes(every, shards, world.rank, move))


def _filled(structure: nn.Module, values: Mapping[str, torch.Tensor]) -> nn.Module:
    def make(name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_parameter = isinstance(tensor, nn.Parameter)
        return nn.Parameter(values[name], tensor.requires_grad) if is_parameter else values[name]

    model = copy_structure(structure)
    replace_tensors(model, make)
    return model.train(structure.training)


@contextmanager
def seeded(device: torch.device) -> Iterator[None]:
    """Give a loss that draws the same random numbers in each of these blocks."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        yield


def distance(outputs: Any, expected: Any) -> float:
    """Return the largest difference of two trees of tensors, relative to the largest value.

    Infinities and NaNs must be at the same places; the other values are compared.
    """
    most = 0.0
    for one, other in zip(tree_leaves(outputs), tree_leaves(expected), strict=True):
        if isinstance(other, torch.Tensor) and other.is_floating_point() and other.numel():
            if one.shape != other.shape:
                return float("inf")
            is_finite = other.isfinite()
            if not torch.equal(one.isfinite(), is_finite):
                return float("inf")
            others = [t[~is_finite].nan_to_num(0.0, 1.0, -1.0) for t in (one, other)]
            if not torch.equal(*others):
                return float("inf")
            one, other = one[is_finite].double(), other[is_finite].double()
            if other.numel():
                scale = other.abs().max().clamp_min(1e-30)
                most = max(most, float((one - other).abs().max() / scale))
    return most


def explain_values(found: Sequence[float], limit: float) -> str:
    """Return a line if a divided model is not the whole one, else an empty one.

    `found` are the relative differences of its outputs, its loss, and the weight of its loss.
    """
    limits = (limit, limit, LEAST_OF_WEIGHTS)
    for worst, most, (what, advice) in zip(found, limits, PROVED, strict=True):
        if not worst <= most:
            return f"{what.format(f'{worst:.1e}')}; {advice}"
    return ""


def explain_gradient(name: str, worst: float) -> str:
    """Return a line if a parameter's gradient is not that of the whole model."""
    if not name:
        return ""
    what = f"the gradient of {name} in the divided model is {worst:.1e} from that of the whole"
    advice = "check the tensor_plan of its layer and of those after it, and its hooks"
    return f"{what}; {advice}"
