"""Dataclasses from plain values, each checked against its annotation and limits."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal, TypeVar, Union

from trainer.errors import ConfigError

T = TypeVar("T")
Limits = Mapping[str, Any]
_NO_LIMITS: Limits = {}
NO_SETTING = {"is_setting": False}  # the metadata of a field that nobody sets
_NAMES: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    str: "a text",
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
    type(None): "null",
}


def limit(**bounds: float) -> dict[str, float]:
    """The bounds of a number: `min`, `max` (inclusive) or `above` (exclusive)."""
    return bounds


def suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean optim.lr?` for the nearest known name, else nothing."""
    known = list(known)
    same_leaf = [k for k in known if k.split(".")[-1] == name]
    close = same_leaf or difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else ""


def build(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """The dataclass `cls` from plain values, each checked against its annotation and limits.

    Raises ConfigError naming the full key, what was given and what is allowed.
    """
    hints = typing.get_type_hints(cls, include_extras=True)
    known = {f.name: f for f in dataclasses.fields(cls) if not f.metadata}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            near = suggest(str(name), known).replace("mean ", f"mean {prefix}")
            raise ConfigError(f"{prefix}{name} is not a setting{near}")
    arguments = {}
    for name, entry in known.items():
        key = f"{prefix}{name}"
        if name in values:
            arguments[name] = convert(hints[name], values[name], key)
        elif entry.default is entry.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{key} is missing: give {key}=<{_describe(hints[name])}>")
    return cls(**arguments)


def convert(kind: Any, value: Any, key: str, limits: Limits = _NO_LIMITS) -> Any:
    """`value` as the annotation `kind` wants it.

    Raises ConfigError, beginning with `key`, for a value that kind and limits do not allow.
    """
    origin = typing.get_origin(kind)
    choices = typing.get_args(kind)
    if origin is Annotated:
        return convert(choices[0], value, key, choices[1])
    if origin in (Union, types.UnionType):
        if value is None and type(None) in choices:
            return None
        kind = next(c for c in choices if c is not type(None))
        return convert(kind, value, key, {**limits, "null": True})
    if kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)  # run.name=5
    if origin is list and isinstance(value, list):
        return [convert(choices[0], entry, f"{key}[{i}]") for i, entry in enumerate(value)]
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return build(typing.cast(type, kind), value, f"{key}.")
    if not _fits(kind, value, key, limits):
        raise ConfigError(f"{key}={show(value)}: must be {_describe(kind, limits)}")
    return float(value) if kind is float else value


def _fits(kind: Any, value: Any, key: str, limits: Limits) -> bool:
    origin = typing.get_origin(kind)
    if origin is Literal:
        return any(value == c and type(value) is type(c) for c in typing.get_args(kind))
    if kind in (int, float):
        if not isinstance(value, (int, kind)) or isinstance(value, bool):
            return False
        is_finite = -math.inf < value < math.inf
        is_inside = limits.get("min", value) <= value <= limits.get("max", value)
        return is_finite and is_inside and value > limits.get("above", -math.inf)
    if kind is str and value == "":
        return key.startswith("task.options.")
    return kind is Any or isinstance(value, origin or kind)


def show(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) or "''"


def _describe(kind: Any, limits: Limits = _NO_LIMITS) -> str:
    origin = typing.get_origin(kind)
    choices = typing.get_args(kind)
    if origin is Annotated:
        return _describe(choices[0], choices[1])
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(c) for c in choices)
    if origin is Literal:
        return ("one of " if len(choices) > 1 else "") + ", ".join(show(c) for c in choices)
    bounds = {"min": "of at least", "above": "above", "max": "of at most"}
    told = [f" {word} {limits[name]}" for name, word in bounds.items() if name in limits]
    null = " or null" if "null" in limits else ""
    return _NAMES.get(origin or kind, "a group of settings") + " and".join(told) + null
