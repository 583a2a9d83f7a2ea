"""Targets: the one place where a name in a config becomes code."""

from __future__ import annotations

import importlib
import inspect
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config import check_value, one_line, suggest
from trainer.errors import ConfigError

ALLOWED_PACKAGES = ("torch.optim", "torch.nn", "trainer")
_HOLDERS = (list, typing.Union, types.UnionType)


def resolve(name: str, key: str, packages: Sequence[str] = ()) -> Any:
    """The object a config names, `torch.optim.SGD`.

    Raises ConfigError unless the name, and the module that defines what it names, lie under an allowed package.
    """
    allowed = tuple(dict.fromkeys((*ALLOWED_PACKAGES, *packages)))
    if not any(name.startswith(f"{package}.") for package in allowed):
        raise ConfigError(f"{key}={name}: must lie under {', '.join(allowed)}; task.packages=[<package>] adds one")
    module, _, attribute = name.rpartition(".")
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{key}={name}: must be <module>.<name>")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        advice = "start where it can be imported from"
        raise ConfigError(f"{key}={name}: no module named {error.name}; {advice}") from None
    except AttributeError:
        names = [n for n in vars(importlib.import_module(module)) if not n.startswith("_")]
        raise ConfigError(f"{key}={name}: {module} has no {attribute}{suggest(attribute, names)}") from None
    home = getattr(found, "__module__", None) or ""
    if not callable(found) or not any(f"{home}.".startswith(f"{package}.") for package in allowed):
        raise ConfigError(f"{key}={name}: must be a class or function defined under {', '.join(allowed)}")
    return found


def check_target(spec: Mapping[str, Any], key: str, packages: Sequence[str]) -> Any:
    """The object `spec["_target_"]` names. Raises ConfigError for an argument in `spec` that it does not take."""
    target = resolve(spec["_target_"], f"{key}._target_", packages)
    parameters = inspect.signature(target).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for name, value in spec.items():
        if name != "_target_" and name not in parameters and not open_ended:
            near = suggest(name, parameters).replace("mean ", f"mean {key}.")
            raise ConfigError(f"{key}.{name} is not an argument of {spec['_target_']}{near}")
        if name in parameters:
            check_value(_kind(parameters[name]), value, f"{key}.{name}")
    try:
        inspect.signature(target).bind(None, **{name: value for name, value in spec.items() if name != "_target_"})
    except TypeError as error:
        raise ConfigError(f"{key} ({spec['_target_']}): {error}") from None
    return target


def _kind(parameter: inspect.Parameter) -> Any:
    """What an argument must be, where the signature tells of a switch, a number or a list of numbers; else Any."""
    default = parameter.default
    if _is_plain(parameter.annotation):
        return parameter.annotation
    if isinstance(default, tuple) and {type(part) for part in default} == {float}:
        return list[float]
    return {bool: bool, int: float, float: float}.get(type(default), Any)


def _is_plain(kind: Any) -> bool:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return isinstance(parts[1], Mapping) and _is_plain(parts[0])  # limit(...)
    parts = tuple(part for part in parts if part is not type(None))
    return kind in (bool, int, float) or (origin in _HOLDERS and len(parts) == 1 and _is_plain(parts[0]))


def call_target(spec: Mapping[str, Any], key: str, packages: Sequence[str], *positional: Any, **extra: Any) -> Any:
    """Call `spec["_target_"]` with its arguments, and with those of `extra` that it knows and `spec` does not give."""
    target = check_target(spec, key, packages)
    known = inspect.signature(target).parameters
    given = {name: value for name, value in spec.items() if name != "_target_"}
    arguments = {name: value for name, value in extra.items() if name in known} | given
    try:
        return target(*positional, **arguments)
    except Exception as error:  # whatever a constructor says of its arguments
        raise ConfigError(f"{key} ({spec['_target_']}): {one_line(error)}") from None
