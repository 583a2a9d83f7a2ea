"""The arithmetic of a run: the dtype of weights, autocast, and the scale of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from trainer.errors import ConfigError

WEIGHTS = {"fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}  # else float32
AUTOCAST = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}
SCALED = ("amp_fp16", "fp16")  # small gradients vanish in fp16 unless the loss is scaled up


class Precision:
    """One of the precisions of docs/precision.md on one kind of device.

    fp16 scales the loss as torch.amp.GradScaler does by default: from 2**16, halved where a
    gradient overflows, doubled after 2,000 steps without.
    """

    def __init__(self, name: str, device: torch.device):
        self.dtype = WEIGHTS.get(name, torch.float32)
        self.is_scaled = name in SCALED
        self.max_skipped = 30 if self.is_scaled else 10  # in a row; the scale halves at each
        self._device_type = device.type
        self._autocast = AUTOCAST.get(name)
        self._scale = torch.full((), 2.0**16, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        self._one = torch.ones((), device=device)
        self._plain = nullcontext()
        self._roots: dict[tuple[float, torch.dtype], torch.Tensor] = {}
        if device.type == "cuda":  # fp32 means fp32: tf32 is a precision of its own
            is_tf32 = name == "tf32"
            torch.backends.cudnn.allow_tf32 = is_tf32
            torch.backends.cuda.matmul.allow_tf32 = is_tf32

    @staticmethod
    def check(name: str, device: torch.device) -> None:
        if name == "tf32" and device.type != "cuda":
            why = "is arithmetic of CUDA GPUs, and torch sees none; use fp32"
            raise ConfigError(f"strategy.precision=tf32: {why}")

    def autocast(self) -> AbstractContextManager:
        if self._autocast is None:
            return self._plain
        return torch.autocast(self._device_type, self._autocast)

    def cast(self, tree: Any) -> Any:
        """Floating tensors of a batch in the dtype of the weights; others as they are."""
        if isinstance(tree, torch.Tensor):
            is_same = tree.dtype == self.dtype or not tree.is_floating_point()
            return tree if is_same else tree.to(self.dtype)
        return tree_map_only(torch.Tensor, self.cast, tree)

    def root(self, total: torch.Tensor, factor: float) -> torch.Tensor:
        """The gradient to begin with at `total`, so that backward runs on total x factor.

        `unscale` takes fp16's scale out.
        """
        if self.is_scaled:
            return (self._scale * factor).to(total.dtype)
        key = (factor, total.dtype)
        if key not in self._roots:
            self._roots[key] = torch.full((), factor, dtype=total.dtype, device=total.device)
        return self._roots[key]

    def unscale(
        self, gradients: Sequence[list[torch.Tensor]], factor: torch.Tensor | None
    ) -> torch.Tensor:
        """Multiply by `factor`, take the scale out; () on the device, 1 where one is not finite.

        Found as GradScaler finds it, in one pass on the device. `gradients` are a list for each
        device and dtype.
        """
        if self.is_scaled:
            factor = (1.0 if factor is None else factor) / self._scale
        found_inf = torch.zeros_like(self._one)
        for alike in gradients:
            if not alike:
                continue
            if factor is not None:
                torch._foreach_mul_(alike, factor)
            is_here = alike[0].device == found_inf.device
            found = found_inf if is_here else found_inf.to(alike[0].device)
            one = self._one if is_here else self._one.to(alike[0].device)
            if alike[0].dtype == torch.bfloat16:  # no such kernel on CUDA; a copy will do
                alike = [tensor.float() for tensor in alike]
            torch._amp_foreach_non_finite_check_and_unscale_(alike, found, one)
            if not is_here:
                found_inf.copy_(found)
        return found_inf

    def update_scale(self, found_inf: torch.Tensor) -> None:
        """After a step of fp16: halve or, in time, double the scale."""
        torch._amp_update_scale_(self._scale, self._growth, found_inf, 2.0, 0.5, 2000)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"scale": self._scale, "growth": self._growth} if self.is_scaled else {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """A run that had another precision leaves nothing to take over."""
        if self.is_scaled and state:
            self._scale.copy_(state["scale"])
            self._growth.copy_(state["growth"])
