"""A model of torch's fake tensors, divided as in a run.

Fake tensors have shapes, dtypes, a device and storages, but no memory. Unlike tensors of the meta
device they choose the kernels of a CPU, under autocast too.
"""

from __future__ import annotations

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from trainer.strategy.base import Blueprint
from trainer.strategy.mesh import Mesh
from trainer.strategy.mesh_model.context_parallel import Context
from trainer.strategy.mesh_model.materialize import Values
from trainer.strategy.mesh_model.partition import Partition
from trainer.strategy.shards import replace_tensors
from trainer.strategy.tensor_parallel.plan import MatrixPart, divide_sequence


class FakeModel:
    """The model of a blueprint, divided as the tensor plan says: `module`, with `blocks`.

    `partial` are the parameters whose gradients the ranks of the tensor axis have in parts. `whole`
    maps the parameters to the undivided ones. Raises ConfigError where a real start does.
    """

    def __init__(self, blueprint: Blueprint, mesh: Mesh, mode: FakeTensorMode):
        model = blueprint.model
        groups = blueprint.world.groups
        if mesh.divides_model:  # which needs a model on the meta device
            Values(model, blueprint.world, blueprint.precision.dtype)
        self.blocks = blueprint.blocks
        self.context = Context(groups["context"]) if mesh.context > 1 else None
        self.partition = Partition(blueprint, mesh, self.context)
        for numbers in self.partition.blocks_of if blueprint.config.strategy.sequence else ():
            divide_sequence([self.blocks[number] for number in numbers], groups["tensor"])
        self.partial = self.partition.partial  # while its model has the parameters that it knows
        cuts = [self.partition.cuts.get(p) for p in model.parameters()]
        with mode:
            replace_tensors(model, lambda _, tensor: _fake(tensor, blueprint))
            every = zip(model.parameters(), cuts, strict=True)
            self.whole = {p: _undivided(p, cut) for p, cut in every}
        self.module = model


def _fake(tensor: torch.Tensor, blueprint: Blueprint) -> torch.Tensor:
    """Return a tensor without values, of the run's dtype and memory format."""
    dtype = blueprint.precision.dtype if tensor.is_floating_point() else tensor.dtype
    form = torch.contiguous_format
    if blueprint.config.strategy.channels_last and tensor.dim() == 4:
        form = torch.channels_last
    made = torch.empty(tensor.shape, dtype=dtype, memory_format=form)
    if isinstance(tensor, nn.Parameter):
        made = nn.Parameter(made, tensor.requires_grad)
    vars(made).update(vars(tensor))  # such as a mark for the optimizer
    return made


def _undivided(part: nn.Parameter, cut: MatrixPart | None) -> nn.Parameter:
    if cut is None:
        return part
    return nn.Parameter(torch.empty(cut.shape, dtype=part.dtype), part.requires_grad)
