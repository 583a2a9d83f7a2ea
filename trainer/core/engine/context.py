"""The parts that training and evaluation share, and the choice of a precision for a device."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.core.config.schema import Config
from trainer.core.distributed import accelerator
from trainer.core.distributed.ranks import Ranks
from trainer.core.engine.precision import SCALED, Precision
from trainer.core.engine.values import Values
from trainer.core.rng.forward import ExampleRng
from trainer.core.strategy.base import Strategy

HOOK_MODULES = ("trainer.core.task", "trainer.core.trainer")  # of the hooks that a task inherits
# Hooks that may draw in a step, outside of an update's forward pass and loss
DRAWING_HOOKS = ("train_step", "split_batch", "augment", "collate", "build_schedule")


class Hooks(Protocol):
    """The methods of a task that training and evaluation call."""

    def loss(self, outputs: Any, targets: Any) -> Values: ...
    def metrics(self, outputs: Any, targets: Any) -> dict[str, Values]: ...
    def predict(self, outputs: Any) -> Any: ...
    def summarize(self, means: dict[str, float]) -> dict[str, float]: ...
    def samples(self, forward: Callable[[Any], Any]) -> dict[str, str]: ...
    def train_step(self, batch: Any) -> Any: ...
    def build_optimizer(self, model: nn.Module) -> Optimizer | list[Optimizer]: ...


@dataclass(frozen=True)
class Parts:
    """A task, and its model on all ranks; `frozen` are the facts of weights that do not train."""

    config: Config
    hooks: Hooks
    strategy: Strategy
    precision: Precision
    draws: ExampleRng
    ranks: Ranks
    frozen: dict[str, list[Any]]

    @property
    def has_own_step(self) -> bool:
        """True if the task has a train_step of its own, which may update some parameters only."""
        return getattr(self.hooks.train_step, "__module__", "") not in HOOK_MODULES

    def list_code(self, objects: Iterable[Any]) -> set[str]:
        """Return the names of the modules with the code of the task, and of these objects.

        Of a model these are its modules' and their hooks'.
        """
        owners = [self.hooks, self.config, *objects]
        owners += [m for each in objects if isinstance(each, nn.Module) for m in each.modules()]
        values = [v for each in owners for v in vars(each).values()]
        held = [v for d in values if isinstance(d, dict) for v in d.values()]
        kinds = {kind for each in [*owners, *values, *held] for kind in type(each).__mro__}
        called = [each for each in [*values, *held] if callable(each)]
        names = [getattr(each, "__module__", None) for each in [*kinds, *called]]
        return {name for name in names if isinstance(name, str)}

    @cached_property
    def may_draw(self) -> bool:
        """True if the task has a hook of its own that may draw outside of an update's forward."""
        modules = (getattr(getattr(self.hooks, name), "__module__", "") for name in DRAWING_HOOKS)
        return any(module not in HOOK_MODULES for module in modules)


OPEN = ("auto", "default")  # the start chooses one of the others

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
