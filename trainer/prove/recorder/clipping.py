"""Clipping: gradients before they are clipped, their norms, and the scale of a GradScaler."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.utils import clip_grad

from .parameters import sketch_of
from .wrapping import Given, watch


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

    def take(self, given: Given) -> None:
        """Take the gradients before they are clipped; the parameters may come as an iterator."""
        parameters = given["parameters"]
        if not isinstance(parameters, torch.Tensor):
            given["parameters"] = parameters = list(parameters)
        for each in [parameters] if isinstance(parameters, torch.Tensor) else parameters:
            if each.grad is not None and id(each) not in self.before:
                self.before[id(each)] = sketch_of(each.grad)

    def note(self, given: Given, norm: torch.Tensor | None) -> None:
        """Note the norm and the limit."""
        is_scaled = any(each.is_enabled() for each in self._scalers) and not self._has_unscaled
        limit = given["max_norm"] if "max_norm" in given else given["clip_value"]
        value = 0.0 if norm is None else float(getattr(norm, "_local_tensor", norm))
        about = {
            "norm": value,
            "max_norm": float(limit),
            "is_whole": not hasattr(norm, "placements"),
        }
        kind = str(given.get("norm_type", 2.0)) if "max_norm" in given else "value"
        self.calls.append(
            {**about, "is_scaled": is_scaled, "norm_type": kind, "pass": self.num_passes}
        )

    def note_scale(self, given: Given, scaled: Any) -> None:
        """Note a loss before it is scaled."""
        scaler, outputs = given["self"], given["outputs"]
        self._scalers.add(scaler)
        if isinstance(outputs, torch.Tensor) and outputs.dim() == 0:
            value: Any = outputs.detach().double()
            scale = scaler.get_scale() if scaler.is_enabled() else 1.0
            self.unscaled[id(scaled)] = (scaled, value.tolist(), scale)

    def note_unscaling(self, given: Given) -> None:
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
