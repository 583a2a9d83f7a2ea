"""Proof of a divided model's gradients: they are those of the whole model, at stirred weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn

from trainer.strategy.mesh_model.tensors import DividedTensors
from trainer.strategy.modules.dry_run import stir
from trainer.strategy.shards import read_into, slices


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
def stirred(tensors: DividedTensors) -> Iterator[nn.Module]:
    """Change the weights of a divided model a little in the block; yield the whole model.

    Zeros, as of a projection that starts with them, would hide what is behind them. A collective.
    """
    whole = tensors.reunited()
    noise = torch.Generator().manual_seed(0)
    for parameter in whole.parameters():
        stir(parameter.data, noise)
    kept = {name: part.detach().clone() for name, part in tensors.parameters.items()}
    read_into(tensors.shards(), ModelSource(whole))
    tensors.refresh()
    try:
        yield whole
    finally:
        with torch.no_grad():
            for name, part in tensors.parameters.items():
                part.copy_(kept[name])
        tensors.refresh()


@torch.no_grad()
def find_other_gradient(
    tensors: DividedTensors, gradients: Mapping[str, torch.Tensor], limit: float
) -> tuple[str, float]:
    """Return the parameter whose gradient differs most on any rank, and how much; or no name.

    `gradients` are those of the whole model by name, on the ranks that have computed them for
    their rows, elsewhere zeros. A collective.
    """
    for gradient in gradients.values():
        dist.all_reduce(gradient)
    squares = [gradient.double().square().sum() for gradient in gradients.values()]
    total = torch.stack(squares).sum().sqrt()
    found = torch.zeros(len(gradients), dtype=torch.float64, device=total.device)
    for number, (name, whole) in enumerate(gradients.items()):
        part = tensors.parameters.get(name)
        if part is None or part.grad is None:
            continue
        apart = torch.zeros_like(total)
        for box, offset in tensors.shard_of(part).holding(part.grad).boxes():
            other = whole[slices(offset, box.shape)]
            apart += (box.double() - other.double()).square().sum()
        found[number] = apart.sqrt() / torch.maximum(squares[number].sqrt(), limit * total)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    worst = int(found.nan_to_num(float("inf")).argmax())
    size = float(found[worst])
    return ("", 0.0) if size <= limit else (list(gradients)[worst], size)
