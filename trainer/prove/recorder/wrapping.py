"""Wrapping: functions of torch that are watched, and that take their arguments as before.

A watched function binds what it is given by the signature of the original, so each argument may
come by its place or by its name.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from .log import quietly

Given = dict[str, Any]  # arguments by their names in the original; a builtin has none
WRAPPED: list[tuple[Any, str]] = []  # owner and name of each function that was replaced


def replace(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace a function by one that does more, under the same name and signature."""
    setattr(owner, name, functools.wraps(getattr(owner, name))(call))
    WRAPPED.append((owner, name))


def watch(
    owner: Any,
    name: str,
    before: Callable[[Given], None] | None = None,
    after: Callable[[Given, Any], None] | None = None,
) -> None:
    """Call `before(given)` and `after(given, result)` around a function.

    `before` may replace values of `given`. Errors in both are noted instead of raised.
    """
    original = getattr(owner, name)
    signature = find_signature(original)
    begin = quietly(before) if before else None
    end = quietly(after) if after else None

    def call(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*arguments, **options)
        bound = bind(signature, arguments, options)
        if bound is None and signature is not None:
            return original(*arguments, **options)  # raises the error of a wrong call
        given: Given = bound.arguments if bound else {"": arguments, **options}
        if begin:
            begin(given)
        if bound is not None:
            arguments, options = bound.args, bound.kwargs
        result = original(*arguments, **options)
        if end:
            end(given, result)
        return result

    replace(owner, name, call)


def find_signature(function: Any) -> inspect.Signature | None:
    """Return the signature of a function; None for a builtin without one."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def bind(
    signature: inspect.Signature | None, arguments: tuple[Any, ...], options: dict[str, Any]
) -> inspect.BoundArguments | None:
    """Return the arguments by name; None for a call that the function does not take."""
    try:
        return None if signature is None else signature.bind(*arguments, **options)
    except TypeError:
        return None
