"""Calls: outermost forward passes, backward passes, and the models that are called."""

from __future__ import annotations

import random
import weakref
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .clipping import CLIPPING
from .contributions import CONTRIBUTIONS
from .digests import digest, leaves, marks, split, weigh
from .files import FILES
from .loaders import PASSES, widen
from .log import LOG, SETTINGS, quietly
from .modes import MODES
from .wrapping import Given, bind, find_signature, replace, watch


class Calls:
    """State between the hooks of a step."""

    def __init__(self) -> None:
        self.depth = 0
        self.has_gradients = False  # the outermost call computes them
        self.is_backward = False
        self.is_perturbed = not SETTINGS.get("perturb")
        self.wrappers: weakref.WeakSet[DistributedDataParallel] = weakref.WeakSet()


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

    def call(self: nn.Module, /, *arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(self, *arguments, **options)
        if CALLS.is_backward:  # recomputed
            return original(self, *arguments, **options)
        if CALLS.depth or next(self.parameters(), None) is None:
            if CALLS.has_gradients if CALLS.depth else torch.is_grad_enabled():
                MODES.note(self)
            return original(self, *arguments, **options)
        if SETTINGS["dtype"] == "fp64":
            arguments, options = _widen_inputs(self, arguments, options)
        state = _before_forward(self, arguments, options)
        CALLS.depth += 1
        CALLS.has_gradients = torch.is_grad_enabled()
        try:
            return original(self, *arguments, **options)
        finally:
            CALLS.depth -= 1
            if state:
                _after_forward(state)

    replace(nn.Module, "__call__", call)


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
    if torch.is_grad_enabled():
        MODES.note(module)
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
    signature = find_signature(original)

    def backward(*arguments: Any, **options: Any) -> None:
        bound = bind(signature, arguments, options)
        if CALLS.is_backward or bound is None:  # a recomputed part of the model, or a wrong call
            original(*arguments, **options)
            return
        _before_backward(bound.arguments["tensors"])
        CALLS.is_backward = True
        try:
            original(*arguments, **options)
        finally:
            CALLS.is_backward = False
            CONTRIBUTIONS.end()

    replace(torch.autograd, "backward", backward)


@quietly
def _before_backward(tensors: Any) -> None:
    given = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    loss = 0.0
    scale = 1.0
    for each in given:
        if id(each) in CLIPPING.unscaled:
            _, value, scale = CLIPPING.unscaled[id(each)]
            loss += value
        else:
            loss += _value(getattr(each, "_local_tensor", each))
    MODES.keep()
    CLIPPING.num_passes += 1
    reduces = [bool(each.require_backward_grad_sync) for each in CALLS.wrappers]
    LOG.add("backward", loss=loss, scale=scale, reduces=reduces, dtype=str(given[0].dtype))
    LOG.flush()  # the pass may wait for other ranks until the process is killed
    CONTRIBUTIONS.begin(scale)


def _value(loss: torch.Tensor) -> float:
    total: Any = loss.detach().double().sum()
    return total.tolist()  # item() would be noted as a read


def watch_wrappers() -> None:
    """Know every DistributedDataParallel of this process."""
    watch(
        DistributedDataParallel,
        "__init__",
        after=lambda given, _: CALLS.wrappers.add(given["self"]),
    )


def watch_saving() -> None:
    """Note the path of each torch.save: two ranks that write one file damage it."""

    def note(given: Given) -> None:
        if not hasattr(given["f"], "write"):
            LOG.add("save", path=str(given["f"]))
            FILES.add(given["f"], is_written=True)

    watch(torch, "save", note)
