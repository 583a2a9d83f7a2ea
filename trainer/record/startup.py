"""What a run says of itself, as lines and tables: plain functions of what it knows."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from trainer.checkpoints import packing
from trainer.config.schema import Config
from trainer.data.order import BatchPlan, counted
from trainer.distributed.world import World
from trainer.record import directory as rundir

RANK_COLUMNS = ("rank", "local_rank", "node", "host", "pid", "device")
MOST_RANKS = 16


def describe_rank(world: World) -> str:
    """One rank's row of the layout, for `gather_text`; tabs part the columns."""
    devices = ",".join(map(str, world.devices))
    return "\t".join(
        map(str, (world.rank, world.local_rank, world.node_rank, world.host, world.pid, devices))
    )


def rank_rows(lines: Sequence[str]) -> list[list[str]]:
    """The rows of RANK_COLUMNS; past 16 ranks the middle is left out and said to be."""
    rows = [line.split("\t") for line in lines]
    if len(rows) <= MOST_RANKS:
        return rows
    half = MOST_RANKS // 2
    return [
        *rows[:half],
        [f"... {len(rows) - MOST_RANKS} more", *[""] * (len(RANK_COLUMNS) - 1)],
        *rows[-half:],
    ]


def arithmetic(config: Config, plan: BatchPlan, num_steps: int) -> list[str]:
    """The batch, the epoch and the run, each a sentence."""
    left = plan.num_examples - plan.steps_per_epoch * plan.global_batch
    lines = [
        plan.sentence(),
        f"An epoch is {plan.num_examples:,} // {plan.global_batch:,} = {counted(plan.steps_per_epoch, 'step')}; "
        + (
            f"{left:,} examples are left out of each, others every time."
            if left
            else "no example is left out."
        ),
    ]
    if config.run.steps is not None:
        epochs = f"{num_steps / plan.steps_per_epoch:.4g} epochs"
        lines.append(
            f"The run is {counted(num_steps, 'step')} ({epochs}): run.steps wins over run.epochs."
        )
    else:
        epochs = counted(config.run.epochs, "epoch")
        lines.append(
            f"The run is {epochs} x {plan.steps_per_epoch:,} = {counted(num_steps, 'step')}."
        )
    return lines


def describe_data(split: str, dataset: Any) -> str:
    source = getattr(dataset, "source", "") or type(dataset).__name__
    digest = getattr(dataset, "digest", "")
    return f"{split}: {len(dataset):,} examples, {source}" + (
        f", SHA-256 {digest}" if digest else ""
    )


def describe_model(model: nn.Module) -> str:
    parameters = list(model.parameters())
    total = sum(p.numel() for p in parameters)
    frozen = total - sum(p.numel() for p in parameters if p.requires_grad)
    return f"model: {type(model).__name__}, {total:,} parameters" + (
        f", {frozen:,} of them frozen" if frozen else ""
    )


def lack_of_room(directory: Path, model: nn.Module, kept: int) -> list[str]:
    """A warning where the checkpoints to keep will not fit by the weights alone; an optimizer's part is not known."""
    need, free = (kept + 1) * packing.size_of(model.state_dict()), shutil.disk_usage(directory).free
    if need <= free:
        return []
    sizes = f"{kept} checkpoints and one being written take {need / 1e6:,.0f} MB and more; {free / 1e6:,.0f} MB are free"
    return [
        f"warning: {directory}: {sizes}; make room, or keep fewer (checkpoint.keep_last, checkpoint.keep_best)"
    ]


def resume_command(world: World, directory: Path) -> str:
    """The line that goes on with a run as it was begun: the same launcher, and the configuration from its directory."""
    launcher, name = ["python"], world.launcher.name
    if name == "srun":
        launcher = ["srun", f"--nodes={world.num_nodes}", f"--ntasks={world.world_size}", "python"]
    elif name == "mpirun":
        launcher = ["mpirun", "-n", str(world.world_size), "python"]
    elif world.world_size > 1 and name not in (
        "elastic",
        "spawn",
    ):  # those two stand in the configuration
        nodes = [f"--nnodes={world.num_nodes}"] if world.num_nodes > 1 else []
        launcher = ["torchrun", *nodes, f"--nproc_per_node={world.local_world_size}"]
    return shlex.join([*launcher, "-m", "trainer", f"run.resume={directory}"])


def layout(config: Config, world: World, backend: str, threads: int) -> str:
    """Strategy, backend, ranks, precision and threads, in a sentence."""
    ranks = f"{counted(world.world_size, 'rank')} on {counted(world.num_nodes, 'node')}"
    block = config.strategy
    learned = block.precision + ", SyncBN" * block.sync_batchnorm
    learned += "" if block.comm_hook == "none" else f", comm hook {block.comm_hook}"
    alone = (
        "; without a GPU dp is one plain process"
        if block.name == "dp" and world.device.type == "cpu"
        else ""
    )
    return f"strategy {block.name} over {backend}, {ranks}, {learned}, {counted(threads, 'thread')} per rank{alone}"


def resumed(config: Config, manifest: Mapping[str, Any], step: int, num_steps: int) -> list[str]:
    """From where, and what is different from when it was saved."""
    lines = [f"resumed at step {step:,} of {num_steps:,}"]
    lines += [f"changed at this resume: {change}" for change in rundir.changes(config, manifest)]
    was = manifest.get("config", {})
    if any(
        was.get(key) != value
        for key, value in config.flat().items()
        if key in ("run.epochs", "run.steps")
    ):
        lines.append("the learning-rate schedule is evaluated anew for the new length")
    if config.strategy.comm_hook == "powersgd":
        lines.append("PowerSGD begins with an empty error memory: this resume is not exact")
    return lines


def ending(
    summary: Any, num_steps: int, trained: int, metric: str, signal: str | None, again: str
) -> list[str]:
    """The summary of a run: how it ended, what it reached, where the files are, how to go on."""
    place = summary.directory
    if summary.exit_code:
        by = signal or "a signal to another rank"
        lines = [f"stopped by {by} at step {summary.step:,} of {num_steps:,}; the state is saved"]
    elif not trained:
        lines = [
            f"nothing left to do: the run is finished at step {num_steps:,}; more run.epochs or run.steps go on"
        ]
    else:
        lines = [f"done: {counted(num_steps, 'step')}"]
    if summary.metrics:
        lines.append(f"last evaluation: {metric_line(summary.metrics)}")
    if summary.best is not None:
        lines.append(f"best {metric}: {summary.best:.4f} at step {summary.best_step:,}")
    if trained:
        speed = f"{summary.examples_per_s:,.0f} examples/s, {summary.flops_per_s / 1e9:,.1f} GFLOP/s of the model"
        lines.append(f"trained {counted(trained, 'step')} in {summary.seconds:.1f} s, {speed}")
    lines.append(f"files: {place}/metrics.jsonl, {place}/checkpoints")
    return [*lines, f"curves: tensorboard --logdir {place}/tensorboard", f"go on with: {again}"]


def metric_line(metrics: Mapping[str, float]) -> str:
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
