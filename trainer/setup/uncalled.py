"""Methods of a task that the trainer cannot call as they are written, or never calls."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType
from typing import Any

from trainer.config.hints import suggest_hook
from trainer.engine.parts import OWN
from trainer.errors import ConfigError
from trainer.task import Task


def check_hooks(task: Task) -> None:
    """Raise ConfigError for a hook that takes other arguments than the trainer gives it.

    And for an attribute of the class in the place of one of the trainer's, such as `model`.
    """
    kind = type(task).__name__
    for base in type(task).__mro__:
        for name, given in vars(base).items() if base.__module__ in OWN else ():
            if name.startswith("_") or getattr(type(task), name) is given:
                continue
            if isinstance(given, property):
                raise ConfigError(f"{kind}.{name}: is the trainer's; choose another name")
            if inspect.isfunction(given):
                _check_arguments(f"{kind}.{name}", getattr(task, name), given)


def _check_arguments(name: str, own: Any, hook: Any) -> None:
    _, *every = inspect.signature(hook).parameters.values()
    given = [each.name for each in every if each.default is each.empty]
    try:
        taken = inspect.signature(own)
    except (TypeError, ValueError):  # of a built-in function, or nothing that is called
        return
    try:
        taken.bind(*given)
    except TypeError:
        must = f"must take ({', '.join(given)})"
        raise ConfigError(f"{name} takes {taken}: {must}") from None


def find_uncalled(task: type[Task]) -> list[str]:
    """Return a warning for each method that looks like a hook, and that its class never names."""
    own: dict[str, tuple[type, Any]] = {}
    known: list[str] = []
    for kind in reversed(task.__mro__):
        if kind.__module__ in OWN:
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
