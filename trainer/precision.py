"""The arithmetic of a run: what dtype weights have, where autocast helps, and the update they take, in one object."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only


class Precision:
    """fp64, fp32, or amp_bf16: weights in fp32, matrix products in bfloat16 under autocast."""

    def __init__(self, name: str, device: torch.device):
        self.dtype = torch.float64 if name == "fp64" else torch.float32
        self._device_type, self._is_autocast = device.type, name == "amp_bf16"
        if device.type == "cuda":
            torch.backends.cudnn.allow_tf32 = False  # fp32 means fp32; tf32 is a precision of its own

    def autocast(self) -> AbstractContextManager:
        return torch.autocast(self._device_type, torch.bfloat16, enabled=self._is_autocast)

    def cast(self, tree: Any) -> Any:
        """Floating tensors of a batch in the dtype of the weights; others as they are."""
        return tree_map_only(torch.Tensor, lambda t: t.to(self.dtype) if t.is_floating_point() else t, tree)

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
        if factor is not None:
            torch._foreach_mul_(list(gradients), factor)
        norm = clip()
        is_finite = torch.isfinite(norm)
        for optimizer in optimizers:
            if _knows_found_inf(optimizer):
                optimizer.grad_scale, optimizer.found_inf = None, (~is_finite).float()  # type: ignore[attr-defined]
                optimizer.step()
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
            elif is_finite:
                optimizer.step()
        return is_finite.to(norm.dtype)


def _knows_found_inf(optimizer: Optimizer) -> bool:
    # A skipped first step leaves fused SGD a momentum buffer of uninitialised memory (torch 2.13): not without state.
    has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
    return getattr(optimizer, "_step_supports_amp_scaling", False) and bool(optimizer.state or not has_momentum)
