"""The arithmetic of a run: what dtype weights have, where autocast helps, and the update they take, in one object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from trainer.errors import ConfigError

WEIGHTS = {"fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}  # others: float32
AUTOCAST = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}
SCALED = ("amp_fp16", "fp16")  # small gradients vanish in fp16 unless the loss is scaled up


class Precision:
    """One of the precisions of docs/precision.md on one kind of device.

    fp16 scales the loss as torch.amp.GradScaler does by default: from 2**16, halved where a gradient overflows,
    doubled after 2,000 steps without.
    """

    def __init__(self, name: str, device: torch.device):
        self.dtype = WEIGHTS.get(name, torch.float32)
        self._device_type, self._autocast = device.type, AUTOCAST.get(name)
        self._scale = torch.full((), 2.0**16, device=device) if name in SCALED else None
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        if device.type == "cuda":  # fp32 means fp32: tf32 is a precision of its own
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = name == "tf32"

    @staticmethod
    def check(name: str, device: torch.device) -> None:
        if name == "tf32" and device.type != "cuda":
            raise ConfigError("strategy.precision=tf32: is arithmetic of CUDA GPUs, and torch sees none; use fp32")

    def autocast(self) -> AbstractContextManager:
        return torch.autocast(self._device_type, self._autocast, enabled=self._autocast is not None)

    def cast(self, tree: Any) -> Any:
        """Floating tensors of a batch in the dtype of the weights; others as they are."""
        return tree_map_only(torch.Tensor, lambda t: t.to(self.dtype) if t.is_floating_point() else t, tree)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """What to run backward on; `update` takes the scale out again."""
        return loss if self._scale is None else loss * self._scale

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {} if self._scale is None else {"scale": self._scale, "growth": self._growth}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """A run that had another precision leaves nothing to take over."""
        if self._scale is not None and state:
            self._scale.copy_(state["scale"])
            self._growth.copy_(state["growth"])

    def update(
        self,
        optimizers: Sequence[Optimizer],
        gradients: Sequence[torch.Tensor],
        factor: torch.Tensor | None,
        clip: Callable[[], torch.Tensor],
    ) -> torch.Tensor:
        """Correct by `factor`, clip, step; 1.0 (0-dim, on the device) if the step was made, 0.0 if it was skipped.

        The norm decides, alike on all ranks since it is of the reduced gradients: where it is not finite, neither
        weights nor optimizer state change. Optimizers that know found_inf (torch's fused ones) skip on the device, as
        under GradScaler; for others the host has to look.
        """
        if self._scale is not None:
            factor = (1.0 if factor is None else factor) / self._scale
        if factor is not None:
            torch._foreach_mul_(list(gradients), factor)
        norm = clip()
        is_finite = torch.isfinite(norm)
        found_inf = (~is_finite).float()
        for optimizer in optimizers:
            if _knows_found_inf(optimizer):
                optimizer.grad_scale, optimizer.found_inf = None, found_inf  # type: ignore[attr-defined]
                optimizer.step()
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
            elif is_finite:
                optimizer.step()
        if self._scale is not None:
            torch._amp_update_scale_(self._scale, self._growth, found_inf, 2.0, 0.5, 2000)
        return is_finite.to(norm.dtype)


def _knows_found_inf(optimizer: Optimizer) -> bool:
    # A skipped first step leaves fused SGD a momentum buffer of uninitialised memory (torch 2.13): not without state.
    has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
    return getattr(optimizer, "_step_supports_amp_scaling", False) and bool(optimizer.state or not has_momentum)
