"""Layouts: train the task in several of them, compare each with one rank, and print the table."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from trainer.base.errors import ConfigError, RunError, counted, visible
from trainer.base.process.streams import print_table
from trainer.base.process.table import usable_cores
from trainer.core.data.order import BatchSplit
from trainer.core.strategy.mesh_sizes import DATA
from trainer.verify.evidence import Evidence
from trainer.verify.findings import (
    DIFFERENT,
    EXACT,
    ROUNDING,
    Distances,
    Finding,
    compare,
    compare_bits,
    judge_reference,
    measure_rounding,
    rounding,
)
from trainer.verify.layout_runs import FP64_NAME, TrialRuns

NARROWEST = ("fp16", "bf16", "fp32", FP64_NAME)
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
    names: str | None, units: int, split: BatchSplit, barred: Mapping[str, str] | None = None
) -> list[Layout]:
    """Return the layouts that `names` lists, by default all that the global batch allows.

    `units` is the number of units of rows in the global batch. If the micro-batches have a fixed
    size, the default is the layouts that do not change them. The default leaves out layouts with
    an axis of `barred`, which maps it to the reason. Raises ConfigError.
    """
    half = split.unit * -(-units // 2)
    if names is None:
        chosen = [find_layout(name) for name in (ONE_CUT if split.is_fixed else LAYOUTS)]
        chosen = [layout for layout in chosen if not find_reason(layout, units, split, barred)]
        if units < 2 or half == 1:
            chosen = [layout for layout in chosen if layout.name != "accumulation"]
    else:
        unique = dict.fromkeys(name for name in names.strip("[]").split(",") if name)
        chosen = [find_layout(name) for name in unique]
        for layout in chosen:
            if why := find_reason(layout, units, split, barred):
                advice = "leave it out, or change that"
                raise ConfigError(
                    f"layouts={names}: {layout.name} cannot be tried: {why}; {advice}"
                )
    if names is None and not chosen:
        raise ConfigError(f"data.global_batch: {units} rows fit one rank only; give more rows")
    if not chosen:
        advice = f"give some of {', '.join(LAYOUTS)}, ranks-<n>"
        raise ConfigError(f"layouts={names}: must name at least one; {advice}")
    if split.is_fixed and any(len(layout.overrides) == 1 for layout in chosen):
        raise ConfigError(f"layouts={names}: must be workers or ranks-<n> with strategy=exact")
    return [
        replace(layout, overrides=tuple(word.format(half=half) for word in layout.overrides))
        for layout in chosen
    ]


def find_reason(
    layout: Layout, units: int, split: BatchSplit, barred: Mapping[str, str] | None
) -> str:
    """Return why the task cannot be trained in a layout, or an empty string."""
    why = [(barred or {})[axis] for axis in layout.axes if axis in (barred or {})]
    if not why and layout.data_ranks > units:
        why = [describe_batch(units, split)]
    return why[0] if why else ""


def describe_batch(units: int, split: BatchSplit) -> str:
    """Return a phrase about the parts of a global batch that ranks can have."""
    return f"the global batch has {counted(units, 'part')} of {counted(split.unit, 'row')}"


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
    threads = _OtherThreads(stage, reference)
    for layout_number, layout in enumerate(every, 1):
        where = f"layout {layout.name} ({layout_number} of {len(every)})"
        print(f"training in {where} ...", file=sys.stderr, flush=True)
        overrides = [*ONCE, *layout.overrides]
        try:
            evidence = stage.train(layout.name, layout.ranks, overrides, list(reference))
        except ConfigError as error:
            if not may_refuse or not (layout.axes or layout.name == "accumulation"):
                raise
            print(f"left out: {error}")
            continue
        findings_by_precision: dict[str, Finding] = {}
        for precision in reference:
            pair = (reference[precision], evidence[precision])
            if is_bits:
                findings_by_precision[precision] = compare_bits(layout.name, precision, *pair)
                continue
            finding = compare(layout.name, precision, *pair, limits[precision])
            if precision == FP64_NAME and finding.result == DIFFERENT:
                finding = threads.judge(finding, evidence[FP64_NAME])
            exact = findings_by_precision.get(FP64_NAME)
            if exact is not None and finding.result == DIFFERENT:
                finding = replace(finding, reason="as in fp64")  # here rounding adds to it
                if exact.result != DIFFERENT:
                    reason = rounding(reference[precision])
                    finding = replace(finding, result=ROUNDING, reason=reason)
            findings_by_precision[precision] = finding
        findings += findings_by_precision.values()
    return findings


class _OtherThreads:
    """The reference in fp64 with another number of threads, run once a layout differs from it.

    Only rounding can differ between these two, unless the task draws unseeded random numbers: then
    the reference differs from itself too, and nothing is excused. Where a step decides between
    values that are equal up to rounding, as max pooling over a flat part of an image does, that
    changes gradients: those of task=cifar by 7e-6.
    """

    def __init__(self, stage: TrialRuns, reference: Mapping[str, Evidence]):
        self._stage = stage
        self._reference = reference

    @cached_property
    def _limits(self) -> Distances:
        print("measuring the rounding of fp64 ...", file=sys.stderr, flush=True)
        again = self._stage.train("one-rank-again", 1, ONCE, [FP64_NAME])
        if compare(
            "one rank", FP64_NAME, self._reference[FP64_NAME], again[FP64_NAME], EXACT
        ).is_bad:
            return EXACT
        threads = 1 if usable_cores() > 1 else 2
        other = self._stage.train("one-rank-threads", 1, ONCE, [FP64_NAME], threads=threads)
        return measure_rounding(FP64_NAME, self._reference[FP64_NAME], other[FP64_NAME])

    def judge(self, finding: Finding, evidence: Evidence) -> Finding:
        """Return a difference as rounding if it is no larger than that of the threads."""
        reference = self._reference[FP64_NAME]
        if compare(finding.layout, FP64_NAME, reference, evidence, self._limits).is_bad:
            return finding
        why = rounding(reference, "another number of threads on one rank changes as much")
        return replace(finding, result=ROUNDING, where="", reason=why)


def _train_reference(
    stage: TrialRuns, layouts: Sequence[Layout], is_bits: bool
) -> tuple[dict[str, Evidence], dict[str, Distances]]:
    """Train on one rank; return the evidence, and the limits for other layouts, by precision.

    A task that does not run in fp64 is judged in its own precision alone.
    """
    *exact, own = list(stage.precisions)[-1:] if is_bits else list(stage.precisions)
    ahead = f"{counted(len(layouts), 'layout')} of {stage.steps} steps to try afterwards"
    print(f"training on one rank, the reference ({ahead}) ...", file=sys.stderr, flush=True)
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
    limits = {FP64_NAME: EXACT}
    narrowest = {p: evidence.ranks[0].narrowest for p, evidence in reference.items()}
    rounded = [p for p in reference if (p, narrowest[p]) != (FP64_NAME, FP64_NAME)]
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


DISTANCE_GROUPS = ("examples", "losses", "gradients", "weights", "metrics")


def show(findings: Sequence[Finding], steps: int, left_out: Mapping[str, str]) -> None:
    """Print what is left out, the table, the reasons below it, and the overall result."""
    reasons: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        print(f"left out: {', '.join(names)} ({reason})")
    print(f"{steps} steps; largest relative difference from the reference")
    rows = [
        (
            each.layout,
            each.precision,
            *[_cell(each, group) for group in DISTANCE_GROUPS],
            each.result,
        )
        for each in findings
    ]
    print_table(("layout", "precision", *DISTANCE_GROUPS, "result"), rows)
    for finding in findings:
        if finding.reason or finding.where:
            about = f"{finding.layout}, {finding.precision}: {finding.result}"
            why = "; ".join(part for part in (finding.where, finding.reason) if part)
            print(visible(f"{about}: {why}"))
    num_bad = sum(finding.is_bad for finding in findings)
    if num_bad:
        print(f"NOT proved: {num_bad} of {len(findings)}")
    else:
        print("proved: all runs learned the same")


def list_left_out(
    layouts: Sequence[Layout],
    units: int,
    split: BatchSplit,
    barred: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the default layouts that are not tried, each with the reason."""
    chosen = {layout.name for layout in layouts}
    left = [name for name in (ONE_CUT if split.is_fixed else LAYOUTS) if name not in chosen]
    return {
        name: find_reason(find_layout(name), units, split, barred) or describe_batch(units, split)
        for name in left
    }


def _cell(finding: Finding, group: str) -> str:
    if not finding.worst:
        return ""
    value = finding.worst[group]
    if group == "examples":
        return "differ" if value else "same"
    return "0" if value == 0 else f"{value:.0e}"
