"""The plan as text: memory, messages and time of a run on many ranks, before it starts."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Any

from trainer.base.errors import ConfigError, counted, visible
from trainer.base.process import invocation
from trainer.base.process.streams import print_table
from trainer.check.memory import scaled, show_bytes
from trainer.check.planning import Plan, Speed
from trainer.core.config.compose import load_config
from trainer.core.strategy.cost import ESTIMATED, MEASURED

Replan = Callable[[Sequence[str]], Plan]  # overrides of a run -> its plan
Changes = dict[str, str]
MICRO_BATCH = "data.micro_batch"
RECOMPUTE = "strategy.recompute"


def find_fitting(plan: Plan, words: Sequence[str], replan: Replan) -> tuple[list[str], Plan] | None:
    """Return the overrides of the first layout that fits, and its plan; None if none does.

    `words` are the overrides of `plan`.
    """
    search = _Search(plan, words, replan)
    for changes, sizes in _candidates(plan):
        options = [changes | {MICRO_BATCH: str(rows)} for rows in sizes] or [changes]
        if len(options) > 1 and not search.try_out(options[-1]):  # the smallest does not fit
            continue
        for option in options:
            if fitting := search.try_out(option):
                return fitting
    return None


class _Search:
    """Plans with changed settings; those that change the activations only are often skipped."""

    def __init__(self, plan: Plan, words: Sequence[str], replan: Replan):
        assert plan.layout.device is not None
        self._room = plan.layout.device.room
        self._least = {"": plan.without_activations}
        self._words = words
        self._replan = replan

    def try_out(self, changes: Changes) -> tuple[list[str], Plan] | None:
        """Return the overrides and their plan if it fits."""
        mesh = changes.get("strategy", "")
        if self._least.get(mesh, 0) > self._room:
            return None
        changed = replace_words(self._words, changes)
        try:
            plan = self._replan(changed)
        except ConfigError:  # not a layout of this run
            return None
        self._least[mesh] = plan.without_activations
        return (changed, plan) if plan.fits else None


def _candidates(plan: Plan) -> Iterator[tuple[Changes, list[int]]]:
    """Yield settings to change, those that cost less speed first, and micro-batches to try."""
    sizes = list(_smaller(plan.batches["micro_batch"]))
    recompute = {RECOMPUTE: "blocks"} if plan.has_blocks else {}
    meshes: list[Changes] = [{}]
    if plan.is_split_fixed:  # strategy and micro-batch belong to the run
        sizes = []
    elif plan.layout.ranks > 1:
        local = plan.layout.local_ranks
        shards: dict[int, Changes] = {}
        if 1 < local < plan.layout.ranks:
            shards[local] = {"strategy": "hsdp", "strategy.mesh.shard": str(local)}
        shards[plan.layout.ranks] = {"strategy": "fsdp"}
        meshes += [mesh for shard, mesh in shards.items() if shard > plan.axes["shard"]]
        if local > plan.axes.get("tensor", 1):  # refused, and left out, without a tensor plan
            meshes.append({"strategy": "fsdp_tp", "strategy.mesh.tensor": str(local)})
    if sizes:
        yield {}, sizes
    for mesh in meshes[1:]:
        yield mesh, []
    for mesh in meshes if recompute else ():
        yield mesh | recompute, []
    for mesh in meshes if sizes else ():
        yield mesh | recompute, sizes


def _smaller(rows: int) -> Iterator[int]:
    """Yield the halves of a micro-batch, down to one row."""
    while rows > 1:
        rows = -(-rows // 2)
        yield rows


def replace_words(words: Sequence[str], changes: Changes) -> list[str]:
    """Return overrides with some changed; another strategy drops the settings of the mesh."""
    dropped = set(changes)
    prefixes: tuple[str, ...] = ()
    if "strategy" in changes:
        dropped |= {"strategy.name", "strategy.mesh"}
        prefixes = ("strategy.mesh.",)
    unchanged = []
    for word in words:
        key = word.lstrip("+").partition("=")[0]
        if key not in dropped and not key.startswith(prefixes or ("\0",)):
            unchanged.append(word)
    return [*unchanged, *(f"{key}={value}" for key, value in changes.items())]


LONG_TIME_UNITS = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"))
SECONDS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns"))


@dataclass(frozen=True)
class Advice:
    """The command of a layout that fits and its plan; empty if none of those tried does."""

    command: str = ""
    plan: Plan | None = None


def show(plan: Plan, disk_gb_s: float, advice: Advice | None) -> None:
    """Print the plan."""
    for line in (_layout(plan), *plan.lines, *plan.notes):
        print(visible(line))
    _show_memory(plan)
    if plan.messages:
        _show_messages(plan)
    own = (_checkpoint(plan, disk_gb_s), _fetching(plan), _speed(plan), _whole_run(plan))
    for line in chain(*own, _fit(plan, advice)):
        print(visible(line))


def _layout(plan: Plan) -> str:
    ranks = counted(plan.layout.ranks, "rank")
    nodes = counted(plan.layout.ranks // plan.layout.local_ranks, "node")
    axes = ", ".join(f"{name} {size:,}" for name, size in plan.axes.items())
    block = plan.config.strategy
    learned = f"{plan.parameters:,} parameters, {block.precision}"
    return f"plan: strategy {block.name} on {ranks} on {nodes}, mesh {axes}; {learned}"


def _show_memory(plan: Plan) -> None:
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
    columns = (f"memory of a rank{where}", "bytes", "source", "note")
    print_table(columns, rows, numbers=["bytes"], pad_edge=False)


def _show_messages(plan: Plan) -> None:
    rows = [
        (m.axis, m.kind, f"{m.count:,}", show_bytes(m.num_bytes), m.source, m.note)
        for m in plan.messages
    ]
    columns = ("axis", "messages of a step", "count", "sent by a rank", "source", "note")
    print_table(columns, rows, numbers=["count", "sent by a rank"], pad_edge=False)


def _checkpoint(plan: Plan, disk_gb_s: float) -> list[str]:
    size = plan.checkpoint
    each = f"{show_bytes(size.most_of_a_rank)} written by a rank"
    time = f"{_seconds(size.num_bytes / disk_gb_s / 1e9)} at {disk_gb_s:g} GB/s"
    return [f"checkpoint: {show_bytes(size.num_bytes)} ({size.source}), at most {each}; {time}"]


def _fetching(plan: Plan) -> list[str]:
    fetching = plan.fetching
    if fetching is None:
        return []
    parts = [
        f"data: {show_bytes(fetching.total_bytes)} in shards",
        f"a node reads {show_bytes(fetching.epoch_bytes)} an epoch",
        f"and holds {show_bytes(fetching.held_bytes)} of it at once",
        f"in a cache of {show_bytes(fetching.cache_bytes)}",
    ]
    if plan.speed:
        rate = fetching.step_bytes / plan.speed.least_s / 1e6
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
    span = _span(_seconds(speed.least_s), _seconds(speed.most_s))
    hidden = " (with all or no communication hidden)" if " to " in span else ""
    efficiency = _span(*(f"{each:.0%}" for each in speed.efficiency))
    return [
        f"time of a step, estimated at {fractions} and {links}: {', '.join(parts)}",
        f"  {span}{hidden}, scaling efficiency {efficiency}",
    ]


def _span(least: str, most: str) -> str:
    return least if least == most else f"{least} to {most}"


def _whole_run(plan: Plan) -> list[str]:
    """Return the lines that answer: time of all steps, size of what is kept, and speed."""
    title = f"the whole run: {counted(plan.batches['steps'], 'step')}"
    checkpoints = f"checkpoints of {show_bytes(plan.checkpoint.num_bytes)}"
    speed = plan.speed
    if speed is None:
        return [f"{title}, {checkpoints}"]
    hours = _span(*(_hours(plan.batches["steps"] * each) for each in (speed.least_s, speed.most_s)))
    batch = plan.config.data.global_batch
    rates = f"{_rate(speed, batch)} examples/s"
    if tokens := plan.tokens.count:
        padding = " with padding" if plan.tokens.has_padding else ""
        rates += f", {_rate(speed, batch * tokens)} tokens/s{padding}"
    return [f"{title}, {hours} without evaluations, {checkpoints}", f"  {rates}"]


def _rate(speed: Speed, size: int) -> str:
    """Return how much of something of which a step has `size` is done in a second."""
    return _span(*(_rounded(size / each) for each in (speed.most_s, speed.least_s)))


def _hours(seconds: float) -> str:
    return scaled(seconds, LONG_TIME_UNITS) or _seconds(seconds)


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
    command = invocation.as_started(advice.command)
    return [line, f"this layout fits, with {show_bytes(advice.plan.total)}: {command}"]


def _seconds(seconds: float) -> str:
    return scaled(seconds, SECONDS) or "0 s"


def _rounded(estimate: float) -> str:
    """Return a number with three digits: it is an estimate."""
    return f"{float(f'{estimate:.3g}'):,.10g}"


def as_json(plan: Plan, disk_gb_s: float, advice: Advice | None) -> dict[str, Any]:
    """Return the plan as plain values; `fits` is null if that is not known."""
    device = plan.layout.device
    speed = plan.speed
    size = plan.checkpoint
    facts: dict[str, Any] = {
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
        "tokens_per_example": plan.tokens.count or None,
        "device": device and {"name": device.name, "room_bytes": device.room},
        "time": speed and {**asdict(speed), "least_s": speed.least_s, "most_s": speed.most_s},
        "fetching": plan.fetching and asdict(plan.fetching),
        "efficiency": speed and speed.efficiency,
        "fits": plan.fits,
        "notes": plan.notes,
    }
    if advice is not None:
        facts["advice"] = invocation.as_started(advice.command) or None
    return facts


PLAN_WORDS = ("ranks", "local_ranks", "device", "devices", "disk_gb_s")
PER_NODE = 8


@dataclass(frozen=True)
class PlanAnswer:
    """A plan for the command line: exit code, the result in a word, facts, and what prints it."""

    code: int
    result: str
    facts: dict[str, Any]
    show: Callable[[], object]


def answer_plan(
    own: Mapping[str, str], overrides: Sequence[str], config_dirs: Sequence[str]
) -> PlanAnswer:
    """Compute what a run needs; `own` has the words of PLAN_WORDS that were given."""
    ranks = _read_integer(own, "ranks", 1)
    local_ranks = _read_integer(own, "local_ranks", min(ranks, PER_NODE))
    if ranks % local_ranks:
        must = f"must divide ranks={ranks}; give another number of ranks per node"
        raise ConfigError(f"local_ranks={local_ranks}: {must}")
    disk_gb_s = _read_rate(own, "disk_gb_s")
    from trainer.check.plan_trial import SharedParts
    from trainer.check.planning import PlannedLayout, make_plan
    from trainer.core.distributed.devices import find_device

    if "devices" in own and "device" not in own:
        raise ConfigError(f"devices={own['devices']}: give device=<name> too, an entry of it")
    device = find_device(own["device"], own.get("devices")) if "device" in own else None
    layout = PlannedLayout(ranks, local_ranks, device)
    shared = SharedParts()

    def replan(changed: Sequence[str]) -> Plan:
        return make_plan(load_config(changed, config_dirs), layout, shared)

    plan = replan(overrides)
    advice = None
    if plan.fits is False:
        fitting = find_fitting(plan, overrides, replan)
        folders = [f"--config-dir={folder}" for folder in config_dirs]
        own_words = [f"{name}={value}" for name, value in own.items()]
        words = [
            "python",
            "-m",
            "trainer.check",
            *(fitting[0] if fitting else ()),
            *own_words,
            *folders,
        ]
        advice = Advice(shlex.join(words), fitting[1]) if fitting else Advice()
    result = {True: "fits", False: "does not fit", None: "planned"}[plan.fits]
    facts = as_json(plan, disk_gb_s, advice)
    code = int(plan.fits is False)
    return PlanAnswer(code, result, facts, lambda: show(plan, disk_gb_s, advice))


def _read_integer(words: Mapping[str, str], name: str, default: int) -> int:
    word = words.get(name, str(default))
    if not word.isdecimal() or int(word) < 1:
        raise ConfigError(f"{name}={word}: must be an integer of at least 1")
    return int(word)


def _read_rate(words: Mapping[str, str], name: str) -> float:
    word = words.get(name, "1")
    try:
        rate = float(word)
    except ValueError:
        rate = 0.0
    if not 0 < rate < float("inf"):
        raise ConfigError(f"{name}={word}: must be a number above 0, GB per second")
    return rate
