"""The plan of a run in one layout: batches, memory, messages, checkpoint and time."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.checkpoints import packing
from trainer.config.schema import Config
from trainer.distributed.devices import Device
from trainer.engine.ema import size_of_averages
from trainer.plan.fetching import Fetching, measure_fetching
from trainer.plan.held import StageTensors, hold
from trainer.plan.memory import ACTIVATIONS, States, list_memory, measure_states
from trainer.plan.passes import Passes, run_passes
from trainer.plan.speed import Speed, estimate
from trainer.plan.trial import SharedParts, Trial, place
from trainer.record import startup
from trainer.strategy.cost import Cost, MemoryRow, Message, PlannedRank, size_of
from trainer.strategy.mesh import DATA
from trainer.trainer import Trainer


@dataclass(frozen=True)
class PlannedLayout:
    """Where a plan applies: ranks in all and per node, and the device, if it is known."""

    ranks: int
    local_ranks: int
    device: Device | None = None

    @property
    def num_nodes(self) -> int:
        return self.ranks // self.local_ranks


@dataclass(frozen=True)
class CheckpointSize:
    """Bytes of a checkpoint's tensors, and most bytes that one rank writes."""

    num_bytes: int
    most_of_a_rank: int
    source: str


@dataclass(frozen=True)
class Plan:
    """Numbers of a run in one layout. `speed` is None if the device is not known.

    Memory and messages are those of a rank of `stage`, the one that needs the most memory.
    """

    config: Config
    layout: PlannedLayout
    axes: dict[str, int]
    stage: int
    batches: dict[str, int]
    parameters: int
    lines: list[str]
    notes: list[str]
    memory: list[MemoryRow]
    messages: list[Message]
    checkpoint: CheckpointSize
    flops: float  # per example
    speed: Speed | None
    fetching: Fetching | None  # of a node, for data in shards
    has_blocks: bool
    is_cut_fixed: bool

    @property
    def total(self) -> int:
        """Bytes of a rank, without rows that are not known."""
        return sum(row.num_bytes or 0 for row in self.memory)

    @property
    def without_activations(self) -> int:
        return sum(row.num_bytes or 0 for row in self.memory if row.name != ACTIVATIONS)

    @property
    def is_complete(self) -> bool:
        return all(row.num_bytes is not None for row in self.memory)

    @property
    def fits(self) -> bool | None:
        """True if the memory of the device is enough; None if that is not known."""
        device = self.layout.device
        if device is None or (self.total <= device.room and not self.is_complete):
            return None
        return self.total <= device.room


def make_plan(config: Config, layout: PlannedLayout, kept: SharedParts) -> Plan:
    """Plan a run, on a rank of the stage that needs the most memory.

    Raises ConfigError where a real start does.
    """
    trial = Trial(config, place(config, layout.ranks, layout.local_ranks), layout.device, kept)
    stages = [hold(trial, number) for number in range(len(trial.model.partition.blocks_of))]
    cost = trial.kind.cost
    states = [measure_states(trial, held.parts, cost) for held in stages]
    every = run_passes(trial)
    ranks = [_rank(trial, *of_stage) for of_stage in zip(stages, every, strict=True)]
    columns = zip(stages, states, ranks, every, strict=True)
    tables = [list_memory(trial, *of_stage) for of_stage in columns]
    totals = [sum(row.num_bytes or 0 for row in rows) for rows in tables]
    fullest = totals.index(max(totals))
    memory, passes = tables[fullest], every[fullest]
    messages = cost.messages(ranks[fullest]) if trial.mesh.size > 1 else []
    plan = trial.batches.plan
    num_steps = trial.config.run.steps or trial.config.run.epochs * plan.steps_per_epoch
    device = layout.device
    return Plan(
        config=trial.config,
        layout=layout,
        axes={axis: size for axis, size in trial.mesh.sizes.items() if size > 1 or axis in DATA},
        stage=fullest,
        batches={
            "global_batch": plan.global_batch,
            "micro_batch": trial.rows,
            "accumulation": plan.accumulation,
            "steps_per_epoch": plan.steps_per_epoch,
            "steps": num_steps,
        },
        parameters=sum(p.numel() for p in trial.model.whole.values()),
        lines=startup.arithmetic(trial.config, plan, num_steps),
        notes=_list_notes(trial, passes),
        memory=memory,
        messages=messages,
        checkpoint=_measure_checkpoint(trial, stages, states),
        flops=trial.model.partition.flops or passes.flops / trial.rows,
        speed=estimate(trial, device, memory, messages, every) if device else None,
        fetching=measure_fetching(trial.batches.dataset, plan.global_batch, layout.num_nodes),
        has_blocks=bool(trial.model.blocks),
        is_cut_fixed=trial.kind.cut(trial.config).is_fixed,
    )


def _rank(trial: Trial, held: StageTensors, passes: Passes) -> PlannedRank:
    """Return the first rank of a stage."""
    model = trial.model.module
    known = set(held.buffers)
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    means = [layer.running_mean for layer in layers if layer.running_mean is not None]
    return PlannedRank(
        config=trial.config,
        mesh=trial.mesh,
        rows=trial.rows,
        accumulation=trial.batches.plan.accumulation,
        itemsize=trial.precision.dtype.itemsize,
        num_statistics=2 * sum(mean.numel() for mean in means if mean in known),
        parts={name: held.parts[p] for name, p in model.named_parameters() if p in held.parts},
        units=[[held.parts[p] for p in unit] for unit in held.units],
        num_blocks=held.num_blocks,
        stages=trial.model.partition.stages,
        partial=trial.model.partial,
        gradients=passes.gradients,
        sent=passes.sent,
    )


def _list_notes(trial: Trial, passes: Passes) -> list[str]:
    notes = list(trial.notes)
    if type(trial.task).train_step is not Trainer.train_step:
        notes.append("the task has its own train_step: one update of its loss is planned")
    if trial.config.strategy.sync_batchnorm and trial.mesh.data_size > 1:
        notes.append("strategy.sync_batchnorm=true: its messages are not counted")
    if passes.problem:
        why = f"the forward pass needs values ({passes.problem})"
        notes.append(f"{why}: the total is without activations, the time without computation")
    return notes


def _measure_checkpoint(
    trial: Trial, stages: Sequence[StageTensors], states: Sequence[States]
) -> CheckpointSize:
    """Return the bytes of weights, optimizer state and moving average."""
    cost = trial.kind.cost
    has_all = len(stages) == 1 and trial.mesh.shard == trial.mesh.tensor == 1
    is_whole = has_all and not cost.divides_state
    whole = states[0] if is_whole else measure_states(trial, trial.model.whole, Cost)
    has_average = trial.config.run.ema_decay is not None

    def size(weights: Collection[torch.Tensor]) -> int:
        return size_of(weights) + has_average * size_of_averages(weights)

    every = [p for _, p in trial.model.module.named_parameters(remove_duplicate=False)]
    buffers = packing.size_of(trial.model.module.state_dict()) - size_of(every)
    total = buffers + size(trial.model.whole.values()) + whole.num_bytes
    if is_whole or trial.config.checkpoint.sharded is False:
        return CheckpointSize(total, total, whole.source)
    most = 0
    for held, state in zip(stages, states, strict=True):
        written = {p: part for p, part in held.parts.items() if p in held.written}
        is_all = len(written) == len(held.parts)
        own = state if is_all else measure_states(trial, written, cost)
        mine = own.num_bytes + size(written.values())
        if len(stages) == 1:
            mine += buffers
        most = max(most, mine)
    return CheckpointSize(total, most, whole.source)
