"""Criteria: calls of torch's loss functions, their settings, and by what a mean divides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from .log import LOG
from .wrapping import Given, find_signature, watch

OF_CLASSES = ("cross_entropy", "nll_loss")
CRITERIA = (
    *OF_CLASSES,
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "gaussian_nll_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "poisson_nll_loss"),
)
DEPRECATED = ("size_average", "reduce")
PLAIN = (int, float, bool, str)


def watch_criteria() -> None:
    """Note each loss that is computed with gradients."""
    for name in CRITERIA:
        signature = find_signature(getattr(F, name))
        parameters = signature.parameters.values() if signature else ()
        watch(F, name, _noting(name, {each.name: each.default for each in parameters}))


def _noting(name: str, defaults: dict[str, Any]) -> Callable[[Given], None]:
    def note(given: Given) -> None:
        is_batched = torch._C._functorch.peek_interpreter_stack() is not None  # by vmap
        if not torch.is_grad_enabled() or is_batched:
            return
        every = defaults | given
        settings = {k: v for k, v in every.items() if isinstance(v, PLAIN) and k not in DEPRECATED}
        settings["weight"] = every.get("weight") is not None
        is_mean = settings["reduction"] == "mean"
        divisor = _divisor(name, every) if is_mean else 1.0
        LOG.add("criterion", name=name, settings=settings, divisor=divisor)

    return note


def _divisor(name: str, given: Given) -> float | None:
    """Return by what the mean of a loss divides; None if it is not known."""
    target, weight = given["target"], given.get("weight")
    if name not in OF_CLASSES:
        return float(target.numel()) if weight is None else None
    if target.is_floating_point():
        return float(target.numel() / target.shape[min(1, target.dim() - 1)])
    used = target[target != given["ignore_index"]]
    if weight is None:
        return float(used.numel())
    total: Any = weight[used].double().sum()
    return float(total.tolist())
