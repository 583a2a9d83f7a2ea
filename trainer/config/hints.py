"""Suggestions for an unknown name: the nearest known name, or the advice in hints.yaml."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

TRANSLATED = ("strategy", "strategy.precision", "schedule")  # settings, with sections of that name
HINTS = Path(__file__).with_name("hints.yaml")


def suggest(name: str, known: Iterable[str], prefix: str = "") -> str:
    """Return advice for an unknown name, such as `; did you mean optim.lr?`.

    A known name with the same last part comes first, then the advice in hints.yaml, then the
    nearest known name. `prefix` is written before a known name. Empty if nothing is similar.
    """
    known = list(known)
    leaf = _leaf(name)
    is_own = f"{prefix}{name}".startswith("task.options.")  # names that the task defines
    hints = {} if is_own else _read("names")
    foreign = leaf.lower().replace("-", "_")
    close = [other for other in known if _leaf(other) == leaf]
    if close == ["task.trainer"]:
        close = []  # trainer=ddp is a group of lightning-hydra-template
    elif not close:
        # The prefix alone, as in run.patience and run.seed, makes no name near.
        least = 0.8 if foreign in hints else 0.5
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
        close = [other for other in close if _likeness(leaf, _leaf(other)) >= least]
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    near = difflib.get_close_matches(foreign, hints, n=1, cutoff=0.8)
    return f"; {hints[near[0]]}" if near else ""


def translate(key: str, value: Any, choices: Iterable[str]) -> str:
    """Return advice for an unknown value: `; bf16-mixed is amp_bf16 here`, or a similar choice."""
    choices = list(choices)
    name = str(value).lower()
    if name in choices:
        return f"; did you mean {name}?"
    own = _read(key).get(name) if key in TRANSLATED else None
    if own == "":
        return f"; {value} is not supported: use fsdp, or zero1 to divide the optimizer's state"
    return f"; {value} is {own} here" if own else suggest(str(value), choices)


def suggest_hook(name: str, hooks: Iterable[str]) -> str:
    """Return advice for a method that nothing calls: a hook's near name, or of a framework."""
    if name in (foreign := _read("hooks")):
        return foreign[name]
    near = difflib.get_close_matches(name, list(hooks), n=1, cutoff=0.85)
    return f"did you mean {near[0]}?" if near else ""


def suggest_attribute(name: str, known: Iterable[str]) -> str:
    """Return advice for an attribute that a task does not have; empty if nothing is similar."""
    if name in (foreign := _read("attributes")):
        return foreign[name]
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.8)
    return f"did you mean self.{near[0]}?" if near else ""


def _leaf(name: str) -> str:
    return name.split(".")[-1]


def _likeness(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other).ratio()


@cache
def _read(section: str) -> dict[str, str]:
    """Return a section of hints.yaml with one entry for each foreign name."""
    import yaml

    groups = yaml.safe_load(HINTS.read_text(encoding="utf-8"))[section]
    return {name.strip(): hint for names, hint in groups.items() for name in names.split(",")}
