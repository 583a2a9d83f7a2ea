"""Layouts: train the task in several of them, and compare each with one rank."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from trainer.data.batch_plan import Cut
from trainer.distributed.world import usable_cores
from trainer.errors import ConfigError, RunError, counted
from trainer.strategy.mesh import DATA
from trainer.verify.comparison import (
    DIFFERENT,
    EXACT,
    ROUNDING,
    Distances,
    Finding,
    compare,
    compare_bits,
    judge_reference,
    measure_rounding,
)
from trainer.verify.evidence import Evidence
from trainer.verify.reasons import rounding
from trainer.verify.stage import FP64, TrialRuns

NARROWEST = ("fp16", "bf16", "fp32", FP64)
ONCE = ["checkpoint.every_epochs=null", "checkpoint.every_steps=null", "eval.every_epochs=null"]


@dataclass(frozen=True)
class Layout:
    """Number of ranks, and overrides in which {half} stands for half of the global batch."""

    name: str
    ranks: int
    overrides: tuple[str, ...] = ()

    axes: tuple[str, ...] = ()  # that divide the model
    sharing: int = 1  # ranks that have the same rows

    @property
    def data_ranks(self) -> int:
        """Number of ranks with rows of their own."""
        return self.ranks // self.sharing


def _meshed(name: str, **sizes: int) -> Layout:
    words = [f"strategy.mesh.{axis}={size}" for axis, size in {"replicate": 1, **sizes}.items()]
    axes = tuple(axis for axis in sizes if axis != "replicate")
    ranks = math.prod(sizes.values())
    sharing = math.prod(size for axis, size in sizes.items() if axis not in DATA)
    return Layout(name, ranks, ("strategy.name=parallel", *words), axes, sharing)


_ALL = (
    Layout("ranks-2", 2),
    Layout("ranks-3", 3),
    Layout("accumulation", 1, ("data.micro_batch={half}",)),
    Layout("workers", 2, ("data.workers=2", "data.path=streamed")),
    Layout("parameter-server", 2, ("strategy.comm_hook=parameter_server",)),
    _meshed("fsdp-2", shard=2),
    _meshed("fsdp-4", shard=4),
    _meshed("hsdp-2-2", replicate=2, shard=2),
    _meshed("tp-2", tensor=2),
    _meshed("cp-2", context=2),
    _meshed("pp-2", pipeline=2),
    _meshed("fsdp-2-tp-2", shard=2, tensor=2),
)
ONE_CUT = ("ranks-2", "ranks-3", "ranks-4", "workers")  # these do not change the micro-batches
LAYOUTS = {layout.name: layout for layout in _ALL}


def choose_layouts(
    names: str | None, units: int, cut: Cut, barred: Mapping[str, str] | None = None
) -> list[Layout]:
    """Return the layouts that `names` lists, by default all that the global batch allows.

    `units` is the number of units of rows in the global batch. If the micro-batches have a fixed
    size, the default is the layouts that do not change them. The default leaves out layouts with
    an axis of `barred`, which maps it to the reason. Raises ConfigError.
    """
    half = cut.unit * -(-units // 2)
    if names is None:
        chosen = [find_layout(name) for name in (ONE_CUT if cut.is_fixed else LAYOUTS)]
        chosen = [layout for layout in chosen if not find_reason(layout, units, cut, barred)]
        if units < 2 or half == 1:
            chosen = [layout for layout in chosen if layout.name != "accumulation"]
    else:
        unique = dict.fromkeys(name for name in names.strip("[]").split(",") if name)
        chosen = [find_layout(name) for name in unique]
        for layout in chosen:
            if why := find_reason(layout, units, cut, barred):
                advice = "leave it out, or change that"
                raise ConfigError(
                    f"layouts={names}: {layout.name} cannot be tried: {why}; {advice}"
                )
    if names is None and not chosen:
        raise ConfigError(f"data.global_batch: {units} rows fit one rank only; give more rows")
    if not chosen:
        advice = f"give some of {', '.join(LAYOUTS)}, ranks-<n>"
        raise ConfigError(f"layouts={names}: must name at least one; {advice}")
    if cut.is_fixed and any(len(layout.overrides) == 1 for layout in chosen):
        raise ConfigError(f"layouts={names}: must be workers or ranks-<n> with strategy=exact")
    return [
        replace(layout, overrides=tuple(word.format(half=half) for word in layout.overrides))
        for layout in chosen
    ]


def find_reason(layout: Layout, units: int, cut: Cut, barred: Mapping[str, str] | None) -> str:
    """Return why the task cannot be trained in a layout, or an empty string."""
    why = [(barred or {})[axis] for axis in layout.axes if axis in (barred or {})]
    if not why and layout.data_ranks > units:
        why = [describe_batch(units, cut)]
    return why[0] if why else ""


def describe_batch(units: int, cut: Cut) -> str:
    """Return a phrase about the parts of a global batch that ranks can have."""
    return f"the global batch has {counted(units, 'part')} of {counted(cut.unit, 'row')}"


def find_layout(name: str) -> Layout:
    """Return a layout by its name. Raises ConfigError."""
    if name in LAYOUTS:
        return LAYOUTS[name]
    count = name.removeprefix("ranks-")
    if not (name.startswith("ranks-") and count.isdecimal() and int(count)):
        raise ConfigError(f"layouts={name}: must be one of {', '.join(LAYOUTS)} or ranks-<n>")
    return Layout(name, int(count))


def _estimate(seconds: float, layouts: Sequence[Layout]) -> float:
    """Return the seconds that layouts take if one rank takes `seconds`: ranks share the cores."""
    return sum(seconds * max(1.0, layout.ranks / usable_cores()) for layout in layouts)


def prove_layouts(
    stage: TrialRuns, layouts: Iterable[Layout], is_bits: bool = False, may_refuse: bool = False
) -> list[Finding]:
    """Train on one rank and in each layout, and compare, in every precision of the stage.

    With `is_bits` train in the task's own precision only and compare bits. If it `may_refuse`, a
    layout that divides the model or the batch is left out where that cannot work for this task.
    """
    every = list(layouts)
    reference, limits = _train_reference(stage, every, is_bits)
    findings = [judge_reference("one rank", p, evidence) for p, evidence in reference.items()]
    for number, layout in enumerate(every, 1):
        where = f"layout {layout.name} ({number} of {len(every)})"
        print(f"training in {where} ...", file=sys.stderr, flush=True)
        overrides = [*ONCE, *layout.overrides]
        try:
            evidence = stage.train(layout.name, layout.ranks, overrides, list(reference))
        except ConfigError as error:
            if not may_refuse or not (layout.axes or layout.name == "accumulation"):
                raise
            print(f"left out: {error}")
            continue
        found: dict[str, Finding] = {}
        for precision in reference:
            pair = (reference[precision], evidence[precision])
            if is_bits:
                found[precision] = compare_bits(layout.name, precision, *pair)
                continue
            finding = compare(layout.name, precision, *pair, limits[precision])
            exact = found.get(FP64)
            if exact is not None and finding.result == DIFFERENT:
                finding = replace(finding, reason="as in fp64")  # here rounding adds to it
                if exact.result != DIFFERENT:
                    reason = rounding(reference[precision])
                    finding = replace(finding, result=ROUNDING, reason=reason)
            found[precision] = finding
        findings += found.values()
    return findings


def _train_reference(
    stage: TrialRuns, layouts: Sequence[Layout], is_bits: bool
) -> tuple[dict[str, Evidence], dict[str, Distances]]:
    """Train on one rank; return the evidence, and the limits for other layouts, by precision.

    A task that does not run in fp64 is judged in its own precision alone.
    """
    *exact, own = list(stage.precisions)[-1:] if is_bits else list(stage.precisions)
    print("training on one rank, the reference ...", file=sys.stderr, flush=True)
    try:
        in_all = 1.5 + _estimate(1.0, layouts)  # and the rows in reverse order, in one precision
        reference = stage.train("one-rank", 1, ONCE, [*exact, own], is_apart=True, in_all=in_all)
    except (ConfigError, RunError) as error:
        if not exact:
            raise
        reference = stage.train("one-rank", 1, ONCE, [own], is_apart=True)
        print(f"does not run in fp64, so {own} alone is judged: {error}")
    seconds = sum(evidence.ranks[0].seconds for evidence in reference.values())
    more = _estimate(seconds, layouts)
    ahead = f"it took {seconds:.0f} s; {counted(len(layouts), 'layout')} to try"
    print(f"{ahead}, about {more:.0f} s", file=sys.stderr, flush=True)
    limits = {FP64: EXACT}
    narrowest = {p: evidence.ranks[0].narrowest for p, evidence in reference.items()}
    rounded = [p for p in reference if (p, narrowest[p]) != (FP64, FP64)]
    if rounded and not is_bits:
        print(f"measuring the rounding of {', '.join(rounded)} ...", file=sys.stderr, flush=True)
        other = stage.train("one-rank-reversed", 1, ONCE, rounded, is_reversed=True)
        for p in rounded:
            kind = narrowest[p] if NARROWEST.index(narrowest[p]) < _place(p) else p
            limits[p] = measure_rounding(kind, reference[p], other[p])
            if kind != p:
                print(f"{p}: a part of the model computes in {kind}, so limits are its rounding")
    return reference, limits


def _place(precision: str) -> int:
    """Return the place of a precision among those that a step may have; others are as narrow."""
    return NARROWEST.index(precision) if precision in NARROWEST else 0
