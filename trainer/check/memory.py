"""Memory of a rank in bytes of live tensors, and the bytes of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.base.errors import ConfigError
from trainer.check.plan_trial import FakeModel, PlanTrial
from trainer.check.step_costs import Passes
from trainer.core.engine.optimizers import check_optimizers
from trainer.core.engine.training_state import size_of_averages
from trainer.core.strategy.cost import (
    ESTIMATED,
    MEASURED,
    Cost,
    MemoryRow,
    Parts,
    PlannedRank,
    size_of,
)
from trainer.mesh.full_model import inner_first
from trainer.mesh.p2p import most_kept


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


def hold(trial: PlanTrial, stage: int) -> StageTensors:
    """Return what the first rank of a stage holds."""
    model = trial.model
    stages = trial.strategy.partition.stages
    own: dict[nn.Parameter, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        if stage in stages.get(name, (0,)):
            own[parameter] = stages.get(name, (0,))
    parts = {p: _part(trial, p) for p in own}
    units, num_blocks = (
        _list_units(trial.strategy, stage, parts) if trial.mesh.shard > 1 else ([], 0)
    )
    buffers = [b for name, b in model.named_buffers() if stage in stages.get(name, (0,))]
    written = {p for p, used in own.items() if used[0] == stage}
    return StageTensors(stage, parts, units, num_blocks, buffers, written)


def _part(trial: PlanTrial, parameter: nn.Parameter) -> nn.Parameter:
    """Return a rank's part of a parameter that is cut as the tensor plan says: the largest."""
    if trial.mesh.shard == 1 or not parameter.dim():
        return parameter
    num_parts = trial.mesh.num_parts("shard", "context")
    rows = -(-parameter.shape[0] // num_parts)  # the first of torch.chunk
    with trial.mode:
        part = torch.empty(rows, *parameter.shape[1:], dtype=parameter.dtype)
        return nn.Parameter(part, parameter.requires_grad)


def _list_units(model: FakeModel, stage: int, parts: Parts) -> tuple[list[list[nn.Parameter]], int]:
    """Return the parameters of each unit of FSDP, and how many of the units are blocks."""
    own = {model.spec.blocks[block_number] for block_number in model.partition.blocks_of[stage]}
    blocks = [block for block in inner_first(model.module, model.spec.blocks) if block in own]
    seen: set[nn.Parameter] = set()
    units = []
    num_blocks = 0
    for module in (*blocks, model.module):
        unit = [p for p in module.parameters() if p in parts and p not in seen and p.dim()]
        seen.update(unit)
        if unit:
            units.append(unit)
            num_blocks += module is not model.module
    return units, num_blocks


ACTIVATIONS = "activations"
BYTE_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
ASSUMED_STATES = 2  # tensors per parameter, of an optimizer that cannot step without values


@dataclass(frozen=True)
class States:
    """Bytes of the optimizers' state, and of whole parameters that an optimizer gathers."""

    num_bytes: int
    source: str
    gathered: int = 0
    note: str = ""


def show_bytes(num_bytes: float) -> str:
    """Return a size in decimal units with three digits."""
    return scaled(num_bytes, BYTE_UNITS) or f"{num_bytes:.0f} B"


def scaled(amount: float, units: Sequence[tuple[float, str]]) -> str:
    """Return a number with three digits in the largest unit below it; empty if there is none."""
    for size, unit in units:
        if amount >= size:
            value = amount / size
            digits = 0 if value >= 100 else 1 if value >= 10 else 2
            return f"{value:,.{digits}f} {unit}"
    return ""


def list_memory(
    trial: PlanTrial, held: StageTensors, states: States, rank: PlannedRank, passes: Passes
) -> list[MemoryRow]:
    """Return the rows of the table of a rank's memory."""
    parts = held.parts
    trained = [part for part in parts.values() if part.requires_grad]
    rows = [
        MemoryRow("parameters", size_of(parts.values())),
        MemoryRow("gradients", size_of(trained)),
        MemoryRow("optimizer state", states.num_bytes, states.source, states.note),
    ]
    if trial.config.run.ema_decay is not None:
        rows.append(MemoryRow("moving average", size_of_averages(trained)))
    rows.append(MemoryRow("buffers", size_of(held.buffers)))
    rows += trial.kind.cost.memory(rank)
    if states.gathered:
        rows.append(MemoryRow("whole matrices", states.gathered, note="owned for the optimizer"))
    if not trial.batches.is_streamed:
        note = f"{len(trial.batches.dataset):,} examples on the device"
        rows.append(MemoryRow("training data", size_of(trial.batches.dataset.tensors), note=note))
    rows.append(_activations(trial, held.stage, passes))
    return rows


def _activations(trial: PlanTrial, stage: int, passes: Passes) -> MemoryRow:
    if passes.problem:
        return MemoryRow(ACTIVATIONS, None, ESTIMATED, f"not known: {passes.problem}")
    schedule, num_stages = trial.config.strategy.schedule, trial.mesh.pipeline
    num_micro_batches = most_kept(schedule, num_stages, stage, trial.batches.plan.accumulation)
    note = f"a micro-batch of {trial.rows:,} rows"
    if num_micro_batches > 1:
        note = f"{num_micro_batches} micro-batches of {trial.rows:,} rows"
    if passes.recomputed:
        note += f", {show_bytes(passes.recomputed)} of it recomputed"
    config = trial.config
    is_other = config.run.compile or config.strategy.sync_batchnorm
    is_exact = not (trial.device and trial.device.is_gpu) and not is_other
    if not is_exact:
        note += ", as without run.compile and SyncBN" if is_other else ", with the kernels of a CPU"
    is_measured = is_exact and not passes.recomputed
    total = num_micro_batches * passes.saved + passes.recomputed
    return MemoryRow(ACTIVATIONS, total, MEASURED if is_measured else ESTIMATED, note)


# Optimizers ---------------------------------------------------------------------------------------


def measure_states(trial: PlanTrial, parts: Parts, cost: type[Cost]) -> States:
    """Build the task's optimizers, step them without values, and return the bytes of their state.

    `parts` are those of a rank, of which `cost` tells what its optimizers step.
    """
    with trial.mode:
        try:
            optimizers = check_optimizers(trial.task.build_optimizer(trial.model))
        except ConfigError:
            raise
        except Exception as error:  # of the task's code, which may read values
            total = ASSUMED_STATES * size_of(p for p in parts.values() if p.requires_grad)
            note = (
                f"{ASSUMED_STATES} tensors per parameter: {type(error).__name__} in build_optimizer"
            )
            return States(total, ESTIMATED, note=note)
        measured = [_measure(each, trial, parts, cost) for each in optimizers]
    gathered = sum(states.gathered for states in measured)
    is_measured = all(states.source == MEASURED for states in measured)
    notes = [f"{type(each).__name__}{s.note}" for each, s in zip(optimizers, measured, strict=True)]
    total = sum(states.num_bytes for states in measured)
    return States(total, MEASURED if is_measured else ESTIMATED, gathered, ", ".join(notes))


def _measure(optimizer: Optimizer, trial: PlanTrial, parts: Parts, cost: type[Cost]) -> States:
    stepped, gathered = cost.stepped(optimizer, parts, trial.strategy.whole, trial.mesh)
    for group in optimizer.param_groups:
        group["params"] = [stepped[p] for p in group["params"] if p in stepped]
    problem = _step(optimizer, list(stepped.values()))
    if not problem:
        return States(_count(optimizer), MEASURED, gathered)
    total = ASSUMED_STATES * size_of(p for p in stepped.values() if p.requires_grad)
    note = f": {ASSUMED_STATES} tensors per parameter, as {problem}"
    return States(total, ESTIMATED, gathered, note)


def _step(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> str:
    """Step without values; return the error if the state is not complete after it."""
    problem = ""
    for is_fused in (True, False):  # some fused kernels need values, and have the same state
        for group in optimizer.param_groups:
            if not is_fused and group.get("fused"):
                group["fused"] = False
                group["foreach"] = False
        for parameter in parameters:
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
        try:
            optimizer.step()
            problem = ""
        except Exception as error:  # an operation that reads values
            problem = f"{type(error).__name__} in step"
        finally:
            for parameter in parameters:
                parameter.grad = None
        if not problem:
            return ""
    # torch's optimizers make the state of all parameters before they compute
    has_all = all(optimizer.state.get(p) for p in parameters if p.requires_grad)
    return "" if has_all else problem


def _count(optimizer: Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return size_of(value for value in values if isinstance(value, torch.Tensor))
