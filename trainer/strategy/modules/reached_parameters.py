"""Parameters in training: the loss must reach them, and the task must not replace them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from trainer.config.schema import StrategySettings
from trainer.errors import ConfigError

Known = Mapping[str, tuple[nn.Parameter, bool]]  # at the start, and whether they were trained


def describe_change(known: Known, now: Mapping[str, nn.Parameter]) -> str:
    """Return a line on the first parameter that is another one than at the start; empty if none."""
    for name in {**known, **now}:
        before, was_trained = known.get(name, (None, False))
        after = now.get(name)
        how = ""
        if before is None:
            how = "was added after the start: nothing trains it; build it in build_model"
        elif after is None:
            how = "was removed after the start, so no resume could load a checkpoint; keep it"
        elif after is not before:
            advice = "write its values into the old one by copy_"
            how = f"is another tensor than at the start, which alone is trained; {advice}"
        elif after.requires_grad and not was_trained:
            advice = "build it with requires_grad=True, and set its learning rate to 0 at first"
            how = f"requires a gradient now, but nothing trains it; {advice}"
        if how:
            return f"the parameter {name} {how}"
    return ""


def check_reached(config: StrategySettings, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ConfigError naming a parameter to train without a gradient, unless that is allowed.

    Another rank may have a gradient for it, and reduce it.
    """
    if config.find_unused_parameters:
        return
    for name, parameter in parameters.items():
        if parameter.grad is None:
            problem = f"the loss does not depend on the parameter {name}"
            advice = "use it, set requires_grad=False"
            if not parameter.requires_grad:
                problem = f"the parameter {name} was frozen after the start"
                advice = "freeze it from the start by run.freeze"
            advice = f"{advice}, or set strategy.find_unused_parameters=true"
            raise ConfigError(f"strategy={config.name}: {problem}; {advice}")


def reaching(total: torch.Tensor, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return `total`, from which a backward pass reaches these parameters too, with zeros.

    DDP waits for a gradient of each parameter, and an update that names its optimizers may not
    compute those of others.
    """
    return _Reaching.apply(total, *parameters) if parameters else total


class _Reaching(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, *parameters: nn.Parameter) -> torch.Tensor:
        ctx.parameters = parameters
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, *(p.new_zeros(()).expand_as(p) for p in ctx.parameters)
