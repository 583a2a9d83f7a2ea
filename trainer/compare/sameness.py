"""The verdict on two runs: the same bits, up to rounding, different, or not known."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trainer.compare.differences import Difference, list_changes, list_compared, rounding_limit
from trainer.config.schema import LAYOUT
from trainer.engine.precision import ROUNDING
from trainer.errors import counted, shortened
from trainer.record.startup import STOPPED
from trainer.report.reading import RunFiles

SAME_BITS = "the same bits: curves, examples and weights are equal"
CANNOT_TELL = "cannot tell"
MOST_NAMED = 4
MOST_OF_A_REASON = 200  # characters
OF_SOURCES = ("the code of ", "the train data's ", "the eval data's ")  # facts


@dataclass(frozen=True)
class Sameness:
    """The verdict on two runs; `is_same` if they are one run, up to rounding."""

    line: str
    is_same: bool


def judge(one: RunFiles, other: RunFiles, found: list[Difference]) -> Sameness:
    """Return the verdict on two runs, by their first differences."""
    unknown = explain_unknown(one, other)
    if not found:
        return Sameness(f"{CANNOT_TELL}: {unknown}" if unknown else SAME_BITS, not unknown)
    pair = [one, other]
    settings = [c.name for c in list_changes(pair, "settings") if not c.name.startswith(LAYOUT)]
    small = [each for each in found if each.is_rounding]
    facts = _list_facts(one, other)
    if settings:
        return Sameness(f"different: {_listed(settings)}", False)
    if len(small) == len(found):
        return _judge_rounding(one, other, small, unknown)
    if small and found[0] is small[0] and not any(each.is_of_examples for each in found):
        late = next(each for each in found if not each.is_rounding)
        growth = f"{_short(small[0])} {small[0].distance:.0e} at step {small[0].step:,}"
        if late.distance is not None and math.isfinite(late.distance):
            growth += f", {_short(late)} {late.distance:.0e} at step {late.step:,}"
        caution = f"changed: {_listed(facts)}; " if facts else ""
        check = "strategy=exact or strategy.precision=fp64 shows whether it is rounding alone"
        line = f"starts as rounding and grows ({growth}); {caution}{check}"
        return Sameness(line, False)
    changed = "Same settings" + ", code and data" * (None not in (one.manifest, other.manifest))
    if facts:
        changed = f"Changed: {_listed(facts)}"
    line = f"different: {found[0].name}, from {_span(found[0])}. {changed}"
    return Sameness(line, False)


def _judge_rounding(
    one: RunFiles, other: RunFiles, small: list[Difference], unknown: str
) -> Sameness:
    """Return the verdict on two runs whose differences may all be rounding.

    In 16 bits a small change of code or data moves results no further than rounding does.
    """
    limit = rounding_limit(one, other)
    apart = f"at most {max(each.distance or 0.0 for each in small):.0e} apart"
    within = f"{one.settings['strategy.precision']} may differ by {limit:.0e}"
    changed = [name for name in _list_facts(one, other) if name.startswith(OF_SOURCES)]
    if changed and limit > max(ROUNDING.values()):
        unknown = f"{_listed(changed)} changed; strategy.precision=fp64 shows whether it matters"
    if unknown:
        return Sameness(
            f"{CANNOT_TELL}: {apart}, which may be rounding ({within}); {unknown}", False
        )
    return Sameness(f"the same run up to rounding: {apart} ({within})", True)


def _list_facts(one: RunFiles, other: RunFiles) -> list[str]:
    """Return the names of facts that differ; none if a run has no checkpoint, which has them."""
    if one.manifest is None or other.manifest is None:
        return []
    changes = list_changes([one, other], "facts")
    return [each.name for each in changes if not each.name.startswith("the curve ")]


def _span(difference: Difference) -> str:
    if difference.first_step >= difference.step:
        return f"step {difference.step:,}"
    return f"a step between {difference.first_step:,} and {difference.step:,}"


def _short(difference: Difference) -> str:
    return difference.name.partition(",")[0]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def explain_unknown(one: RunFiles, other: RunFiles) -> str:
    """Return why two runs without a difference cannot be called equal; empty if they can be."""
    for run in (other, one):
        if run.step == 0:
            return f"{run.name} {_how_it_ended(run, 'before its first step')}"
    compared = list_compared(one, other)
    last = max((step for steps in compared.values() for step in steps), default=0)
    if last and one.step != other.step:
        shorter = min(one, other, key=lambda run: run.step)
        end = _how_it_ended(shorter, f"after step {shorter.step:,}")
        return f"nothing differs up to step {last:,}; {shorter.name} {end}"
    if apart := [kind for kind, steps in compared.items() if not steps]:
        advice = "train both with the same log.every_steps and checkpoint.every_steps"
        return f"no step has {' or '.join(apart)} in both runs; {advice}"
    for run in (other, one):
        if run.manifest is None:
            return f"{run.name} has no checkpoint, so its code and data are unknown"
    return ""


def _how_it_ended(run: RunFiles, when: str) -> str:
    """Return `failed before its first step: ...`."""
    code = run.exit.get("code")
    if code is None:
        return f"has not ended, or was killed, {when}"
    if code in (0, STOPPED):
        return f"{'stopped' if code else 'ended'} {when}"
    return f"failed {when}: {shortened(str(run.exit.get('reason', '')), MOST_OF_A_REASON)}"


def list_unknown(one: RunFiles, other: RunFiles) -> list[str]:
    """Return a line for each thing that the runs have too little in common to compare."""
    compared = list_compared(one, other)
    lines = [
        f"unknown: {k}, as no step has them in both runs" for k, s in compared.items() if not s
    ]
    if one.manifest is None or other.manifest is None:
        lines.append("unknown: data, code and versions, as a run has no checkpoint")
    if one.step != other.step:
        last = max((step for steps in compared.values() for step in steps), default=0)
        steps = f"{one.name} has {counted(one.step, 'step')}, {other.name} {other.step:,}"
        lines.append(f"unknown: anything after step {last:,}; {steps}")
    return lines
