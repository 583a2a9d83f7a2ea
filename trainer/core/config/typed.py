"""Conversion of plain values to dataclasses, checked, with suggestions for unknown names."""

from __future__ import annotations

import dataclasses
import difflib
import math
import types
import typing
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

from trainer.base.errors import ConfigError, closest, did_you_mean
from trainer.base.folders import CONF

TRANSLATED = ("strategy", "strategy.precision", "schedule")  # settings, with sections of that name
HINTS = Path(__file__).with_name("hints.yaml")


def suggest(name: str, candidates: Iterable[str], prefix: str = "") -> str:
    """Return advice for an unknown name, such as `; did you mean optim.lr?`.

    A known name with the same last part comes first, then the advice in hints.yaml, then the
    nearest known name. `prefix` is written before a known name. Empty if nothing is similar.
    """
    candidates = list(candidates)
    leaf = _leaf(name)
    is_own = f"{prefix}{name}".startswith("task.options.")  # names that the task defines
    hints = {} if is_own else _read("names")
    foreign = leaf.lower().replace("-", "_")
    close = [other for other in candidates if _leaf(other) == leaf]
    if close == ["task.trainer"]:
        close = []  # trainer=ddp is a group of lightning-hydra-template
    elif not close:
        # The prefix alone, as in run.patience and run.seed, makes no name near.
        least = 0.8 if foreign in hints else 0.5
        near = closest(name, candidates, 0.6)
        close = [near] if near and _likeness(leaf, _leaf(near)) >= least else []
    if close:
        return f"; did you mean {prefix}{close[0]}?"
    near = closest(foreign, hints, 0.8)
    return f"; {hints[near]}" if near else ""


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
    return did_you_mean(name, hooks, 0.85).removeprefix("; ")


def suggest_attribute(name: str, candidates: Iterable[str]) -> str:
    """Return advice for an attribute that a task does not have; empty if nothing is similar."""
    if name in (foreign := _read("attributes")):
        return foreign[name]
    near = closest(name, candidates, 0.8)
    return f"did you mean self.{near}?" if near else ""


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


T = TypeVar("T")
Limits = Mapping[str, Any]
_NO_LIMITS: Limits = {}
NO_SETTING = {"is_setting": False}  # metadata of a dataclass field that is not a setting
_TYPE_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    bool: "true or false",
    dict: "a mapping",
    list: "a list",
    tuple: "a list",
    type(None): "null",
}


class _Bounds(dict):
    """A dict that can be part of an annotation such as `Annotated[int, limit(min=1)] | None`."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


def limit(**bounds: float) -> dict[str, float]:
    """Return the bounds of a number: `min`, `max` (inclusive), `above`, `below` (exclusive)."""
    return _Bounds(bounds)


def unknown(prefix: str, name: str, candidates: Iterable[str]) -> ConfigError:
    """Return the error for a name that is not a setting."""
    return ConfigError(f"{prefix}{name} is not a setting{suggest(name, candidates, prefix)}")


class OptionMapping(dict[str, Any]):
    """Plain settings of a task, which are attributes too: `options.width`, `options["width"]`."""

    def __init__(self, values: Mapping[str, Any]):
        super().__init__((name, _with_attributes(value)) for name, value in values.items())

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(f"there is no option {name}{suggest(name, self)}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"options are not changed: give task.options.{name}={value}")


def _with_attributes(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_attributes(each) for each in value]
    return OptionMapping(value) if isinstance(value, Mapping) else value


def build(cls: type[T], values: Mapping[str, Any], prefix: str = "") -> T:
    """Build the dataclass `cls` from plain values, checked against its annotations and limits.

    Raises ConfigError with the full key, the given value and the allowed values.
    """
    if not dataclasses.is_dataclass(cls):
        name = getattr(cls, "__qualname__", type(cls).__name__)
        raise ConfigError(f"{name}: must be a dataclass; write @dataclass above the class")
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(cls) if not f.metadata}
    for name in values:
        if name not in fields:
            raise unknown(prefix, str(name), fields)
    arguments = {}
    for name, entry in fields.items():
        key = f"{prefix}{name}"
        if name in values:
            arguments[name] = convert(hints[name], values[name], key)
        elif entry.default is entry.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{key} is missing: give {key}=<{describe(hints[name])}>")
    return cls(**arguments)


def defaults_of(built: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the plain values of a built dataclass that are its defaults, not in `values`."""
    every = dataclasses.asdict(built)
    plain = {name: list(v) if isinstance(v, tuple) else v for name, v in every.items()}
    kinds = (str, int, float, bool, list, dict, type(None))
    return {n: v for n, v in plain.items() if n not in values and isinstance(v, kinds)}


