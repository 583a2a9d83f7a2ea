"""Calls: outermost forward passes, backward passes, and what was done to gradients."""

from __future__ import annotations

import random
import sys
import weakref
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .digests import digest, leaves, marks, split, weigh
from .loaders import PASSES, widen
from .log import LOG, SETTINGS, quietly
from .parameters import sketch_of


class Calls:
    """State between the hooks of a step."""

    def __init__(self) -> None:
        self.depth = 0
        self.is_backward = False
        self.is_perturbed = not SETTINGS.get("perturb")
        self.wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()
        self.unscaled: dict[int, tuple[Any, float]] = {}  # loss by its scaled loss
        self.clips: list[dict[str, Any]] = []
        self.before_clip: dict[int, torch.Tensor] = {}  # sketches of gradients
        self.scalers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.has_unscaled = False

    def forget_step(self) -> None:
        """Drop what belongs to the last step."""
        self.unscaled.clear()
        self.clips.clear()
        self.before_clip.clear()
        self.has_unscaled = False


CALLS = Calls()


def random_state() -> str:
    """Return a digest of the states of the global random number generators."""
    states = [torch.get_rng_state(), random.getstate(), list(np.random.get_state())]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return digest(states)


def watch_forward() -> None:
    """Note the calls of modules with parameters that no other module's call contains."""
    original = nn.Module.__call__

    def call(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        if CALLS.depth or CALLS.is_backward or torch.compiler.is_compiling():
            return original(self, *arguments, **options)
        if next(self.parameters(), None) is None:
            return original(self, *arguments, **options)
        if SETTINGS["dtype"] == "fp64":
            arguments, options = _widen_inputs(self, arguments, options)
        state = _before_forward(self, arguments, options)
        CALLS.depth += 1
        try:
            return original(self, *arguments, **options)
        finally:
            CALLS.depth -= 1
            if state:
                _after_forward(state)

    nn.Module.__call__ = call  # type: ignore[method-assign]


def _widen_inputs(
    module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the inputs in fp64 for a module that computes in fp64."""
    if any(each.dtype == torch.float32 for each in module.parameters()):
        return arguments, options
    return tuple(map(widen, arguments)), {key: widen(value) for key, value in options.items()}


@quietly
def _before_forward(module: nn.Module, arguments: Any, options: Any) -> str:
    """Note a call, and return the state of random numbers; "" if it does not train.

    The call may contain backward passes and steps, as under Lightning.
    """
    if not CALLS.is_perturbed and torch.is_grad_enabled():
        CALLS.is_perturbed = True
        _perturb(module)
    # a wrapper may be in another mode than the module in it, as under Lightning
    is_training = torch.is_grad_enabled() and any(each.training for each in module.modules())
    inputs = [arguments, options]
    rows: dict[str, Any] = {"marks": marks(inputs)} if is_training else {}
    if is_training and not PASSES.is_fresh:
        rows |= {"rows": split(inputs), "weights": weigh(None, inputs)}
    sizes = [len(leaf) for leaf in leaves(inputs)[:1]]
    is_wrapper = isinstance(module, DistributedDataParallel)
    about = {"is_wrapper": is_wrapper, "size": sizes[0] if sizes else 0}
    LOG.add("forward", training=is_training, **about, **rows)
    return random_state() if is_training else ""


@quietly
def _after_forward(state: str) -> None:
    if random_state() != state:
        LOG.add("drawn")


def _perturb(module: nn.Module) -> None:
    """Change each weight by its last bit, in a pattern that depends on nothing else."""
    with torch.no_grad():
        for parameter in module.parameters():
            local = getattr(parameter, "_local_tensor", parameter)
            if local.is_floating_point() and local.numel():
                epsilon = torch.finfo(local.dtype).eps
                place = torch.arange(local.numel(), device=local.device).view(local.shape)
                local.mul_((1 + epsilon * (place % 3 - 1)).to(local.dtype))


def watch_backward() -> None:
    """Note the value of each tensor from which gradients are computed, and whether DDP reduces."""
    original = torch.autograd.backward

    def backward(tensors: Any, *arguments: Any, **options: Any) -> None:
        _before_backward(tensors)
        was_backward = CALLS.is_backward
        CALLS.is_backward = True
        try:
            original(tensors, *arguments, **options)
        finally:
            CALLS.is_backward = was_backward

    torch.autograd.backward = backward


@quietly
def _before_backward(tensors: Any) -> None:
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    loss = 0.0
    for each in given:
        if id(each) in CALLS.unscaled:
            loss += CALLS.unscaled[id(each)][1]
        else:
            loss += _value(getattr(each, "_local_tensor", each))
    reduces = [bool(each.require_backward_grad_sync) for each in CALLS.wrappers]
    LOG.add("backward", loss=loss, reduces=reduces, dtype=str(given[0].dtype))
    LOG.flush()  # the pass may wait for other ranks until the process is killed


def _value(loss: torch.Tensor) -> float:
    total: Any = loss.detach().double().sum()
    return total.tolist()  # item() would be noted as a read


def watch_wrappers() -> None:
    """Know every DistributedDataParallel of this process."""
    original = DistributedDataParallel.__init__

    def start(self: Any, *arguments: Any, **options: Any) -> None:
        original(self, *arguments, **options)
        CALLS.wrappers.add(self)

    DistributedDataParallel.__init__ = start  # type: ignore[method-assign]


def watch_clipping() -> None:
    """Note each gradient before it is clipped, and the norm by which it is."""
    from torch.nn.utils import clip_grad

    def noting(original: Any) -> Any:
        def clip(parameters: Any, limit: float, *arguments: Any, **options: Any) -> Any:
            given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            _before_clip(given)
            norm = original(given, limit, *arguments, **options)
            _after_clip(norm, limit)
            return norm

        return clip

    for name in ("clip_grad_norm_", "clip_grad_value_"):
        clip = noting(getattr(clip_grad, name))
        setattr(clip_grad, name, clip)
        setattr(torch.nn.utils, name, clip)


@quietly
def _before_clip(parameters: list[torch.Tensor]) -> None:
    for each in parameters:
        if each.grad is not None and id(each) not in CALLS.before_clip:
            CALLS.before_clip[id(each)] = sketch_of(each.grad)


@quietly
def _after_clip(norm: torch.Tensor | None, max_norm: float) -> None:
    is_scaled = any(each.is_enabled() for each in CALLS.scalers) and not CALLS.has_unscaled
    value = 0.0 if norm is None else float(getattr(norm, "_local_tensor", norm))
    is_whole = not hasattr(norm, "placements")
    about = {"norm": value, "max_norm": float(max_norm), "is_whole": is_whole}
    CALLS.clips.append({**about, "is_scaled": is_scaled})


def watch_scaling() -> None:
    """Note the loss before a GradScaler scales it, and when it unscales the gradients."""
    kind: Any = torch.amp.GradScaler
    scale = kind.scale
    unscale = kind.unscale_

    def scale_noting(self: Any, outputs: Any) -> Any:
        scaled = scale(self, outputs)
        CALLS.scalers.add(self)
        if isinstance(outputs, torch.Tensor) and outputs.dim() == 0:
            CALLS.unscaled[id(scaled)] = (scaled, _value(outputs))
        return scaled

    def unscale_noting(self: Any, optimizer: Any) -> None:
        CALLS.has_unscaled = True
        unscale(self, optimizer)

    kind.scale = scale_noting
    kind.unscale_ = unscale_noting


def watch_saving() -> None:
    """Note the path of each torch.save: two ranks that write one file damage it."""
    original = torch.save

    def save(obj: Any, f: Any, *arguments: Any, **options: Any) -> None:
        if not hasattr(f, "write"):
            LOG.add("save", path=str(f))
        original(obj, f, *arguments, **options)

    torch.save = save


def describe_models(roots: list[nn.Module], mine: list[torch.Tensor]) -> dict[str, Any]:
    """Return what matters of the modules: normalisation, dropout, wrappers, class weights."""
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
    return {key: sorted(each) for key, each in found.items()}


def _is_fsdp(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kinds = [getattr(fsdp, name, None) for name in ("FSDPModule", "FullyShardedDataParallel")]
    return any(kind is not None and isinstance(module, kind) for kind in kinds)
