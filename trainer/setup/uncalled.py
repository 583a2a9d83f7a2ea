"""Methods of a task that nothing calls: misspelled hooks, and hooks of other frameworks."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from trainer.config.hints import suggest_hook
from trainer.task import Task


def find_uncalled(task: type[Task]) -> list[str]:
    """Return a warning for each method that looks like a hook, and that its class never names."""
    own: dict[str, tuple[type, Any]] = {}
    known: list[str] = []
    for kind in reversed(task.__mro__):
        if kind.__module__ in ("trainer.trainer", "trainer.task"):
            known += [name for name in vars(kind) if not name.startswith("_")]
        else:
            own |= {n: (kind, each) for n, each in vars(kind).items() if inspect.isfunction(each)}
    used = {name for _, method in own.values() for name in _names_in(method.__code__)}
    lines = []
    for name, (kind, _) in own.items():
        advice = "" if name in known or name in used else suggest_hook(name, known)
        if advice:
            line = f"warning: {kind.__name__}.{name} is never called by the trainer; {advice}"
            lines.append(line)
    return lines


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
