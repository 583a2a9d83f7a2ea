"""Precision of a run: dtype of the weights, autocast, and loss scaling."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from trainer.distributed import accelerator
from trainer.errors import ConfigError

WEIGHTS = {"fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}  # others: float32
AUTOCAST = {"amp_bf16": torch.bfloat16, "amp_fp16": torch.float16}
OPEN = ("auto", "default")  # the start chooses one of the others
# Relative distances up to which two runs may differ by rounding, of losses and norms of weights.
ROUNDING = {"fp64": 1e-6, "fp32": 1e-5}
COARSE = 1e-2  # of narrower types
SCALED = ("amp_fp16", "fp16")  # without loss scaling, small gradients underflow in fp16

# Values of ONEDNN_MAX_CPU_ISA below AVX512-BF16, with which oneDNN emulates bf16.
_WITHOUT_BF16 = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX512_CORE", "AVX512_CORE_VNNI")


def is_bf16_native(device: torch.device) -> bool:
    """Return True if the device multiplies bf16 matrices in hardware.

    A CPU needs AVX512-BF16 or AMX, a CUDA GPU compute capability 8.0. Other CPUs emulate bf16: on
    a Xeon without either, the cifar recipe ran at 77 images/s in amp_bf16 and at 245 in fp32.
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if accelerator.is_used(device):
        is_known = getattr(accelerator.module(device), "is_bf16_supported", None)
        return is_known is not None and is_known()
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA", "")
    is_limited = limit.upper() in _WITHOUT_BF16
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return device.type == "cpu" and has_bf16 and not is_limited


def rounding_of(name: str) -> float:
    """Return the relative distance up to which rounding may explain a difference of two runs."""
    return ROUNDING.get(name, COARSE)


def takes_bf16(name: str, is_accelerator: bool) -> bool:
    """Return True if `name`, one of OPEN, takes bf16 where it is native: `default` on GPUs only."""
    return name == "auto" or is_accelerator


def choose_precision(is_native: bool) -> str:
    """Return the precision for one of OPEN: amp_bf16 if bf16 is native and taken, else fp32."""
    return "amp_bf16" if is_native else "fp32"


def is_bf16_emulated(name: str, device: torch.device) -> bool:
    """Return True if the precision `name` uses bf16 on a CPU that emulates it."""
    is_x86 = platform.machine() in ("x86_64", "AMD64")  # of other CPUs it is not known
    is_slow = is_x86 and device.type == "cpu" and not is_bf16_native(device)
    return name in ("amp_bf16", "bf16") and is_slow


def is_fp16_slow(name: str, device: torch.device) -> bool:
    """Return True if the precision `name` uses fp16 on a CPU.

    A convolution of 32 channels, forward and backward, took 1.36 s in fp16 on a CPU with
    AVX512-FP16, 0.003 s in bf16 and 0.010 s in fp32; a linear layer was as fast as in fp32.
    """
    return name in SCALED and device.type == "cpu"


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
        self._autocast = AUTOCAST.get(name)
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
        return self.dtype.itemsize < 4 or self._autocast is not None

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
            why = "needs a CUDA GPU, and torch sees none; use fp32"
            raise ConfigError(f"strategy.precision=tf32: {why}")

    def autocast(self) -> AbstractContextManager:
        """Return torch.autocast for amp precisions, a context without effect for others."""
        if self._autocast is None:
            return self._plain
        return torch.autocast(self._device_type, self._autocast)

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
            found = found_inf if is_here else found_inf.to(alike[0].device)
            one = self._one if is_here else self._one.to(alike[0].device)
            if alike[0].dtype == torch.bfloat16:  # CUDA has no such kernel: check a copy
                alike = [tensor.float() for tensor in alike]
            torch._amp_foreach_non_finite_check_and_unscale_(alike, found, one)
            if not is_here:
                found_inf.copy_(found)
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
