"""The plan as tables, or as plain values for JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from rich.console import Console
from rich.table import Table

from trainer.distributed import entry
from trainer.errors import counted, visible
from trainer.plan.memory import scaled, show_bytes
from trainer.plan.planning import Plan
from trainer.strategy.cost import ESTIMATED, MEASURED

SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


@dataclass(frozen=True)
class Advice:
    """The command of a layout that fits and its plan; empty if none of those tried does."""

    command: str = ""
    plan: Plan | None = None


def show(plan: Plan, disk_gb_s: float, advice: Advice | None) -> None:
    """Print the plan."""
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 120)
    for line in (_layout(plan), *plan.lines, *plan.notes):
        console.print(visible(line), soft_wrap=True)
    console.print(_memory(plan))
    if plan.messages:
        console.print(_messages(plan))
    own = (_checkpoint(plan, disk_gb_s), _fetching(plan), _speed(plan), _fit(plan, advice))
    for line in chain(*own):
        console.print(visible(line), soft_wrap=True)
    sys.stdout.flush()


def _layout(plan: Plan) -> str:
    ranks = counted(plan.layout.ranks, "rank")
    nodes = counted(plan.layout.ranks // plan.layout.local_ranks, "node")
    axes = ", ".join(f"{name} {size:,}" for name, size in plan.axes.items())
    block = plan.config.strategy
    learned = f"{plan.parameters:,} parameters, {block.precision}"
    return f"plan: strategy {block.name} on {ranks} on {nodes}, mesh {axes}; {learned}"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str]) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _memory(plan: Plan) -> Table:
    rows = []
    for row in plan.memory:
        cells = ("?", "") if row.num_bytes is None else (show_bytes(row.num_bytes), row.source)
        rows.append((row.name, *cells, row.note))
    sources = {row.source for row in plan.memory}
    source = ESTIMATED if ESTIMATED in sources else MEASURED
    note = ""
    if device := plan.layout.device:
        share = f"{device.assumed['memory']:.0%} of {device.memory_gb:g} GB"
        note = f"{device.name}: {show_bytes(device.room)} for tensors ({share})"
    at_least = "total" if plan.is_complete else "total, at least"
    rows.append((at_least, show_bytes(plan.total), source, note))
    where = f" of stage {plan.stage}" if "pipeline" in plan.axes else ""
    return _table((f"memory of a rank{where}", "bytes", "source", "note"), rows, ["bytes"])


def _messages(plan: Plan) -> Table:
    rows = [
        (m.axis, m.kind, f"{m.count:,}", show_bytes(m.num_bytes), m.source, m.note)
        for m in plan.messages
    ]
    columns = ("axis", "messages of a step", "count", "sent by a rank", "source", "note")
    return _table(columns, rows, ["count", "sent by a rank"])


def _checkpoint(plan: Plan, disk_gb_s: float) -> list[str]:
    size = plan.checkpoint
    each = f"{show_bytes(size.most_of_a_rank)} written by a rank"
    time = f"{_seconds(size.num_bytes / disk_gb_s / 1e9)} at {disk_gb_s:g} GB/s"
    return [f"checkpoint: {show_bytes(size.num_bytes)} ({size.source}), at most {each}; {time}"]


def _fetching(plan: Plan) -> list[str]:
    found = plan.fetching
    if found is None:
        return []
    parts = [
        f"data: {show_bytes(found.total_bytes)} in shards",
        f"a node reads {show_bytes(found.epoch_bytes)} an epoch",
        f"and holds {show_bytes(found.held_bytes)} of it at once",
        f"in a cache of {show_bytes(found.cache_bytes)}",
    ]
    if plan.speed:
        rate = found.step_bytes / plan.speed.least_s / 1e6
        parts.append(f"which takes up to {_rounded(rate)} MB/s")
    return [", ".join(parts)]


def _speed(plan: Plan) -> list[str]:
    device = plan.layout.device
    speed = plan.speed
    if device is None or speed is None:
        return ["time: give device=<name> for an estimate"] if plan.flops else []
    parts = [
        f"{_seconds(speed.compute_s)} computing",
        *([f"{_seconds(speed.wait_s)} waiting for other stages"] if speed.wait_s else []),
        f"{_seconds(speed.communicate_s)} communicating",
        f"{_seconds(speed.update_s)} updating",
    ]
    fractions = f"{device.assumed['compute']:.0%} of peak speed"
    links = f"{device.assumed['links']:.0%} of link bandwidth"
    span = f"{_seconds(speed.least_s)} to {_seconds(speed.most_s)}"
    least, most = speed.efficiency
    batch = plan.config.data.global_batch
    rates = [_rounded(batch / s) for s in (speed.most_s, speed.least_s)]
    return [
        f"time of a step, estimated at {fractions} and {links}: {', '.join(parts)}",
        f"  {span} (with all or no communication hidden), {rates[0]} to {rates[1]} examples/s, "
        f"scaling efficiency {least:.0%} to {most:.0%}",
    ]


def _fit(plan: Plan, advice: Advice | None) -> list[str]:
    device = plan.layout.device
    if device is None:
        return []
    if plan.fits is None:
        return ["fits: not known, because activations are not"]
    if plan.fits:
        return [f"fits: {show_bytes(plan.total)} of {show_bytes(device.room)}"]
    line = f"does NOT fit: {show_bytes(plan.total)} of {show_bytes(device.room)}"
    if advice is None or advice.plan is None:
        tried = "smaller micro-batches, hsdp, fsdp, fsdp_tp and strategy.recompute=blocks"
        return [f"{line}; {tried} do not fit either: use more ranks, or a smaller model"]
    command = entry.as_started(advice.command)
    return [line, f"this layout fits, with {show_bytes(advice.plan.total)}: {command}"]


def _seconds(number: float) -> str:
    return scaled(number, SECONDS) or "0 s"


def _rounded(number: float) -> str:
    """Return a number with three digits: it is an estimate."""
    return f"{float(f'{number:.3g}'):,.10g}"


def as_json(plan: Plan, disk_gb_s: float, advice: Advice | None) -> dict[str, Any]:
    """Return the plan as plain values; `fits` is null if that is not known."""
    device = plan.layout.device
    speed = plan.speed
    size = plan.checkpoint
    made: dict[str, Any] = {
        "ranks": plan.layout.ranks,
        "local_ranks": plan.layout.local_ranks,
        "strategy": plan.config.strategy.name,
        "precision": plan.config.strategy.precision,
        "mesh": plan.axes,
        "parameters": plan.parameters,
        "stage": plan.stage,
        "batches": plan.batches,
        "memory": [asdict(row) for row in plan.memory],
        "total_bytes": plan.total,
        "is_complete": plan.is_complete,
        "messages": [asdict(message) for message in plan.messages],
        "checkpoint": {**asdict(size), "seconds": size.num_bytes / disk_gb_s / 1e9},
        "flops_per_example": plan.flops,
        "device": device and {"name": device.name, "room_bytes": device.room},
        "time": speed and {**asdict(speed), "least_s": speed.least_s, "most_s": speed.most_s},
        "fetching": plan.fetching and asdict(plan.fetching),
        "efficiency": speed and speed.efficiency,
        "fits": plan.fits,
        "notes": plan.notes,
    }
    if advice is not None:
        made["advice"] = entry.as_started(advice.command) or None
    return made
