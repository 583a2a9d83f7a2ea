"""Targets: the one place where a name in a config becomes code."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.config.typed import convert, suggest
from trainer.errors import ConfigError, one_line

ALLOWED_PACKAGES = ("torch.optim", "torch.nn", "trainer")
_HOLDERS = (list, typing.Union, types.UnionType)


def resolve(name: str, key: str, packages: Sequence[str] = ()) -> Any:
    """The object a config names, `torch.optim.SGD`.

    Raises ConfigError unless the name, and the module that defines what it names, lie under an allowed package.
    """
    allowed = check_name(name, key, packages)
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        is_ours = f"{module}.".startswith(f"{missing}.")
        advice = (
            "start where it can be imported from"
            if is_ours
            else f"which {module} imports; install it"
        )
        raise ConfigError(
            f"{key}={name}: no module named {missing}{'; ' if is_ours else ', '}{advice}"
        ) from None
    except AttributeError:
        names = [n for n in vars(importlib.import_module(module)) if not n.startswith("_")]
        raise ConfigError(
            f"{key}={name}: {module} has no {attribute}{suggest(attribute, names)}"
        ) from None
    home = getattr(found, "__module__", None) or ""
    if not callable(found) or not any(f"{home}.".startswith(f"{package}.") for package in allowed):
        raise ConfigError(
            f"{key}={name}: must be a class or function defined under {', '.join(allowed)}"
        )
    return found


def check_name(name: str, key: str, packages: Sequence[str] = ()) -> tuple[str, ...]:
    """The packages that it may lie under. Raises ConfigError where it does not; nothing is imported."""
    allowed = tuple(dict.fromkeys((*ALLOWED_PACKAGES, *packages)))
    if not any(name.startswith(f"{package}.") for package in allowed):
        raise ConfigError(
            f"{key}={name}: must lie under {', '.join(allowed)}; task.packages=[<package>] adds one"
        )
    if (head := name.split(".")[0]) in sys.stdlib_module_names:
        raise ConfigError(
            f"{key}={name}: must not be of Python's own library, {head}; write a class or function"
        )
    if not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{key}={name}: must be <module>.<name>")
    return allowed


def check_target(
    spec: Mapping[str, Any], key: str, packages: Sequence[str], kind: type | None = None
) -> Any:
    """The object `spec["_target_"]` names: a subclass of `kind`, else what takes `num_steps` first, as schedules do.

    Without this any function of an allowed package could be called from a config, `trainer.checkpoint.sweep` as well.
    Raises ConfigError also for an argument in `spec` that it does not take.
    """
    target = resolve(spec["_target_"], f"{key}._target_", packages)
    if kind is not None and not (isinstance(target, type) and issubclass(target, kind)):
        raise ConfigError(
            f"{key}._target_={spec['_target_']}: must be a subclass of {kind.__module__}.{kind.__name__}"
        )
    try:
        parameters = inspect.signature(target).parameters
    except ValueError:
        parameters = {}  # type: ignore[assignment]
    if kind is None and next(iter(parameters), None) != "num_steps":
        advice = "as in def mine(num_steps, warmup_steps=0)"
        raise ConfigError(f"{key}._target_={spec['_target_']}: must take num_steps first, {advice}")
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for name, value in spec.items():
        if name != "_target_" and name not in parameters and not open_ended:
            near = suggest(name, parameters).replace("mean ", f"mean {key}.")
            raise ConfigError(f"{key}.{name} is not an argument of {spec['_target_']}{near}")
        if name in parameters:
            convert(_kind(parameters[name]), value, f"{key}.{name}")
            usual = parameters[name].default
            if isinstance(usual, tuple) and isinstance(value, list) and len(value) != len(usual):
                raise ConfigError(f"{key}.{name}={value}: must be {len(usual)} numbers")
    try:
        inspect.signature(target).bind(
            None, **{name: value for name, value in spec.items() if name != "_target_"}
        )
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
    return kind in (bool, int, float) or (
        origin in _HOLDERS and len(parts) == 1 and _is_plain(parts[0])
    )


def call_target(
    spec: Mapping[str, Any],
    key: str,
    packages: Sequence[str],
    kind: type | None,
    first: Any,
    **extra: Any,
) -> Any:
    """Call `spec["_target_"]` with its arguments, and with those of `extra` that it knows and `spec` does not give."""
    target = check_target(spec, key, packages, kind)
    known = inspect.signature(target).parameters
    given = {name: value for name, value in spec.items() if name != "_target_"}
    arguments = {name: value for name, value in extra.items() if name in known} | given
    try:
        return target(first, **arguments)
    except Exception as error:  # whatever a constructor says of its arguments
        raise ConfigError(f"{key} ({spec['_target_']}): {one_line(error)}") from None
