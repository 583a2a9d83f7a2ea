"""Parameters and buffers of a rank of each stage; without a pipeline there is one stage."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from trainer.plan.fake_model import FakeModel
from trainer.plan.trial import Trial
from trainer.strategy.cost import Parts
from trainer.strategy.mesh_model.materialize import inner_first


@dataclass(frozen=True)
class StageTensors:
    """Parameters and buffers of the first rank of a stage, of which no rank of it has more.

    `parts` maps the parameters of the model that the stage uses to the rank's part of each.
    `units` are those of FSDP: the blocks, `num_blocks` of them, then the rest. `written` are the
    parameters that no stage before has.
    """

    stage: int
    parts: Parts
    units: list[list[nn.Parameter]]
    num_blocks: int
    buffers: list[torch.Tensor]
    written: set[nn.Parameter]


def hold(trial: Trial, stage: int) -> StageTensors:
    """Return what the first rank of a stage holds."""
    model = trial.model.module
    stages = trial.model.partition.stages
    own: dict[nn.Parameter, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        if stage in stages.get(name, (0,)):
            own[parameter] = stages.get(name, (0,))
    parts = {p: _part(trial, p) for p in own}
    units, num_blocks = _list_units(trial.model, stage, parts) if trial.mesh.shard > 1 else ([], 0)
    buffers = [b for name, b in model.named_buffers() if stage in stages.get(name, (0,))]
    written = {p for p, used in own.items() if used[0] == stage}
    return StageTensors(stage, parts, units, num_blocks, buffers, written)


def _part(trial: Trial, parameter: nn.Parameter) -> nn.Parameter:
    """Return a rank's part of a parameter that is cut as the tensor plan says: the largest."""
    if trial.mesh.shard == 1 or not parameter.dim():
        return parameter
    num_parts = trial.mesh.num_parts("shard", "context")
    rows = -(-parameter.shape[0] // num_parts)  # the first of torch.chunk
    with trial.mode:
        made = torch.empty(rows, *parameter.shape[1:], dtype=parameter.dtype)
        return nn.Parameter(made, parameter.requires_grad)


def _list_units(model: FakeModel, stage: int, parts: Parts) -> tuple[list[list[nn.Parameter]], int]:
    """Return the parameters of each unit of FSDP, and how many of the units are blocks."""
    own = {model.blocks[number] for number in model.partition.blocks_of[stage]}
    blocks = [block for block in inner_first(model.module, model.blocks) if block in own]
    seen: set[nn.Parameter] = set()
    units = []
    num_blocks = 0
    for module in (*blocks, model.module):
        found = [p for p in module.parameters() if p in parts and p not in seen and p.dim()]
        seen.update(found)
        if found:
            units.append(found)
            num_blocks += module is not model.module
    return units, num_blocks
