"""Layouts: the task trained in several, each compared with one rank."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace

from trainer.data.order import Cut
from trainer.errors import ConfigError
from trainer.verify.comparison import (
    DIFFERENT,
    ROUNDING,
    Finding,
    compare,
    compare_bits,
    judge_reference,
)
from trainer.verify.reasons import rounding
from trainer.verify.stage import FP64, Stage

ONCE = ["checkpoint.every_epochs=null", "checkpoint.every_steps=null", "eval.every_epochs=null"]


@dataclass(frozen=True)
class Layout:
    """Ranks and overrides; {half} stands for half of the global batch."""

    name: str
    ranks: int
    overrides: tuple[str, ...] = ()


_ALL = (
    Layout("ranks-2", 2),
    Layout("ranks-3", 3),
    Layout("accumulation", 1, ("data.micro_batch={half}",)),
    Layout("workers", 2, ("data.workers=2", "data.path=streamed")),
    Layout("parameter-server", 2, ("strategy.comm_hook=parameter_server",)),
)
ONE_CUT = ("ranks-2", "ranks-3", "ranks-4", "workers")  # they leave the micro-batches as they are
LAYOUTS = {layout.name: layout for layout in _ALL}


def choose_layouts(names: str | None, units: int, cut: Cut) -> list[Layout]:
    """The layouts of a word `layouts=<names>`; without one, all that the global batch allows.

    It has so many units of rows. With micro-batches of a fixed size, those that cut no others.
    """
    half = cut.unit * -(-units // 2)
    if names is None:
        chosen = [_parse(name) for name in (ONE_CUT if cut.is_fixed else LAYOUTS)]
        chosen = [layout for layout in chosen if layout.ranks <= units]
        if half == cut.unit:
            chosen = [layout for layout in chosen if layout.name != "accumulation"]
    else:
        unique = dict.fromkeys(name for name in names.strip("[]").split(",") if name)
        chosen = [_parse(name) for name in unique]
    if not chosen:
        advice = f"give some of {', '.join(LAYOUTS)}, ranks-<n>"
        raise ConfigError(f"layouts={names}: names none; {advice}")
    if cut.is_fixed and any(len(layout.overrides) == 1 for layout in chosen):
        raise ConfigError(f"layouts={names}: strategy=exact takes workers, ranks-<n>")
    return [
        replace(layout, overrides=tuple(word.format(half=half) for word in layout.overrides))
        for layout in chosen
    ]


def _parse(name: str) -> Layout:
    if name in LAYOUTS:
        return LAYOUTS[name]
    count = name.removeprefix("ranks-")
    if not (name.startswith("ranks-") and count.isdecimal() and int(count)):
        raise ConfigError(f"layouts={name}: must be of {', '.join(LAYOUTS)} or ranks-<n>")
    return Layout(name, int(count))


def prove_layouts(stage: Stage, layouts: Iterable[Layout], is_bits: bool = False) -> list[Finding]:
    """Train on one rank and in each layout, in every precision of the stage.

    For equal bits in the last alone, the task's own.
    """
    precisions = list(stage.precisions)[-1:] if is_bits else list(stage.precisions)
    reference = stage.train("one-rank", 1, ONCE, precisions)
    findings = [judge_reference("one rank", p, evidence) for p, evidence in reference.items()]
    for layout in layouts:
        print(f"training in layout {layout.name} ...", file=sys.stderr, flush=True)
        overrides = [*ONCE, *layout.overrides]
        evidence = stage.train(layout.name, layout.ranks, overrides, precisions)
        is_different = False
        for precision in precisions:
            if is_bits:
                ours = (reference[precision], evidence[precision])
                findings.append(compare_bits(layout.name, precision, *ours))
                continue
            finding = compare(layout.name, precision, reference[precision], evidence[precision])
            if finding.result == DIFFERENT:
                if precision != FP64 and not is_different:
                    reason = rounding(reference[precision])
                    finding = replace(finding, result=ROUNDING, reason=reason)
                else:
                    is_different = True
            findings.append(finding)
    return findings