def convert(kind: Any, value: Any, key: str, limits: Limits = _NO_LIMITS) -> Any:
    """Return `value` converted to the annotation `kind`.

    Raises ConfigError, starting with `key`, for a value that `kind` and `limits` do not allow.
    """
    origin = typing.get_origin(kind)
    choices = typing.get_args(kind)
    if origin is Annotated:
        return convert(choices[0], value, key, choices[1])
    if origin in (Union, types.UnionType):
        return _convert_union(kind, value, key, limits)
    if kind is str and isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)  # run.name=5
    if origin is list and isinstance(value, list):
        return [convert(choices[0], entry, f"{key}[{i}]") for i, entry in enumerate(value)]
    if kind is tuple or origin is tuple:
        return _convert_tuple(kind, value, key)
    if origin is dict and isinstance(value, Mapping):
        names = [convert(choices[0], name, f"{key}: the name {show(name)}") for name in value]
        values = [convert(choices[1], entry, f"{key}.{name}") for name, entry in value.items()]
        return dict(zip(names, values, strict=True))
    if dataclasses.is_dataclass(kind) and isinstance(value, Mapping):
        return build(typing.cast(type, kind), value, f"{key}.")
    if not _fits(kind, value, key, limits):
        near = translate(key, value, choices) if origin is Literal else _advise(kind, value, key)
        raise ConfigError(f"{key}={show(value)}: must be {describe(kind, limits)}{near}")
    return float(value) if kind is float else value


def _advise(kind: Any, value: Any, key: str) -> str:
    """Return what to write instead of a string that a YAML file has: `; leave out its quotes`."""
    if not isinstance(value, str):
        return ""
    if kind in (int, float):
        with suppress(ValueError):
            float(value)
            return "; leave out its quotes"
    if (kind is list or typing.get_origin(kind) is list) and value:
        return f"; write [{value}]"
    if (CONF / key / f"{value}.yaml").is_file():
        return f"; in a file write '- override /{key}: {value}' in defaults"
    return ""


def _convert_union(kind: Any, value: Any, key: str, limits: Limits) -> Any:
    """Convert to the first member that accepts the value. A member of its exact type goes first."""
    members = [member for member in typing.get_args(kind) if member is not type(None)]
    if value is None and len(members) < len(typing.get_args(kind)):
        return None
    if len(members) == 1:
        return convert(members[0], value, key, {**limits, "null": len(typing.get_args(kind)) > 1})
    kinds = [member.__origin__ if hasattr(member, "__metadata__") else member for member in members]
    own = [int, float] if type(value) is int else [type(value)]
    for wanted in own:
        if wanted in kinds:
            return convert(members[kinds.index(wanted)], value, key, limits)
    for member in members:
        try:
            return convert(member, value, key, limits)
        except ConfigError:
            continue
    raise ConfigError(f"{key}={show(value)}: must be {describe(kind, limits)}")


def _convert_tuple(kind: Any, value: Any, key: str) -> tuple[Any, ...]:
    """Convert a list to `tuple[int, int]`, `tuple[int, ...]` or a plain tuple."""
    members = typing.get_args(kind)
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{key}={show(value)}: must be {describe(kind)}")
    if not members:
        return tuple(value)
    if members[-1] is ...:
        members = members[:1] * len(value)
    if len(members) != len(value):
        raise ConfigError(f"{key}={show(value)}: must be {describe(kind)}")
    pairs = enumerate(zip(members, value, strict=True))
    return tuple(convert(member, entry, f"{key}[{i}]") for i, (member, entry) in pairs)


def _fits(kind: Any, value: Any, key: str, limits: Limits) -> bool:
    """Return True if a value has the type `kind` and is within the limits.

    An empty string is allowed in task.options only.
    """
    origin = typing.get_origin(kind)
    if origin is Literal:
        return any(value == c and type(value) is type(c) for c in typing.get_args(kind))
    if kind in (int, float):
        if not isinstance(value, (int, kind)) or isinstance(value, bool):
            return False
        is_finite = -math.inf < value < math.inf
        is_inside = limits.get("min", value) <= value <= limits.get("max", value)
        is_between = limits.get("above", -math.inf) < value < limits.get("below", math.inf)
        return is_finite and is_inside and is_between
    if kind is str and value == "":
        return key.startswith("task.options.")
    return kind is Any or isinstance(value, origin or kind)


def show(value: Any) -> str:
    """Return a value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value) or "''"


def describe(kind: Any, limits: Limits = _NO_LIMITS) -> str:
    """Return the values that an annotation allows, such as `an integer of at least 1 or null`."""
    origin = typing.get_origin(kind)
    choices = typing.get_args(kind)
    if origin is Annotated:
        return describe(choices[0], choices[1])
    if origin in (Union, types.UnionType):
        return " or ".join(describe(c, limits if c is not type(None) else {}) for c in choices)
    null = " or null" if "null" in limits else ""
    if origin is Literal:
        return ("one of " if len(choices) > 1 else "") + ", ".join(map(show, choices)) + null
    if origin is tuple and ... not in choices:
        return f"a list of {len(choices)} values"
    bounds = {"min": "of at least", "above": "above", "max": "of at most", "below": "below"}
    limited = [f" {word} {limits[name]}" for name, word in bounds.items() if name in limits]
    return _TYPE_NAMES.get(origin or kind, "a group of settings") + " and".join(limited) + null
