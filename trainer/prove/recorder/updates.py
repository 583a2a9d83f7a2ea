"""Updates of the weights: clipping, scaling, optimizers and schedules of a script."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim import lr_scheduler

from .digests import is_apart
from .parameters import sketch_of
from .wrapping import LOG, Given, quietly, replace, watch


class Clipping:
    """Clipping within one step."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.before: dict[int, torch.Tensor] = {}  # sketches of gradients, by id of the parameter
        self.unscaled: dict[int, tuple[Any, float, float]] = {}  # by scaled loss: loss, and scale
        self._scalers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._has_unscaled = False
        self.num_passes = 0  # backward passes since the last step

    def forget_step(self) -> None:
        """Drop what belongs to the last step."""
        self.calls.clear()
        self.before.clear()
        self.unscaled.clear()
        self._has_unscaled = False
        self.num_passes = 0

    def take(self, arguments: Given) -> None:
        """Take the gradients before they are clipped; the parameters may come as an iterator."""
        parameters = arguments["parameters"]
        if not isinstance(parameters, torch.Tensor):
            arguments["parameters"] = parameters = list(parameters)
        for each in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
            if each.grad is not None and id(each) not in self.before:
                self.before[id(each)] = sketch_of(each.grad)

    def note(self, arguments: Given, norm: torch.Tensor | None) -> None:
        """Note the norm and the limit."""
        is_scaled = any(each.is_enabled() for each in self._scalers) and not self._has_unscaled
        limit = arguments["max_norm"] if "max_norm" in arguments else arguments["clip_value"]
        value = 0.0 if norm is None else float(getattr(norm, "_local_tensor", norm))
        about = {
            "norm": value,
            "max_norm": float(limit),
            "is_whole": not hasattr(norm, "placements"),
        }
        kind = str(arguments.get("norm_type", 2.0)) if "max_norm" in arguments else "value"
        self.calls.append(
            {**about, "is_scaled": is_scaled, "norm_type": kind, "pass": self.num_passes}
        )

    def note_scale(self, arguments: Given, scaled: Any) -> None:
        """Note a loss before it is scaled."""
        scaler, outputs = arguments["self"], arguments["outputs"]
        self._scalers.add(scaler)
        if isinstance(outputs, torch.Tensor) and outputs.dim() == 0:
            value: Any = outputs.detach().double()
            scale = scaler.get_scale() if scaler.is_enabled() else 1.0
            self.unscaled[id(scaled)] = (scaled, value.tolist(), scale)

    def note_unscaling(self, arguments: Given) -> None:
        self._has_unscaled = True


CLIPPING = Clipping()


def watch_clipping() -> None:
    """Note each gradient before it is clipped, and the norm by which it is."""
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        watch(clip_grad, name, CLIPPING.take, CLIPPING.note)
        setattr(torch.nn.utils, name, getattr(clip_grad, name))


def watch_scaling() -> None:
    """Note the loss before a GradScaler scales it, and when it unscales the gradients."""
    watch(torch.amp.GradScaler, "scale", after=CLIPPING.note_scale)
    watch(torch.amp.GradScaler, "unscale_", before=CLIPPING.note_unscaling)


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
        "places": [index for index, group in enumerate(groups) for _ in group["params"]],
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
        """Return the indices of the parameters that have another norm than after the last step."""
        if len(self._norms) != len(parameters):
            return []
        norms = _norms(parameters)
        return [
            index for index, (a, b) in enumerate(zip(self._norms, norms, strict=True)) if a != b
        ]

    def is_changed(self, parameter_index: int, sketch: torch.Tensor) -> bool:
        """Return True if a parameter has another sketch than after the last step."""
        return is_apart(self._sketches[parameter_index], sketch)


def _norms(parameters: Sequence[torch.Tensor]) -> list[Any]:
    """Return the norm of each parameter's part on this rank, with one copy from the device."""
    parts = [getattr(each, "_local_tensor", each).detach() for each in parameters]
    plain = [each for each in parts if each.numel() and each.is_floating_point()]
    if not plain:
        return [0.0] * len(parts)
    norms: Any = torch._foreach_norm(plain)
    floats = iter(torch.stack([each.double().to(norms[0].device) for each in norms]).tolist())
    return [next(floats) if each.numel() and each.is_floating_point() else 0.0 for each in parts]
