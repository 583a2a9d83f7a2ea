"""Lines that a run prints at its start and its end. Functions without side effects."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from trainer.base.errors import STOPPED, counted
from trainer.base.process import invocation
from trainer.base.process.table import usable_cores
from trainer.core.checkpoints import tensor_files
from trainer.core.checkpoints.transaction import Manifest
from trainer.core.config.schema import Config
from trainer.core.config.working_folder import naming_words
from trainer.core.data.order import BatchPlan
from trainer.core.data.sampling import Sampling
from trainer.core.distributed import accelerator
from trainer.core.distributed.rendezvous import choose_backend
from trainer.core.distributed.threads import is_chosen
from trainer.core.distributed.world import World, explain_unseen_gpu
from trainer.core.engine.context import (
    choose_precision,
    is_bf16_emulated,
    is_bf16_native,
    is_fp16_slow,
)
from trainer.core.record import fingerprint
from trainer.core.strategy import find_name
from trainer.core.strategy.mesh_sizes import Mesh
from trainer.core.strategy.modules.batchnorm import (
    describe_cut_statistics,
    has_own_forward,
    has_plain_batchnorm,
)

RANK_COLUMNS = ("rank", "local_rank", "node", "host", "pid", "device")
MOST_RANKS = 16
MOST_PICTURED = 64
BUSY = 1.5  # processes that want to run, per core
MOST_NORM_ROWS = 16  # for BatchNorm, that the start advises


@dataclass
class Summary:
    """Result of `fit`, the same on every rank."""

    directory: Path
    step: int
    metrics: dict[str, float]
    best: float | None
    best_step: int | None
    seconds: float
    examples_per_s: float
    flops_per_s: float
    exit_code: int


def rank_columns(mesh: Mesh) -> tuple[str, ...]:
    """Return the columns of the table of ranks; those of the mesh only if it divides the model."""
    return (*RANK_COLUMNS, *_divided(mesh))


def _divided(mesh: Mesh) -> list[str]:
    """Return the axes to show: none if every rank has the whole model."""
    return [axis for axis, size in mesh.sizes.items() if size > 1] if mesh.is_divided else []


def picture(mesh: Mesh) -> list[str]:
    """Return the lines of a table of the ranks, with the innermost axis across."""
    axes = _divided(mesh)
    if len(axes) < 2 or mesh.size > MOST_PICTURED:
        return []
    across = axes[-1]
    step = mesh.sizes[across]
    names = [
        ", ".join(f"{a} {mesh.coordinates(r)[a]}" for a in axes[:-1])
        for r in range(0, mesh.size, step)
    ]
    width = max(map(len, names))
    heads = [f"{across} {coordinate}" for coordinate in range(step)]
    lines = [" " * width + "  " + "  ".join(heads)]
    for name, first in zip(names, range(0, mesh.size, step), strict=True):
        cells = [f"rank {first + n}".ljust(len(head)) for n, head in enumerate(heads)]
        lines.append(f"{name.ljust(width)}  {'  '.join(cells).rstrip()}")
    return lines


def describe_rank(world: World, mesh: Mesh | None = None) -> str:
    """Return the row of a rank in the table of ranks; tabs separate the columns."""
    devices = ",".join(map(str, world.devices))
    row: tuple[Any, ...]
    row = (world.rank, world.local_rank, world.node_rank, world.host, world.pid, devices)
    if mesh is not None:
        row += tuple(str(mesh[axis]) for axis in _divided(mesh))
    return "\t".join(map(str, row))


def rank_rows(lines: Sequence[str]) -> list[list[str]]:
    """Return the rows of the table of ranks; beyond 16 ranks, one row stands for the middle."""
    rows = [line.split("\t") for line in lines]
    if len(rows) <= MOST_RANKS:
        return rows
    half = MOST_RANKS // 2
    gap = [f"... {len(rows) - MOST_RANKS} more", *[""] * (len(rows[0]) - 1)]
    return [*rows[:half], gap, *rows[-half:]]


def fact(label: str, text: str) -> str:
    """Return a line of the start: a label in a column of its own, and what is said of it."""
    return f"{label:<7} {text}"


def layout(config: Config, world: World, threads: int) -> str:
    """Return the line with strategy, backend, ranks, device, precision and threads."""
    block = config.strategy
    # with ranks that share a device another one than was chosen
    is_open = dist.is_initialized()
    backend = dist.get_backend() if is_open else choose_backend(config.dist, world)
    ranks = f"{counted(world.world_size, 'rank')} on {counted(world.num_nodes, 'node')}"
    learned = block.precision + ", SyncBN" * block.sync_batchnorm
    learned += f", BatchNorm over {config.norm_rows} rows" if config.norm_rows else ""
    if block.comm_hook != "none":
        learned += f", comm hook {block.comm_hook}"
    each = f"{counted(threads, 'thread')} per rank"
    name = find_name(block)  # with a mesh not always block.name
    device = accelerator.describe(world.device) if accelerator.is_used(world.device) else "CPU"
    how = f"{name} over {backend}" if world.world_size > 1 else name
    return fact("layout", f"{how}, {ranks}, {device}, {learned}, {each}")


def slow_reasons(config: Config, world: World, threads: int) -> str:
    """Return the known reasons why this rank is slower than necessary, one a line."""
    name = config.strategy.precision
    cores = world.count_cores()
    reasons = [explain_unseen_gpu()]
    if is_bf16_emulated(name, world.device):
        reasons.append(f"this CPU emulates bf16 (strategy.precision={name}), so fp32 is faster")
    if is_fp16_slow(name, world.device):
        other = choose_precision(is_bf16_native(world.device))
        why = f"a CPU computes fp16 up to 100 times slower (strategy.precision={name})"
        reasons.append(f"{why}, so use strategy.precision={other}")
    if name == "fp32" and accelerator.is_used(world.device) and is_bf16_native(world.device):
        reasons.append("fp32 leaves bf16 arithmetic unused (strategy.precision=default takes it)")
    if world.device.type == "cpu" and not cores:
        reasons.append(f"{world.local_world_size} ranks share {counted(usable_cores(), 'core')}")
    elif world.device.type == "cpu" and not is_chosen():
        reasons += _explain_threads(threads, cores)
    used = world.local_world_size * len(world.devices)
    if accelerator.is_used(world.device) and used < (seen := accelerator.count()):
        all_ = f"torchrun --nproc_per_node={seen} uses all"
        reasons.append(
            f"{used} of this node's {seen} GPUs {'is' if used == 1 else 'are'} used; {all_}"
        )
    return "\n".join(filter(None, reasons))


def _explain_threads(threads: int, cores: int) -> list[str]:
    """Return a line if a rank has too few threads, or too many while the cores are busy.

    Threads wait for each other where other processes keep the cores busy: at a load of 4 on two
    cores task=text trained 8 examples/s with two threads, 75 with one.
    """
    load = os.getloadavg()[0]
    is_busy = load >= BUSY * (os.cpu_count() or 1)
    if is_busy and threads > 1:
        return [f"other processes use the cores (load {load:.1f}); try OMP_NUM_THREADS=1"]
    if threads < cores and not is_busy:
        return [f"a rank uses {threads} of its {cores} cores (limited by strategy=exact)"]
    return []


def slowness(reasons: Sequence[str]) -> list[str]:
    """Return a line with the reasons of all ranks, without duplicates; no line without reasons."""
    unique_lines = dict.fromkeys(line for lines in reasons for line in lines.splitlines())
    return [f"slower than necessary: {'; '.join(unique_lines)}"] if unique_lines else []


def arithmetic(config: Config, plan: BatchPlan, num_steps: int) -> list[str]:
    """Return the lines with the sizes of the global batch, the epoch and the run."""
    per_epoch = plan.steps_per_epoch
    left = plan.num_examples - per_epoch * plan.global_batch
    others = f"drops {counted(left, 'example')} per epoch, different ones each time"
    dropped = others if left else "drops no example"
    if config.run.steps is None:
        total = f"{num_steps:,} = {counted(config.run.epochs, 'epoch')} x {per_epoch:,}"
    else:
        total = f"{num_steps:,} = {num_steps / per_epoch:.3g} of an epoch's {per_epoch:,}"
    run = fact("steps", f"{total}; {dropped}")
    mesh = config.strategy.mesh
    are_shared = any(size != 1 for size in (mesh.pipeline, mesh.context, mesh.tensor))
    ranks = (
        counted(plan.ranks, "group") + " of ranks" if are_shared else counted(plan.ranks, "rank")
    )
    return [_cut(plan, ranks), run]


def _cut(plan: BatchPlan, ranks: str) -> str:
    """Return the line that shows how a global batch is split over ranks and micro-batches."""
    ends = [plan.micro_batches(rank) for rank in (0, plan.ranks - 1)]
    counts = _listed({len(pieces) for pieces in ends})
    sizes = _listed({last - first for pieces in ends for first, last in pieces})
    each = f"{counts} micro-batch{'es' * (counts != '1')} of {sizes}"
    return fact("batch", f"{plan.global_batch:,} examples = {ranks} x {each}")


def _listed(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers)))


def describe_data(config: Config, datasets: Mapping[str, Any], sampling: Sampling) -> list[str]:
    """Return a line for each split: its size and source, and its digest with `log.start=full`."""
    lines = []
    for split, dataset in datasets.items():
        source = getattr(dataset, "source", "") or type(dataset).__name__
        digest = getattr(dataset, "digest", "") if config.log.start == "full" else ""
        sha256 = f", SHA-256 {digest}" if digest else ""
        lines.append(fact(split, f"{counted(len(dataset), 'example')}, {source}{sha256}"))
    if order := sampling.describe():
        lines.append(fact("order", order))
    return lines


def describe_model(
    config: Config, model: nn.Module, is_split_fixed: bool, accumulation: int
) -> list[str]:
    """Return lines about the model: its class and parameters, BatchNorm, its moving average.

    `accumulation` is the number of micro-batches of a rank in a step.
    """
    parameters = list(model.parameters())
    total = sum(p.numel() for p in parameters)
    frozen = total - sum(p.numel() for p in parameters if p.requires_grad)
    rest = f", {frozen:,} of them frozen" if frozen else ""
    name = type(model).__name__.removeprefix("FSDP")  # which fully_shard adds
    lines = [fact("model", f"{name}, {total:,} parameters{rest}")]
    is_chosen = is_split_fixed or config.strategy.sync_batchnorm
    if has_plain_batchnorm(model) and not is_chosen:
        why = "sees one micro-batch at a time, so results change with the number of ranks"
        rows = max(n for n in range(1, MOST_NORM_ROWS + 1) if config.data.global_batch % n == 0)
        advice = f"set run.norm_rows={rows}"
        if accumulation == 1:
            advice += " or strategy.sync_batchnorm=true"
        if any(map(has_own_forward, model.modules())):  # both settings would be refused
            advice = "use strategy=exact, which fixes the micro-batches"
        lines.append(f"warning: BatchNorm {why}; {advice}")
    if cut := describe_cut_statistics(model, config, accumulation):
        lines.append(f"warning: {cut}")
    if config.run.ema_decay is not None:
        lines.append("evaluation uses the moving average of the weights (run.ema_decay)")
    return lines


def lack_of_room(directory: Path, model: nn.Module, num_saved: int) -> list[str]:
    """Return a warning if the free space is too small for the weights of all checkpoints."""
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    state = {name: t for name, t in model.state_dict().items() if name not in frozen}
    need = (num_saved + 1) * tensor_files.size_of(state)
    free = shutil.disk_usage(directory).free
    if need <= free:
        return []
    count = f"{num_saved} checkpoints and one being written need at least {need / 1e6:,.0f} MB"
    advice = "make room, or keep fewer (checkpoint.keep_last, checkpoint.keep_best)"
    return [f"warning: {directory}: {count}; {free / 1e6:,.0f} MB are free; {advice}"]


def changes_of(
    config: Config, manifest: Manifest | None, world: World, code: Mapping[str, str]
) -> list[str]:
    """Return lines about settings, machine and code that a resume changes."""
    if manifest is None:
        return []
    machine = fingerprint.of_machine(world)
    pairs: list[tuple[str, Any, Any]]
    pairs = [(name, manifest.machine.get(name, now), now) for name, now in machine.items()]
    pairs += [(f"the code of {n}", manifest.code.get(n, now), now) for n, now in code.items()]
    saved, ours = manifest.config, config.flat()
    keys = [key for key in {**saved, **ours} if key not in fingerprint.OF_RANK_0]
    pairs += [(key, saved.get(key), ours.get(key)) for key in keys]
    return [f"{name}: {_shown(then)} -> {_shown(now)}" for name, then, now in pairs if then != now]


def _shown(value: Any) -> str:
    """Return a setting as one would write it."""
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


def resumed(
    config: Config,
    manifest: Manifest | None,
    num_steps: int,
    changes: Sequence[str],
    rates: Callable[[int], Sequence[float]],
) -> list[str]:
    """Return the lines with the step of a resume and what it changes.

    `rates` returns the last learning rate and that of a 0-based step, or nothing without one.
    """
    if manifest is None:
        is_asked = config.run.resume == "auto"
        return ["run.resume=auto: found no checkpoint; starting at step 0"] if is_asked else []
    lines = [f"resumed at step {manifest.step:,} of {num_steps:,}"]
    lines += [f"changed at this resume: {line}" for line in changes]
    is_other_length = any(line.startswith(("run.epochs: ", "run.steps: ")) for line in changes)
    if is_other_length and manifest.step < num_steps and (pair := rates(manifest.step)):
        last_rate, next_rate = pair
        before = f"{last_rate:.3g} in the last step, "
        if any(line.startswith("optim.lr: ") for line in changes):
            before = ""  # the rate of the last step went with the former optim.lr
        length = "the schedule is computed for the new length"
        lines.append(f"learning rate: {before}{next_rate:.3g} in the next; {length}")
    return lines


def previous_end(ended: Mapping[str, Any]) -> list[str]:
    """Return a line with the reason if the previous session failed, by its exit.json."""
    if ended.get("code") in (None, 0, STOPPED):
        return []
    return [f"the previous session failed: {ended.get('reason')}"]


def next_command(
    config: Config, world: World, directory: Path, is_stopped: bool, ended_by: str
) -> str:
    """Return the line with the command to resume a stopped run or train a finished one longer."""
    if is_stopped:
        return f"resume with: {resume_command(config, world, directory)}"
    steps = config.run.steps
    more = f"run.steps={2 * steps}" if steps else f"run.epochs={2 * config.run.epochs}"
    if "run.stop_after_evals" in ended_by:
        more = "run.stop_after_evals=null"
    return f"train longer with: {resume_command(config, world, directory, more)}"


def newest_checkpoint(config: Config, world: World, directory: Path, newest: int) -> list[str]:
    """Return the line that a run which failed ends with, if it has a checkpoint."""
    command = resume_command(config, world, directory)
    return (
        [f"the newest checkpoint is of step {newest:,}; resume with: {command}"] if newest else []
    )


def resume_command(config: Config, world: World, directory: Path, *more: str) -> str:
    """Return the command that resumes the run with the same launcher and number of ranks.

    `more` are further settings.
    """
    name = world.launcher.name
    launcher = ["python"]
    if name == "srun":
        launcher = ["srun", f"--nodes={world.num_nodes}", f"--ntasks={world.world_size}", "python"]
    elif name == "mpirun":
        launcher = ["mpirun", "-n", str(world.world_size), "python"]
    elif world.world_size > 1 and name not in ("elastic", "spawn", "ray"):  # these are settings
        nodes = [f"--nnodes={world.num_nodes}"] if world.num_nodes > 1 else []
        launcher = ["torchrun", *nodes, f"--nproc_per_node={world.local_world_size}"]
    home, _, own = config.task.trainer.rpartition(".")
    if home == "__main__" and name in ("python", "elastic"):  # of a notebook, or a script
        settings = json.dumps([f"run.resume={directory}", *more])
        call = "fit()" if name == "python" else f"launch({world.world_size})"
        return f"{own}(load_config({settings}, task={own})).{call}"
    words = [*launcher, "-m", "trainer", f"run.resume={directory}"]
    words += naming_words(config, Path(config.folder, directory))
    return invocation.as_started(shlex.join([*words, *more]))


def ending(
    summary: Summary, num_steps: int, trained: int, metric: str, why: str, folder: Path
) -> list[str]:
    """Return the last lines of a run: its end, its metrics and speed, and its files in `folder`.

    `why` is the reason of an end before the last step. `trained` counts this session's steps.
    """
    at = f"at step {summary.step:,} of {num_steps:,}"
    if summary.exit_code:
        lines = [f"stopped by {why} {at}; the state is saved"]
    elif why:
        lines = [f"{'ended' if trained else 'nothing left to do: the run ended'} {at}: {why}"]
    elif not trained:
        done = f"the run is finished at step {num_steps:,}"
        lines = [f"nothing left to do: {done}; raise run.epochs or run.steps to continue"]
    else:
        lines = [f"done: {counted(num_steps, 'step')}"]
    if trained:
        part = f"{trained:,} of them " if trained < summary.step else ""
        speed = f"{summary.examples_per_s:,.0f} examples/s{_flops(summary.flops_per_s)}"
        lines[0] += f", {part}in {summary.seconds:.1f} s, {speed}"
    metric_texts = []
    if summary.metrics:
        metric_texts.append(f"last evaluation: {metric_line(summary.metrics)}")
    if summary.best is not None:
        metric_texts.append(f"best {metric}: {summary.best:.4f} at step {summary.best_step:,}")
    lines += ["; ".join(metric_texts)] if metric_texts else []
    if (summary.directory / "tensorboard").is_dir():
        lines.append(f"curves: tensorboard --logdir {shlex.quote(f'{folder}/tensorboard')}")
    return lines


def _flops(per_s: float) -> str:
    if per_s < 1e8:  # 0.1 GFLOP/s
        return ""
    unit, size = ("T", 1e12) if per_s >= 1e12 else ("G", 1e9)
    return f", {per_s / size:,.1f} model {unit}FLOP/s"


def evaluation_line(step: int, num_steps: int, metrics: Mapping[str, float]) -> str:
    """Return the line of an evaluation, like those of progress."""
    return f"step {step:,}/{num_steps:,}  {metric_line(metrics)}"


def metric_line(metrics: Mapping[str, float]) -> str:
    """Return metrics in one line, `eval/accuracy 0.2891  eval/loss 3.6490`."""
    return "  ".join(f"{name} {value:.4f}" for name, value in metrics.items())
