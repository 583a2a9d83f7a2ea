"""The check that a divided model has the outputs, the loss and the gradients of the whole one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from trainer.base.same import DIVIDED, LOOSER, SMALL
from trainer.base.same.distance import apart, squares
from trainer.core.distributed.world import World
from trainer.core.hook_calls import call
from trainer.core.strategy.base import ObjectiveProtocol, PrecisionProtocol
from trainer.core.strategy.mesh_sizes import Mesh
from trainer.core.strategy.modules.dry_run import perturb
from trainer.core.strategy.tensor_shards import read_into, slices
from trainer.mesh.full_model import seeded
from trainer.mesh.mesh_tensors import DividedTensors

LEAST_OF_WEIGHTS = 1e-4  # relative: sums of 32 bits
LOSS_ADVICE = (
    "compute each value from its own row and position (shift targets in split_batch), and read no"
    " parameters in loss"
)
COMPARED = (  # the outputs, the loss, and its weight, of the divided model beside the whole one
    (
        "the outputs of the divided model are {} from those of the whole",
        "check tensor_plan, and take positions as an input",
    ),
    ("the loss of the divided model is {} from that of the whole", LOSS_ADVICE),
    ("the weight of the loss of the divided model is {} from that of the whole", LOSS_ADVICE),
)


class ModelSource:
    """The parameters of a whole model, to be read in parts."""

    def __init__(self, model: nn.Module):
        self._tensors = dict(model.named_parameters(remove_duplicate=False))

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._tensors.items()}

    def read(self, name: str, offset: Sequence[int], size: Sequence[int]) -> torch.Tensor:
        return self._tensors[name].detach()[slices(offset, size)]

    def skip(self, name: str) -> None:
        pass


@contextmanager
def perturbed(tensors: DividedTensors) -> Iterator[nn.Module]:
    """Change the weights of a divided model a little in the block; yield the whole model.

    Zeros, as of a projection that starts with them, would hide what is behind them. A collective.
    """
    whole = tensors.reunited()
    noise = torch.Generator().manual_seed(0)
    for parameter in whole.parameters():
        perturb(parameter.data, noise)
    weights_before = {name: part.detach().clone() for name, part in tensors.parameters.items()}
    read_into(tensors.shards(), ModelSource(whole))
    tensors.refresh()
    try:
        yield whole
    finally:
        with torch.no_grad():
            for name, part in tensors.parameters.items():
                part.copy_(weights_before[name])
        tensors.refresh()


class DivisionCheck:
    """Compares a divided model with the whole one, on the same rows."""

    def __init__(
        self,
        whole: nn.Module,
        mesh: Mesh,
        world: World,
        precision: PrecisionProtocol,
        objective: ObjectiveProtocol,
    ):
        self._whole = whole
        self._mesh = mesh
        self._world = world
        self._precision = precision
        self._objective = objective
        self._limit = DIVIDED.narrower if precision.is_narrow else DIVIDED.of(precision.dtype)

    @torch.no_grad()
    def compare_values(self, inputs: Any, targets: Any, outputs: Any, own: torch.Tensor) -> str:
        """Return a line if the divided model's outputs, or sums of its loss, are others.

        A collective.
        """
        distances = torch.zeros(3, dtype=torch.float64, device=self._world.device)
        if self._mesh.has_loss:  # all ranks that call the loss, as it may have collectives
            with seeded(self._world.device), self._precision.autocast():
                expected = call(self._whole, inputs)
                if self._mesh.is_counted:
                    distances[0] = trees_apart(expected, outputs)
                sums = self._objective.sums(expected, targets)
            if self._mesh.is_counted:
                distances[1:] = (own - sums)[[0, 2]].abs() / sums[1:].abs().clamp_min(SMALL)
        dist.all_reduce(distances, dist.ReduceOp.MAX)
        limits = (self._limit, self._limit, LEAST_OF_WEIGHTS)
        for worst, most, (what, advice) in zip(distances.tolist(), limits, COMPARED, strict=True):
            if not worst <= most:
                return f"{what.format(f'{worst:.1e}')}; {advice}"
        return ""

    def gradients(self, inputs: Any, targets: Any) -> dict[str, torch.Tensor]:
        """Return the whole model's gradients on the rows of all ranks. A collective."""
        named = {name: p for name, p in self._whole.named_parameters() if p.requires_grad}
        gradients = {name: torch.zeros_like(p) for name, p in named.items()}
        if self._mesh.has_loss:
            with seeded(self._world.device):
                with self._precision.autocast():
                    total = self._objective.total(call(self._whole, inputs), targets)
                root = self._precision.root(total, self._objective.scale)
                own_gradients = torch.autograd.grad(
                    total, list(named.values()), root, allow_unused=True
                )
            if not (self._mesh["tensor"] or self._mesh["context"]):
                named_gradients = zip(named, own_gradients, strict=True)
                gradients |= {name: g.contiguous() for name, g in named_gradients if g is not None}
        for gradient in gradients.values():
            dist.all_reduce(gradient)
        return gradients

    @torch.no_grad()
    def compare_gradients(
        self, tensors: DividedTensors, gradients: Mapping[str, torch.Tensor]
    ) -> str:
        """Return a line about the gradient that differs most from the whole model's on any rank.

        A collective.
        """
        limit = LOOSER * self._limit
        norms = [gradient.double().norm() for gradient in gradients.values()]
        total = torch.stack(norms).norm()
        if not total.isfinite():  # the scale of fp16 may be too large at first
            return ""
        distances = torch.zeros(len(gradients), dtype=torch.float64, device=total.device)
        for index, (name, whole) in enumerate(gradients.items()):
            part = tensors.parameters.get(name)
            if part is None or part.grad is None:
                continue
            square = torch.zeros_like(total)
            for box, offset in tensors.shard_of(part).holding(part.grad).boxes():
                other = whole[slices(offset, box.shape)]
                square += squares(box, other)[0]
            least = torch.maximum(norms[index], limit * total).clamp_min(SMALL)
            distances[index] = (square.sqrt() / least).nan_to_num(float("inf"))
        dist.all_reduce(distances, dist.ReduceOp.MAX)
        worst = int(distances.argmax())
        if float(distances[worst]) <= limit:
            return ""
        name = list(gradients)[worst]
        what = f"the gradient of {name} in the divided model is {distances[worst]:.1e}"
        advice = "check the tensor_plan of its layer and of those after it, and its hooks"
        return f"{what} from that of the whole; {advice}"


def trees_apart(tree: Any, other: Any) -> float:
    """Return the largest `apart` of the floating-point tensors of two trees."""
    pairs = zip(tree_leaves(tree), tree_leaves(other), strict=True)
    return max(
        (
            apart(one, two)
            for one, two in pairs
            if isinstance(one, torch.Tensor) and one.is_floating_point() and one.numel()
        ),
        default=0.0,
    )
