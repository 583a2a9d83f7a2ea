"""Lines that a run shows at its start and its end: plain functions of what it knows."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from trainer.checkpoints import packing
from trainer.checkpoints.manifest import Manifest
from trainer.config.schema import ONCE, Config
from trainer.data.order import BatchPlan, counted
from trainer.distributed.group import choose_backend
from trainer.distributed.world import World
from trainer.record import fingerprint

RANK_COLUMNS = ("rank", "local_rank", "node", "host", "pid", "device")
MOST_RANKS = 16


def describe_rank(world: World) -> str:
    """One rank's row of the layout, for `gather_text`; tabs separate the columns."""
    devices = ",".join(map(str, world.devices))
    row = (world.rank, world.local_rank, world.node_rank, world.host, world.pid, devices)
    return "\t".join(map(str, row))


def rank_rows(lines: Sequence[str]) -> list[list[str]]:
    """The rows of RANK_COLUMNS; past 16 ranks the middle is left out, in a row that says so."""
    rows = [line.split("\t") for line in lines]
    if len(rows) <= MOST_RANKS:
        return rows
    half = MOST_RANKS // 2
    gap = [f"... {len(rows) - MOST_RANKS} more", *[""] * (len(RANK_COLUMNS) - 1)]
    return [*rows[:half], gap, *rows[-half:]]


def layout(config: Config, world: World, threads: int) -> str:
    """Strategy, backend, ranks, precision and threads, in a sentence."""
    block = config.strategy
    backend = choose_backend(config.dist, world)
    ranks = f"{counted(world.world_size, 'rank')} on {counted(world.num_nodes, 'node')}"
    learned = block.precision + ", SyncBN" * block.sync_batchnorm
    learned += f", BatchNorm over {config.norm_rows} rows" * bool(config.norm_rows)
    if block.comm_hook != "none":
        learned += f", comm hook {block.comm_hook}"
    each = f"{counted(threads, 'thread')} per rank"
    return f"strategy {block.name} over {backend}, {ranks}, {learned}, {each}"


def arithmetic(config: Config, plan: BatchPlan, num_steps: int) -> list[str]:
    """The batch, the epoch and the run, each a sentence."""
    per_epoch = plan.steps_per_epoch
    left = plan.num_examples - per_epoch * plan.global_batch
    others = f"{left:,} examples are left out of each, others every time."
    dropped = others if left else "no example is left out."
    total = counted(num_steps, "step")
    if config.run.steps is not None:
        epochs = f"{num_steps / per_epoch:.4g} epochs"
        run = f"The run is {total} ({epochs}): run.steps wins over run.epochs."
    else:
        run = f"The run is {counted(config.run.epochs, 'epoch')} x {per_epoch:,} = {total}."
    quotient = f"{plan.num_examples:,} // {plan.global_batch:,} = {counted(per_epoch, 'step')}"
    return [_cut(plan), f"An epoch is {quotient}; {dropped}", run]


