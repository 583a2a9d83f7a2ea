"""Dataclasses from plain values: each checked against its annotation and limits, and refused by its full name."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import fields, is_dataclass
from typing import Annotated, Any, Literal, TypeVar, Union

from trainer.errors import ConfigError

T = TypeVar("T")


def limit(**bounds: float) -> dict[str, float]:
    """What a number may be: `min`, `max` (inclusive) or `above` (exclusive)."""
    return bounds


def suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean optim.lr?` for the nearest known name, else nothing."""
    known = list(known)
    leaf = [k for k in known if k.split(".")[-1] == name]
    close = leaf or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def build(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """The dataclass `cls` from plain values, each checked against its annotation and limits.

    Raises ConfigError naming the full key, what was given and what is allowed.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    known = {f.name: f for f in fields(cls)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            near = suggest(str(name), known)
            raise ConfigError(
                f"{prefix}{name} is not a setting{near.replace('mean ', f'mean {prefix}')}"
            )
    arguments = {}
    for name, entry in known.items():
        if name in values:
            arguments[name] = typed(hints[name], values[name], f"{prefix}{name}", {})
        elif entry.default is dataclasses.MISSING and entry.default_factory is dataclasses.MISSING:
            raise ConfigError(
                f"{prefix}{name} is missing: give {prefix}{name}=<{_spell(hints[name])}>"
            )
    return cls(**arguments)


def check_value(kind: Any, value: Any, key: str) -> None:
    """Raise ConfigError, beginning with `key`, for a value that the annotation `kind` and its limits do not allow."""
    typed(kind, value, key, {})


def typed(kind: Any, value: Any, key: str, limits: Mapping[str, Any]) -> Any:
    origin, choices = typing.get_origin(kind), typing.get_args(kind)
    if kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)  # run.name=5
    if origin is list and isinstance(value, list):
        return [
            typed(choices[0], entry, f"{key}[{number}]", {}) for number, entry in enumerate(value)
        ]
    if is_dataclass(kind) and isinstance(value, Mapping):
        return build(typing.cast(type, kind), value, f"{key}.")
    if origin is Annotated:
        return typed(choices[0], value, key, choices[1])
    if origin in (Union, types.UnionType):
        if value is None and type(None) in choices:
            return None
        kind = next(c for c in choices if c is not type(None))
        return typed(kind, value, key, {**limits, "null": True})
    fits = {
        Literal: lambda: any(value == c and type(value) is type(c) for c in choices),
        list: lambda: isinstance(value, list),
        dict: lambda: isinstance(value, dict),
        float: lambda: (
            isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
        ),
        int: lambda: isinstance(value, int) and not isinstance(value, bool),
        str: lambda: isinstance(value, str) and (value != "" or key.startswith("task.options.")),
        Any: lambda: True,
    }.get(origin or kind, lambda: isinstance(value, kind))
    if not fits() or (isinstance(value, (int, float)) and not _is_inside(value, limits)):
        raise ConfigError(f"{key}={show(value)}: must be {_spell(kind, limits)}")
    return float(value) if kind is float else value


def _is_inside(value: float, limits: Mapping[str, Any]) -> bool:
    low, high, above = (
        limits.get(k, d) for k, d in (("min", -math.inf), ("max", math.inf), ("above", -math.inf))
    )
    return low <= value <= high and value > above


def show(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) or "''"


def _spell(kind: Any, limits: Mapping[str, Any] | None = None) -> str:
    limits = limits or {}
    origin, choices = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _spell(choices[0], choices[1])
    if origin in (Union, types.UnionType):
        return " or ".join(_spell(c) for c in choices)
    if origin is Literal:
        return ("one of " if len(choices) > 1 else "") + ", ".join(show(c) for c in choices)
    names: dict[Any, str] = {
        int: "a whole number",
        float: "a number",
        str: "a text",
        bool: "true or false",
    }
    names |= {dict: "a mapping", list: "a list"}
    text = "null" if kind is type(None) else names.get(origin or kind, "a group of settings")
    bounds = {"min": "of at least", "above": "above", "max": "of at most"}
    text += " and".join(
        f" {word} {limits[name]}" for name, word in bounds.items() if name in limits
    )
    return text + (" or null" if "null" in limits else "")
