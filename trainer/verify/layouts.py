"""Layouts: the task trained in several, each compared with one rank."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace

from trainer.errors import ConfigError
from trainer.verify.comparison import DIFFERENT, ROUNDING, Finding, compare, judge_reference
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
LAYOUTS = {layout.name: layout for layout in _ALL}


def choose_layouts(names: str | None, global_batch: int) -> list[Layout]:
    """The layouts of a word `layouts=<names>`; without one, all that the global batch allows."""
    half = -(-global_batch // 2)
    if names is None:
        chosen = [layout for layout in _ALL if layout.ranks <= global_batch]
        if half < 2:
            chosen = [layout for layout in chosen if layout.name != "accumulation"]
    else:
        unique = dict.fromkeys(name for name in names.strip("[]").split(",") if name)
        chosen = [_parse(name) for name in unique]
    if not chosen:
        advice = f"give some of {', '.join(LAYOUTS)}, ranks-<n>"
        raise ConfigError(f"layouts={names}: names none; {advice}")
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


def prove_layouts(stage: Stage, layouts: Iterable[Layout]) -> list[Finding]:
    """Train on one rank and in each layout, in every precision of the stage."""
    reference = stage.train("one-rank", 1, ONCE, stage.precisions)
    findings = [judge_reference("one rank", p, evidence) for p, evidence in reference.items()]
    for layout in layouts:
        print(f"training in layout {layout.name} ...", file=sys.stderr, flush=True)
        overrides = [*ONCE, *layout.overrides]
        evidence = stage.train(layout.name, layout.ranks, overrides, stage.precisions)
        is_different = False
        for precision in stage.precisions:
            finding = compare(layout.name, precision, reference[precision], evidence[precision])
            if finding.result == DIFFERENT:
                if precision != FP64 and not is_different:
                    reason = rounding(reference[precision])
                    finding = replace(finding, result=ROUNDING, reason=reason)
                else:
                    is_different = True
            findings.append(finding)
    return findings
