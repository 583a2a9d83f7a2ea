"""Precision: what a comparison in fp64 cannot judge, as it switches low precision off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.errors import counted
from trainer.prove.merging import CommandHistory, Step

MOST_NAMES = 3


def find_precision(one: CommandHistory, other: CommandHistory) -> tuple[int, str] | None:
    """Return the first step with another autocast, or None, and what differs."""
    shared = owners(one) & owners(other)
    for place, (ours, theirs) in enumerate(zip(one.steps, other.steps, strict=False)):
        pair = [autocast(step, shared) for step in (ours, theirs)]
        if pair[0] != pair[1] and (set(pair[0]) != set(pair[1]) or shared):
            shown = [f"{h.name} {_show(each)}" for h, each in zip((one, other), pair, strict=True)]
            return place, " and ".join(shown)
    kinds = [
        sorted({kind for each in described(h) for kind in each["dtypes"]}) for h in (one, other)
    ]
    if kinds[0] != kinds[1]:
        shown = [", ".join(each).replace("torch.", "") for each in kinds]
        return 0, f"the parameters of A are {shown[0]} and those of B {shown[1]}"
    return None


def described(history: CommandHistory) -> list[Mapping[str, Any]]:
    """Return what is noted of each optimizer on each rank."""
    return [each for rank in history.ranks for each in rank.optimizers.values()]


def owners(history: CommandHistory) -> set[str]:
    """Return the names of the modules that have trained parameters of their own."""
    return {name.rpartition(".")[0] for each in described(history) for name in each["names"]}


def autocast(step: Step, modules: set[str]) -> dict[str, set[str]]:
    """Return the modules that are called under autocast in a step, by dtype."""
    found: dict[str, set[str]] = {}
    for rank in step.ranks:
        for dtype, named in rank.modes.get("autocast", {}).items():
            found.setdefault(dtype, set()).update(name for name, _ in named if name in modules)
    return found


def _show(modules: Mapping[str, set[str]]) -> str:
    if not modules:
        return "computes without autocast"
    parts = []
    for dtype, names in modules.items():
        few = ", ".join(sorted(names)[:MOST_NAMES])
        parts.append(f"{dtype} ({counted(len(names), 'module')}: {few})" if few else dtype)
    return f"computes under autocast in {' and '.join(parts)}"


def name_unjudged(histories: Sequence[CommandHistory], is_fp64: bool) -> list[str]:
    """Return notes on low precision that a comparison in fp64 switches off."""
    if not is_fp64:
        return []
    steps = [(each, rank) for each in histories for step in each.steps for rank in step.ranks]
    dtypes = sorted({dtype for _, rank in steps for dtype in rank.modes.get("autocast", {})})
    notes = []
    if dtypes:
        what = f"autocast ({', '.join(dtypes)})"
        notes.append(f"fp64 switches {what} off and does not judge its rounding: dtype=native does")
    scaled = {each.name for each, rank in steps if any(b["scale"] != 1 for b in rank.backwards)}
    if scaled:
        who = " and ".join(sorted(scaled))
        notes.append(
            f"in fp64 no gradient overflows: steps that GradScaler skips in {who} are not judged"
        )
    flags = [described(each)[0]["flags"] for each in histories]
    for key in flags[0]:
        if flags[0][key] != flags[1].get(key):
            pair = f"{flags[0][key]} in A and {flags[1].get(key)} in B"
            notes.append(f"{key} is {pair}, which fp64 does not judge: dtype=native does")
    return notes
