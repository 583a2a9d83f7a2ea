"""Precision of a run: dtype of the weights, autocast, and loss scaling."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from trainer.base.errors import ConfigError

WEIGHTS = {"fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}  # others: float32
AUTOCAST = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}
SCALED = ("amp_fp16", "fp16")  # without loss scaling, small gradients underflow in fp16


class Precision:
    """A precision of docs/parallelism.md on one kind of device.

    In fp16 the loss is scaled as by torch.amp.GradScaler with its defaults: the scale starts at
    2**16, halves after a step with an overflow, and doubles after 2,000 steps without one.
    """

    def __init__(self, name: str, device: torch.device):
        self.dtype = WEIGHTS.get(name, torch.float32)
        self.is_scaled = name in SCALED
        self.max_skipped = 30 if self.is_scaled else 10  # in a row; in fp16 each halves the scale
        self._device_type = device.type
        self.autocast_dtype = AUTOCAST.get(name)
        self._scale = torch.full((), 2.0**16, device=device)
        self._growth = torch.zeros((), dtype=torch.int32, device=device)
        self._one = torch.ones((), device=device)
        self._plain = nullcontext()
        self._roots: dict[tuple[float, torch.dtype], torch.Tensor] = {}
        self._is_tf32 = name == "tf32"
        if device.type == "cuda":  # fp32 must not use tf32, which is a separate precision
            torch.backends.cudnn.allow_tf32 = self._is_tf32
            torch.backends.cuda.matmul.allow_tf32 = self._is_tf32
            torch.backends.cudnn.benchmark = True  # the sizes of the steps stay; not under exact

    @property
    def is_narrow(self) -> bool:
        """True if operations round to fewer than 32 bits."""
        return self.dtype.itemsize < 4 or self.autocast_dtype is not None

    @property
    def is_rounded(self) -> bool:
        """True if operations round to fewer bits than those of fp32, also where tensors do not."""
        return self.is_narrow or self._is_tf32

    @property
    def wide(self) -> torch.dtype:
        """Dtype of sums: that of the weights, in 32 bits or more."""
        return torch.promote_types(self.dtype, torch.float32)

    @staticmethod
    def check(name: str, device: torch.device) -> None:
        """Raise ConfigError if the device does not support the precision `name`."""
        if name == "tf32" and device.type != "cuda":
            raise ConfigError("""strategy.precision=tf32: needs a CUDA GPU, and torch sees none;
                use fp32""")

    def autocast(self) -> AbstractContextManager:
        """Return torch.autocast for amp precisions, a context without effect for others."""
        if self.autocast_dtype is None:
            return self._plain
        return torch.autocast(self._device_type, self.autocast_dtype)

    def cast(self, tree: Any) -> Any:
        """Cast the floating-point tensors of a batch to the dtype of the weights."""
        if isinstance(tree, torch.Tensor):
            is_same = tree.dtype == self.dtype or not tree.is_floating_point()
            return tree if is_same else tree.to(self.dtype)
        return tree_map_only(torch.Tensor, self.cast, tree)

    def root(self, total: torch.Tensor, factor: float) -> torch.Tensor:
        """Return the gradient at `total` that starts backward, so that it computes total x factor.

        In fp16 it contains the loss scale, which `unscale` removes.
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
        """Multiply gradients by `factor` and remove the loss scale, in place.

        Returns a scalar tensor on the device: 1 if a gradient is not finite, else 0. The check is
        GradScaler's, in one pass on the device. `gradients` has a list for each device and dtype.
        """
        if self.is_scaled:
            factor = (1.0 if factor is None else factor) / self._scale
        found_inf = torch.zeros_like(self._one)
        for alike in gradients:
            if not alike:
                continue
            if isinstance(factor, torch.Tensor):  # a rank may have several devices
                torch._foreach_mul_(alike, factor.to(alike[0].device))
            elif factor is not None:
                torch._foreach_mul_(alike, factor)
            is_here = alike[0].device == found_inf.device
            device_flag = found_inf if is_here else found_inf.to(alike[0].device)
            one = self._one if is_here else self._one.to(alike[0].device)
            if alike[0].dtype == torch.bfloat16:  # CUDA has no such kernel: check a copy
                alike = [tensor.float() for tensor in alike]
            torch._amp_foreach_non_finite_check_and_unscale_(alike, device_flag, one)
            if not is_here:
                found_inf.copy_(device_flag)
        return found_inf

    def update_scale(self, found_inf: torch.Tensor) -> None:
        """Update the loss scale after a step in fp16: halve it, or double it after 2,000 steps."""
        torch._amp_update_scale_(self._scale, self._growth, found_inf, 2.0, 0.5, 2000)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"scale": self._scale, "growth": self._growth} if self.is_scaled else {}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Load the loss scale. The state is empty if the saved run had no loss scaling."""
        if self.is_scaled and state:
            self._scale.copy_(state["scale"])
            self._growth.copy_(state["growth"])
