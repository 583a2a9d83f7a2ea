"""The arithmetic of a run: what dtype weights have, where autocast helps, and the update they take, in one object."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
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
        self._roots: dict[tuple[float, torch.dtype], torch.Tensor] = {}
        self._one = torch.ones((), device=device)
        self.is_scaled = self._scale is not None
        self.max_skipped = 30 if self.is_scaled else 10  # on end; the scale halves at each
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        if device.type == "cuda":  # fp32 means fp32: tf32 is a precision of its own
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = name == "tf32"

    @staticmethod
    def check(name: str, device: torch.device) -> None:
        if name == "tf32" and device.type != "cuda":
            raise ConfigError(
                "strategy.precision=tf32: is arithmetic of CUDA GPUs, and torch sees none; use fp32"
            )

    def autocast(self) -> AbstractContextManager:
        return (
            nullcontext()
            if self._autocast is None
            else torch.autocast(self._device_type, self._autocast)
        )

    def cast(self, tree: Any) -> Any:
        """Floating tensors of a batch in the dtype of the weights; others as they are."""
        if isinstance(tree, torch.Tensor):
            return (
                tree
                if tree.dtype == self.dtype or not tree.is_floating_point()
                else tree.to(self.dtype)
            )
        return tree_map_only(torch.Tensor, self.cast, tree)

    def root(self, total: torch.Tensor, factor: float) -> torch.Tensor:
        """What backward begins with at `total`, so that it runs on total x factor; `update` takes fp16's scale out."""
        if self._scale is not None:
            return (self._scale * factor).to(total.dtype)
        key = (factor, total.dtype)
        if key not in self._roots:
            self._roots[key] = torch.full((), factor, dtype=total.dtype, device=total.device)
        return self._roots[key]

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
        clip: Callable[[], Any] | None,
    ) -> torch.Tensor:
        """Correct by `factor`, clip, step; (1,) on the device: 0 if the step was made, 1 if it was skipped.

        The gradients decide, alike on all ranks since they are the reduced ones: where one is not finite, neither
        weights nor optimizer state change. It is found as GradScaler finds it, in one pass on the device. Optimizers
        that know found_inf (torch's fused ones) skip there too; for others the host has to look.
        """
        if self._scale is not None:
            factor = (1.0 if factor is None else factor) / self._scale
        if factor is not None:
            torch._foreach_mul_(list(gradients), factor)
        found_inf = torch.zeros_like(self._one)
        for alike in _by_kind(gradients):
            is_here = alike[0].device == found_inf.device
            found, one = (
                (found_inf, self._one)
                if is_here
                else (t.to(alike[0].device) for t in (found_inf, self._one))
            )
            if (
                alike[0].dtype == torch.bfloat16
            ):  # has no such kernel on CUDA; only looked at, so a copy will do
                alike = [tensor.float() for tensor in alike]
            torch._amp_foreach_non_finite_check_and_unscale_(alike, found, one)
            if not is_here:
                found_inf.copy_(found)
        if clip is not None:
            clip()
        for optimizer in optimizers:
            if _knows_found_inf(optimizer):
                optimizer.grad_scale, optimizer.found_inf = None, found_inf  # type: ignore[attr-defined]
                optimizer.step()
            elif not found_inf:
                optimizer.step()
        if self._scale is not None:
            torch._amp_update_scale_(self._scale, self._growth, found_inf, 2.0, 0.5, 2000)
        return found_inf.reshape(1)


def _by_kind(tensors: Sequence[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    groups: dict[Any, list[torch.Tensor]] = {}
    for tensor in tensors:
        groups.setdefault((tensor.device, tensor.dtype), []).append(tensor)
    return groups.values()


def _knows_found_inf(optimizer: Optimizer) -> bool:
    # A skipped first step leaves fused SGD a momentum buffer of uninitialised memory (torch 2.13): not without state.
    has_momentum = any(group.get("momentum") for group in optimizer.param_groups)
    return getattr(optimizer, "_step_supports_amp_scaling", False) and bool(
        optimizer.state or not has_momentum
    )
