"""Values of a loss or metric: their checks, and their weighted sums."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy
import torch
from torch.utils._pytree import tree_map_only

from trainer.base.codec import name_of
from trainer.base.errors import ConfigError
from trainer.core.data.examples import find_flaw

Values = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


def weigh(
    name: str, returned: Values, rows: int, verb: str = "returned"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return `values (rows, ...)` and their weights, None if each value has weight 1.

    Raises ConfigError for a scalar, for another first axis than `rows`, or for weights that have
    another shape or require a gradient.
    """
    values: object = returned
    weights: object = None
    subject = f"{name} {verb}"
    if isinstance(returned, tuple):
        if len(returned) != 2:
            raise ConfigError(f"""{subject} a tuple of {len(returned)}:
                must be values, or (values, weights)""")
        values, weights = returned
    if isinstance(values, torch.Tensor):
        _check_real(f"{subject} values", values)
    if not isinstance(values, torch.Tensor) or values.dim() == 0 or values.shape[0] != rows:
        _refuse_values(subject, values, rows)
    assert isinstance(values, torch.Tensor)
    if values.is_floating_point() and values.element_size() < 4:
        values = values.float()
    return values, None if weights is None else _check_weights(subject, values, weights)


def weigh_all(name: str, returned: Values, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what `weigh` does, with weights of 1 where there are none."""
    values, weights = weigh(name, returned, rows)
    return values, torch.ones_like(values) if weights is None else weights


def rows_in(returned: Values) -> int:
    """Return the rows of values, or of (values, weights); 0 for a scalar."""
    values: object = returned[0] if isinstance(returned, tuple) and returned else returned
    return len(values) if isinstance(values, torch.Tensor) and values.dim() else 0


def sum_up(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return (3,) float64: the sums of values x weights, of their sizes, and of the weights."""
    weighted = values.detach().double() * weights
    return torch.stack([weighted.sum(), weighted.abs().sum(), weights.sum().double()])


def _check_real(subject: str, tensor: torch.Tensor) -> None:
    """Raise ConfigError for a tensor without real numbers to sum. Called in each micro-batch."""
    is_strided = tensor.layout is torch.strided and not tensor.is_nested
    if is_strided and not (tensor.is_complex() or tensor.is_quantized or tensor.is_meta):
        return
    if flaw := find_flaw(tensor, allows_gradient=True):
        raise ConfigError(f"{subject} in {flaw[0]}; {flaw[1]}")
    if tensor.is_complex():
        raise ConfigError(f"""{subject} of dtype {name_of(tensor.dtype)}: must be real;
            return tensor.abs() or .real""")


def check_name(subject: str, name: object) -> None:
    """Raise ConfigError unless a value can be recorded under this name."""
    if not isinstance(name, str) or not name or not name.isprintable():
        raise ConfigError(f"{subject} the name {name!r}: must be a string of printable characters")


def check_named(subject: str, returned: Any) -> dict[str, Any]:
    """Return what a hook returned as a dict. Raises ConfigError unless it has values by name."""
    if not isinstance(returned, Mapping):
        raise ConfigError(f"""{subject} a {type(returned).__name__}:
            must be a dict of values by name""")
    for name in returned:
        check_name(subject, name)
    return dict(returned)


def first_rows(tree: Any, rows: int) -> Any:
    """Return the first rows of every tensor in a tree."""
    return tree_map_only(torch.Tensor, lambda t: t[:rows] if t.dim() else t, tree)


def as_number(subject: str, value: Any) -> float:
    """Return a hook's result as a float. Raises ConfigError if it is no real number."""
    try:
        if not isinstance(value, str):
            return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        pass
    description = f"a {type(value).__name__}"
    if isinstance(value, torch.Tensor):
        description = f"a tensor of shape {tuple(value.shape)}"
    raise ConfigError(f"{subject} {description}: must be a number")


def check_signs(name: str, weights: torch.Tensor | None) -> None:
    """Raise ConfigError for a negative weight. The host waits for the weights.

    One that is not finite may come from a bad example: run.on_bad_step handles its step.
    """
    if type(weights) is not torch.Tensor or not weights.numel():  # a fake one is of a plan
        return
    least = float(weights.double().nan_to_num(0.0).min())
    if least < 0:
        raise ConfigError(f"""{name} returned a weight of {least:g}: must be at least 0;
            multiply the values instead""")


def _refuse_values(subject: str, values: object, rows: int) -> None:
    if isinstance(values, torch.Tensor) and values.dim():
        raise ConfigError(f"""{subject} values of shape {tuple(values.shape)}:
            the first axis must be the {rows} examples of the batch""")
    if values is None or (isinstance(values, numpy.ndarray) and values.ndim):
        description = "None" if values is None else "a numpy array"
        raise ConfigError(f"{subject} {description}: must be a tensor with a value per example")
    description = "a scalar" if isinstance(values, torch.Tensor) else f"a {type(values).__name__}"
    raise ConfigError(f"""{subject} {description}: must be a value per example;
        use reduction="none", and leave out .mean() and .item()""")


def _check_weights(subject: str, values: torch.Tensor, weights: object) -> torch.Tensor:
    if not isinstance(weights, torch.Tensor):
        raise ConfigError(f"""{subject} {type(weights).__name__} weights:
            must be a tensor of the values' shape""")
    _check_real(f"{subject} weights", weights)
    if weights.shape != values.shape or weights.requires_grad:
        have = f"shape {tuple(weights.shape)}"
        have = "a gradient" if weights.requires_grad else have
        raise ConfigError(f"""{subject} weights with {have}:
            must be detached and of the values' shape {tuple(values.shape)}""")
    return weights
