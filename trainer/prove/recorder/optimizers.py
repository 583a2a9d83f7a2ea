"""Optimizers: settings of groups, steps of schedules, and weights changed between two steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler

from .log import LOG, quietly
from .sketches import is_apart
from .wrapping import replace

# Settings without effect on what is learned, and the rate, which is compared by itself.
OTHERS = (
    "lr",
    "initial_lr",
    "max_lr",
    "min_lr",
    "foreach",
    "fused",
    "capturable",
    "differentiable",
)


def settings_of_groups(optimizer: Any) -> dict[str, Any]:
    """Return the settings of each group, and the number of the group of each parameter."""
    groups = optimizer.param_groups
    return {
        "settings": [
            {key: _plain(value) for key, value in group.items() if key not in (*OTHERS, "params")}
            for group in groups
        ],
        "places": [number for number, group in enumerate(groups) for _ in group["params"]],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (int, float, bool, str)) or value is None else str(value)


class Advances:
    """Steps of schedules: one of several schedules steps those that it is made of."""

    def __init__(self) -> None:
        self._depth = 0

    def watch(self, kind: type[Any]) -> None:
        """Note each call of `step` of a class of schedules, but not the calls within it."""
        original: Any = kind.__dict__["step"]

        def step(*arguments: Any, **options: Any) -> Any:
            if not self._depth:
                quietly(LOG.add)("advanced")
            self._depth += 1
            try:
                return original(*arguments, **options)
            finally:
                self._depth -= 1

        replace(kind, "step", step)


def watch_schedules() -> None:
    """Note each step of a schedule from now on."""
    advances = Advances()
    for kind in vars(lr_scheduler).values():
        if isinstance(kind, type) and "step" in vars(kind):
            advances.watch(kind)


class LastWeights:
    """The weights of an optimizer after its last step, as norms and sketches."""

    def __init__(self) -> None:
        self._norms: list[Any] = []
        self._sketches: list[torch.Tensor] = []

    def keep(self, parameters: Sequence[torch.Tensor], sketches: list[torch.Tensor]) -> None:
        """Keep the weights after a step."""
        self._norms = _norms(parameters)
        self._sketches = sketches

    def suspects(self, parameters: Sequence[torch.Tensor]) -> list[int]:
        """Return the places of the parameters that have another norm than after the last step."""
        if len(self._norms) != len(parameters):
            return []
        norms = _norms(parameters)
        return [
            place for place, (a, b) in enumerate(zip(self._norms, norms, strict=True)) if a != b
        ]

    def is_changed(self, place: int, sketch: torch.Tensor) -> bool:
        """Return True if a parameter has another sketch than after the last step."""
        return is_apart(self._sketches[place], sketch)


def _norms(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """Return the norm of each parameter's part on this rank, with one copy from the device."""
    parts = [getattr(each, "_local_tensor", each).detach() for each in parameters]
    plain = [each for each in parts if each.numel() and each.is_floating_point()]
    if not plain:
        return [0.0] * len(parts)
    norms: Any = torch._foreach_norm(plain)
    found = iter(torch.stack([each.double().to(norms[0].device) for each in norms]).tolist())
    return [next(found) if each.numel() and each.is_floating_point() else 0.0 for each in parts]
