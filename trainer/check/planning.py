"""The plan of a run in one layout: batches, memory, messages, fetches, checkpoint and time."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.base.process.torch_flags import torch_flags_kept
from trainer.check.memory import (
    ACTIVATIONS,
    StageTensors,
    States,
    hold,
    list_memory,
    measure_states,
)
from trainer.check.plan_trial import PlanTrial, SharedParts, place
from trainer.check.step_costs import Passes, Tokens, count_tokens, run_passes
from trainer.core.checkpoints import tensor_files
from trainer.core.config.schema import Config
from trainer.core.data.order import BatchPlan
from trainer.core.distributed.devices import Device
from trainer.core.engine.training_state import size_of_averages
from trainer.core.record import startup
from trainer.core.strategy.cost import Cost, MemoryRow, Message, PlannedRank, size_of
from trainer.core.strategy.mesh_sizes import AXES, DATA
from trainer.core.trainer import Trainer
from trainer.mesh.p2p import bubble
from trainer.shards.dataset import ShardedDataset


@dataclass(frozen=True)
class Fetching:
    """Bytes of the training data, those that a node reads in an epoch, and has to hold at once.

    A node reads the shards of its lanes, and those at their borders. `step_bytes`: of an average
    step.
    """

    total_bytes: int
    epoch_bytes: int
    held_bytes: int
    step_bytes: int
    cache_bytes: int


def measure_fetching(dataset: Any, global_batch: int, num_nodes: int) -> Fetching | None:
    """Return what one of the nodes fetches; None if the data are no shards."""
    if not isinstance(dataset, ShardedDataset):
        return None
    sampling = dataset.sampling
    total = int(dataset.index.sizes.clamp(min=0).sum())
    shards = len(dataset.index)
    lanes = min(sampling.lanes, global_batch, shards)
    own = -(-lanes // num_nodes)
    border = own * total // shards * (num_nodes > 1)
    of_epoch = min(total, total * own // lanes + border)
    held = min(of_epoch, own * (sampling.window + 1) * total // shards)
    steps = sampling.size // global_batch
    return Fetching(total, of_epoch, held, of_epoch // steps, dataset.cache.most_bytes)


@dataclass(frozen=True)
class Speed:
    """Seconds of a step, all estimated: computation, waiting for other stages, update of the
    weights, and communication."""

    compute_s: float
    wait_s: float
    update_s: float
    communicate_s: float

    @property
    def least_s(self) -> float:
        """Time of a step whose communication runs at the same time as its computation."""
        return max(self.compute_s, self.communicate_s) + self.wait_s + self.update_s

    @property
    def most_s(self) -> float:
        """Time of a step that communicates before or after it computes."""
        return self.compute_s + self.communicate_s + self.wait_s + self.update_s

    @property
    def efficiency(self) -> tuple[float, float]:
        """Least and largest part of the step in which the device computes."""
        busy = self.compute_s + self.update_s
        return busy / self.most_s, busy / self.least_s


def estimate(
    trial: PlanTrial,
    device: Device,
    memory: Sequence[MemoryRow],
    messages: Sequence[Message],
    stages: Sequence[Passes],
) -> Speed:
    """Return the time of a step: over a pipeline, that of the slowest stage and of its waiting."""
    speed = device.flops_per_s(trial.config.strategy.precision)
    num_rows = trial.batches.plan.micro_batches(0)[-1][1]
    operations = max(passes.flops + passes.flops_again for passes in stages) / trial.rows * num_rows
    waited = bubble(len(stages), trial.batches.plan.accumulation)
    memory_bytes = {row.name: row.num_bytes or 0 for row in memory}
    # weights and state are read and written, gradients are read
    moved = (
        2 * memory_bytes["parameters"]
        + 2 * memory_bytes["optimizer state"]
        + memory_bytes["gradients"]
    )
    communicate = sum(_seconds(trial, device, message) for message in messages)
    compute = operations / speed
    wait = compute * waited / (1 - waited)
    return Speed(compute, wait, moved / (device.memory_gb_s * 1e9), communicate)


def _seconds(trial: PlanTrial, device: Device, message: Message) -> float:
    sizes = trial.mesh.sizes
    axes = list(sizes) if message.axis == "world" else message.axis.split(" x ")
    size = math.prod(sizes[axis] for axis in axes)
    bandwidth = _bandwidth(trial, device, axes, size) * device.assumed["links"]
    latency = device.assumed["latency_us"] * 1e-6 * math.log2(size)
    return message.num_bytes / bandwidth + message.count * latency


def _bandwidth(trial: PlanTrial, device: Device, axes: Sequence[str], size: int) -> float:
    """Return the bandwidth of a rank along axes of `size` ranks, in bytes per second.

    Ranks of one node that are in the same group share the network links of the node.
    """
    local = trial.task.world.local_world_size
    inner = AXES[AXES.index(axes[-1]) + 1 :]
    stride = math.prod(trial.mesh.sizes[axis] for axis in inner)
    node = device.node_gb_s * 1e9
    if size * stride <= local:
        return node
    together = max(1, local // stride)
    return min(node, device.network_gb_s * 1e9 * together)


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
    tokens: Tokens
    speed: Speed | None
    fetching: Fetching | None  # of a node, for data in shards
    has_blocks: bool
    is_split_fixed: bool

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


def _describe_batches(plan: BatchPlan, micro_batch: int, num_steps: int) -> dict[str, int]:
    return {
        "global_batch": plan.global_batch,
        "micro_batch": micro_batch,
        "accumulation": plan.accumulation,
        "steps_per_epoch": plan.steps_per_epoch,
        "steps": num_steps,
    }


@torch_flags_kept()
def make_plan(config: Config, layout: PlannedLayout, shared: SharedParts) -> Plan:
    """Plan a run, on a rank of the stage that needs the most memory.

    Raises ConfigError where a real start does.
    """
    placed = place(config, layout.ranks, layout.local_ranks)
    trial = PlanTrial(config, placed, layout.device, shared)
    stages = [hold(trial, stage) for stage in range(len(trial.strategy.partition.blocks_of))]
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
    return Plan(
        config=trial.config,
        layout=layout,
        axes={axis: size for axis, size in trial.mesh.sizes.items() if size > 1 or axis in DATA},
        stage=fullest,
        batches=_describe_batches(plan, trial.rows, num_steps),
        parameters=sum(p.numel() for p in trial.strategy.whole.values()),
        lines=startup.arithmetic(trial.config, plan, num_steps),
        notes=_list_notes(trial, passes),
        memory=memory,
        messages=messages,
        checkpoint=_measure_checkpoint(trial, stages, states),
        flops=trial.strategy.partition.flops or passes.flops / trial.rows,
        tokens=count_tokens(trial, passes),
        speed=estimate(trial, layout.device, memory, messages, every) if layout.device else None,
        fetching=measure_fetching(trial.batches.dataset, plan.global_batch, layout.num_nodes),
        has_blocks=bool(trial.strategy.spec.blocks),
        is_split_fixed=trial.is_split_fixed,
    )


def _rank(trial: PlanTrial, held: StageTensors, passes: Passes) -> PlannedRank:
    """Return the first rank of a stage."""
    model = trial.model
    buffers = set(held.buffers)
    layers = [module for module in model.modules() if isinstance(module, _BatchNorm)]
    means = [layer.running_mean for layer in layers if layer.running_mean is not None]
    return PlannedRank(
        config=trial.config,
        mesh=trial.mesh,
        rows=trial.rows,
        accumulation=trial.batches.plan.accumulation,
        itemsize=trial.parts.precision.dtype.itemsize,
        num_statistics=2 * sum(mean.numel() for mean in means if mean in buffers),
        parts={name: held.parts[p] for name, p in model.named_parameters() if p in held.parts},
        units=[[held.parts[p] for p in unit] for unit in held.units],
        num_blocks=held.num_blocks,
        stages=trial.strategy.partition.stages,
        partial=trial.strategy.partial,
        gradients=passes.gradients,
        sent=passes.sent,
    )


def _list_notes(trial: PlanTrial, passes: Passes) -> list[str]:
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
    trial: PlanTrial, stages: Sequence[StageTensors], states: Sequence[States]
) -> CheckpointSize:
    """Return the bytes of weights, optimizer state and moving average."""
    cost = trial.kind.cost
    has_all = len(stages) == 1 and trial.mesh.shard == trial.mesh.tensor == 1
    is_whole = has_all and not cost.divides_state
    whole = states[0] if is_whole else measure_states(trial, trial.strategy.whole, Cost)
    has_average = trial.config.run.ema_decay is not None

    def size(parts: Mapping[Any, torch.Tensor]) -> int:
        trained = [part for p, part in parts.items() if p.requires_grad]  # others are left out
        return size_of(trained) + has_average * size_of_averages(trained)

    every = [p for _, p in trial.model.named_parameters(remove_duplicate=False)]
    buffers = tensor_files.size_of(trial.model.state_dict()) - size_of(every)
    total = buffers + size(trial.strategy.whole) + whole.num_bytes
    if is_whole or trial.config.checkpoint.sharded is False:
        return CheckpointSize(total, total, whole.source)
    most = 0
    for held, state in zip(stages, states, strict=True):
        written = {p: part for p, part in held.parts.items() if p in held.written}
        is_all = len(written) == len(held.parts)
        own = state if is_all else measure_states(trial, written, cost)
        mine = own.num_bytes + size(written)
        if len(stages) == 1:
            mine += buffers
        most = max(most, mine)
    return CheckpointSize(total, most, whole.source)
