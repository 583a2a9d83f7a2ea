"""Modes: in which mode each module is called in training, and the settings of modules.

A module may be in eval mode, without gradients or under autocast, in one layout or on one rank.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .parameters import shorten

Mode = tuple[bool, bool, str]  # training, gradients, autocast
PLAIN = (float, bool, str)
OF_MODE = ("Dropout", "BatchNorm", "InstanceNorm", "RNN", "LSTM", "GRU", "Attention", "Transformer")
SETTINGS_OF_MODULES = ("ignore_index", "padding_idx")  # numbers that are no size


def autocast() -> str:
    """Return the dtype of autocast; "" where it is off."""
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            return str(torch.get_autocast_dtype(device)).removeprefix("torch.")
    return ""


def depends_on_mode(kind: type) -> bool:
    """Return True for a class of modules that may compute otherwise in eval mode."""
    is_own = not kind.__module__.startswith("torch.")
    return is_own or any(word in kind.__name__ for word in OF_MODE)


class Modes:
    """Modes of the modules whose calls a backward pass follows."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._latest: dict[tuple[int, type], Mode] = {}  # by id and class, since the last backward
        self._of_step: dict[tuple[int, type], set[Mode]] = {}
        self._written: dict[str, Any] | None = None

    def note(self, module: nn.Module) -> None:
        """Note a call; it is kept if a backward pass follows."""
        self._latest[id(module), type(module)] = (
            module.training,
            torch.is_grad_enabled(),
            autocast(),
        )

    def keep(self) -> None:
        """Keep the modes of a forward pass, at its backward pass."""
        for key, mode in self._latest.items():
            self._of_step.setdefault(key, set()).add(mode)
        self._latest.clear()

    def name(self, roots: Sequence[nn.Module]) -> None:
        """Learn the names of all modules."""
        self._names = {
            id(each): shorten(name) for root in roots for name, each in root.named_modules()
        }

    def end_step(self) -> dict[str, Any] | None:
        """Return the modes of a step: [name, kind] by mode; None if they are those before."""
        found: dict[str, Any] = {"eval": [], "no grad": [], "autocast": {}}
        for (number, kind), modes in self._of_step.items():
            who = [self._names.get(number, ""), kind.__name__]
            if depends_on_mode(kind) and any(not is_training for is_training, _, _ in modes):
                found["eval"].append(who)
            if any(not has_gradients for _, has_gradients, _ in modes):
                found["no grad"].append(who)
            for dtype in sorted({dtype for _, _, dtype in modes if dtype}):
                found["autocast"].setdefault(dtype, []).append(who)
        self._of_step.clear()
        for each in (found["eval"], found["no grad"], *found["autocast"].values()):
            each.sort()
        if found == self._written:
            return None
        self._written = found
        return found


MODES = Modes()


def settings_of(roots: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the settings of torch's own modules by name, as `drop.p`."""
    found = {}
    for root in roots:
        for name, each in root.named_modules():
            if not type(each).__module__.startswith("torch.nn"):
                continue
            place = shorten(name) or type(each).__name__
            for key, value in vars(each).items():
                is_setting = type(value) in PLAIN or key in SETTINGS_OF_MODULES
                if is_setting and key[0] != "_" and key not in ("training", "inplace"):
                    found[f"{place}.{key}"] = value
    return found


def describe_models(roots: list[nn.Module], mine: list[torch.Tensor]) -> dict[str, Any]:
    """Return normalisation, dropout, wrappers, class weights, and settings of modules."""
    own = set(map(id, mine))
    norms = set()
    dropout = set()
    wrappers = set()
    weighted = set()
    for each in (m for root in roots for m in root.modules()):
        kind = type(each).__name__
        if isinstance(each, nn.modules.batchnorm._BatchNorm) and each.training:
            norms.add(kind)
        rate = getattr(each, "p", getattr(each, "dropout", 0))
        if "Dropout" in kind or isinstance(each, nn.RNNBase):
            dropout |= {kind} if each.training and isinstance(rate, float) and rate > 0 else set()
        if isinstance(each, nn.modules.loss._WeightedLoss) and each.weight is not None:
            weighted.add(kind)
        is_wrapper = isinstance(each, DistributedDataParallel) or _is_fsdp(each)
        if is_wrapper and not own.isdisjoint(map(id, each.parameters())):
            wrappers.add("FSDP" if _is_fsdp(each) else kind)
    found = {"norms": norms, "dropout": dropout, "wrappers": wrappers, "weighted": weighted}
    lists = {key: sorted(each) for key, each in found.items()}
    return {**lists, "modules": settings_of(roots)}


def _is_fsdp(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = [getattr(fsdp, name, None) for name in ("FSDPModule", "FullyShardedDataParallel")]
    return any(kind is not None and isinstance(module, kind) for kind in kinds)