def _cut(plan: BatchPlan) -> str:
    """How a global batch is cut into micro-batches."""
    units, larger = divmod(plan.global_batch // plan.unit, plan.ranks * plan.accumulation)
    size = units * plan.unit
    rows = f"{size} or {size + plan.unit}" if larger else str(size)
    each = f"{counted(plan.accumulation, 'micro-batch', 'es')} of {rows} rows each"
    return f"A global batch of {plan.global_batch:,} is {counted(plan.ranks, 'rank')} x {each}."


def describe_data(split: str, dataset: Any) -> str:
    source = getattr(dataset, "source", "") or type(dataset).__name__
    digest = getattr(dataset, "digest", "")
    sha256 = f", SHA-256 {digest}" if digest else ""
    return f"{split}: {len(dataset):,} examples, {source}{sha256}"


def describe_model(model: nn.Module) -> str:
    parameters = list(model.parameters())
    total = sum(p.numel() for p in parameters)
    frozen = total - sum(p.numel() for p in parameters if p.requires_grad)
    rest = f", {frozen:,} of them frozen" if frozen else ""
    return f"model: {type(model).__name__}, {total:,} parameters{rest}"


def lack_of_room(directory: Path, model: nn.Module, kept: int) -> list[str]:
    """A warning where the weights of all checkpoints alone do not fit on the disk."""
    need = (kept + 1) * packing.size_of(model.state_dict())
    free = shutil.disk_usage(directory).free
    if need <= free:
        return []
    count = f"{kept} checkpoints and one being written take {need / 1e6:,.0f} MB and more"
    advice = "make room, or keep fewer (checkpoint.keep_last, checkpoint.keep_best)"
    return [f"warning: {directory}: {count}; {free / 1e6:,.0f} MB are free; {advice}"]


def resumed(config: Config, manifest: Manifest | None, world: World, num_steps: int) -> list[str]:
    """Where a resume begins, and what differs from what was saved: settings, machine."""
    if manifest is None:
        is_asked = config.run.resume == "auto"
        return ["run.resume=auto found nothing to go on from: a fresh start"] if is_asked else []
    saved = {**ONCE, **manifest.config}
    lines = [f"resumed at step {manifest.step:,} of {num_steps:,}"]
    for name, now in fingerprint.of_machine(world).items():
        if (then := manifest.machine.get(name, now)) != now:
            lines.append(f"changed at this resume: {name}: {then} -> {now}")
    ours = config.flat()
    keys = [key for key in {**saved, **ours} if ours.get(key) != saved.get(key)]
    for key in keys:
        if key not in fingerprint.OF_RANK_0:
            lines.append(f"changed at this resume: {key}: {saved.get(key)} -> {ours.get(key)}")
    if "run.epochs" in keys or "run.steps" in keys:
        lines.append("the learning-rate schedule is evaluated anew for the new length")
    return lines


def resume_command(world: World, directory: Path) -> str:
    """The command that resumes a run: the same launcher, the configuration from its directory."""
    name = world.launcher.name
    launcher = ["python"]
    if name == "srun":
        launcher = ["srun", f"--nodes={world.num_nodes}", f"--ntasks={world.world_size}", "python"]
    elif name == "mpirun":
        launcher = ["mpirun", "-n", str(world.world_size), "python"]
    elif world.world_size > 1 and name not in ("elastic", "spawn"):  # those are in the config
        nodes = [f"--nnodes={world.num_nodes}"] if world.num_nodes > 1 else []
        launcher = ["torchrun", *nodes, f"--nproc_per_node={world.local_world_size}"]
    return shlex.join([*launcher, "-m", "trainer", f"run.resume={directory}"])


def ending(
    summary: Any, num_steps: int, trained: int, metric: str, signal: str | None, place: Path
) -> list[str]:
    """The end of a run: how it ended, its metrics, and its files in the run directory `place`."""
    if summary.exit_code:
        by = signal or "a signal to another rank"
        at = f"at step {summary.step:,} of {num_steps:,}"
        lines = [f"stopped by {by} {at}; the state is saved"]
    elif not trained:
        done = f"the run is finished at step {num_steps:,}"
        lines = [f"nothing left to do: {done}; more run.epochs or run.steps go on"]
    else:
        lines = [f"done: {counted(num_steps, 'step')}"]
    if summary.metrics:
        lines.append(f"last evaluation: {metric_line(summary.metrics)}")
    if summary.best is not None:
        lines.append(f"best {metric}: {summary.best:.4f} at step {summary.best_step:,}")
    if trained:
        flops = f"{summary.flops_per_s / 1e9:,.1f} GFLOP/s of the model"
        speed = f"{summary.examples_per_s:,.0f} examples/s, {flops}"
        lines.append(f"trained {counted(trained, 'step')} in {summary.seconds:.1f} s, {speed}")
    lines.append(f"files: {place}/metrics.jsonl, {place}/checkpoints")
    lines.append(f"curves: tensorboard --logdir {place}/tensorboard")
    return lines


def metric_line(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
