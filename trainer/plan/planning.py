"""The plan of a run in one layout: batches, memory, messages, checkpoint and time."""

from __future__ import annotations

from dataclasses import dataclass

from trainer.checkpoints import packing
from trainer.config.schema import Config
from trainer.plan.devices import Device
from trainer.plan.memory import (
    ACTIVATIONS,
    Parts,
    Row,
    States,
    divide,
    list_memory,
    measure_states,
    size_of,
)
from trainer.plan.passes import Passes, run_passes
from trainer.plan.speed import Speed, estimate
from trainer.plan.traffic import Message, list_messages
from trainer.plan.trial import Kept, Trial, place
from trainer.record import startup
from trainer.trainer import Trainer


@dataclass(frozen=True)
class Layout:
    """Where a plan applies: ranks in all and per node, and the device, if it is known."""

    ranks: int
    local_ranks: int
    device: Device | None = None


@dataclass(frozen=True)
class Checkpoint:
    """Bytes of a checkpoint's tensors, and most bytes that one rank writes."""

    num_bytes: int
    most_of_a_rank: int
    source: str


@dataclass(frozen=True)
class Plan:
    """Numbers of a run in one layout. `speed` is None if the device is not known."""

    config: Config
    layout: Layout
    axes: dict[str, int]
    batches: dict[str, int]
    parameters: int
    lines: list[str]
    notes: list[str]
    memory: list[Row]
    messages: list[Message]
    checkpoint: Checkpoint
    flops: float  # per example
    speed: Speed | None
    has_blocks: bool

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


def make_plan(config: Config, layout: Layout, kept: Kept) -> Plan:
    """Plan a run. Raises ConfigError where a real start does."""
    trial = Trial(config, place(config, layout.ranks, layout.local_ranks), layout.device, kept)
    parts = divide(trial)
    states = measure_states(trial, parts, trial.is_sharded)
    passes = run_passes(trial)
    memory = list_memory(trial, parts, states, passes)
    messages = list_messages(trial, parts, passes)
    plan = trial.plan
    num_steps = trial.config.run.steps or trial.config.run.epochs * plan.steps_per_epoch
    return Plan(
        config=trial.config,
        layout=layout,
        axes={"replicate": trial.mesh.replicate, "shard": trial.mesh.shard},
        batches={
            "global_batch": plan.global_batch,
            "micro_batch": trial.rows,
            "accumulation": plan.accumulation,
            "steps_per_epoch": plan.steps_per_epoch,
            "steps": num_steps,
        },
        parameters=sum(p.numel() for p in trial.model.parameters()),
        lines=startup.arithmetic(trial.config, plan, num_steps),
        notes=_list_notes(trial, passes),
        memory=memory,
        messages=messages,
        checkpoint=_measure_checkpoint(trial, parts, states),
        flops=passes.flops / trial.rows,
        speed=estimate(trial, layout.device, memory, messages, passes) if layout.device else None,
        has_blocks=bool(trial.blocks),
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


def _measure_checkpoint(trial: Trial, parts: Parts, states: States) -> Checkpoint:
    """Return the bytes of weights, optimizer state and moving average."""
    everything: Parts = {p: p for p in parts}
    whole = measure_states(trial, everything, False) if trial.is_sharded else states
    # a parameter with two names is written twice
    named = [p for _, p in trial.model.named_parameters(remove_duplicate=False)]
    model = packing.size_of(trial.model.state_dict())
    buffers = model - size_of(named)
    total = model + whole.num_bytes
    mine = buffers + size_of(parts[p] for p in named) + states.num_bytes
    if trial.config.run.ema_decay is not None:
        total += size_of(everything.values())
        mine += size_of(parts.values())
    if not trial.is_sharded or trial.config.checkpoint.sharded is False:
        mine = total
    return Checkpoint(total, mine, whole.source)
