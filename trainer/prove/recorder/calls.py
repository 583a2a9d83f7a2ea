"""Calls of models and criteria: what was passed, what came back, and which losses they add to.

What each loss adds to the gradients tells losses that are weighted otherwise from gradients that
are changed afterwards.
"""

from __future__ import annotations

import random
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import unserializable_hook
from torch.utils.weak import WeakIdKeyDictionary

from .data_loaders import PASSES, widen
from .digests import digest, encode, is_apart, leaves, marks, sketch, split, weigh
from .exchanges import EXCHANGES
from .parameters import MODES
from .private_files import private_path, redirect_argument
from .updates import CLIPPING
from .wrapping import LOG, SETTINGS, Given, bind, find_signature, quietly, replace, watch

NO_TAG = -1


class Contributions:
    """Sketches of the gradients of a backward pass; a parameter has a number, its tag."""

    def __init__(self) -> None:
        self._tags = WeakIdKeyDictionary()
        self._sums: dict[int, torch.Tensor] = {}
        self._is_open = False
        self._scale = 1.0
        self._first: dict[int, torch.Tensor] = {}  # weights before the first backward pass

    def tag(self, parameter: torch.Tensor) -> int:
        """Return the tag of a parameter; NO_TAG for one that is not watched."""
        tag: int = self._tags.get(parameter, NO_TAG)
        return tag

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Watch parameters; the gradients of shards (DTensor) pass by such hooks."""
        for each in parameters:
            is_able = each.requires_grad and each.is_leaf and not hasattr(each, "placements")
            if is_able and each not in self._tags:
                tag = len(self._tags)
                self._tags[each] = tag
                each.register_hook(self._noting(tag))

    def _noting(self, tag: int) -> Callable[[torch.Tensor], None]:
        @unserializable_hook  # a parameter is sent to other processes without it
        def note(gradient: torch.Tensor) -> None:
            if self._is_open:
                self._add(tag, gradient)

        return note

    @quietly
    def _add(self, tag: int, gradient: torch.Tensor) -> None:
        added = sketch(gradient) / self._scale
        self._sums[tag] = self._sums[tag] + added if tag in self._sums else added

    def begin(self, scale: float) -> None:
        """Begin a backward pass, of a loss that was multiplied by `scale`."""
        self.watch(list(self._tags))
        if not self._first:
            self._first = {tag: sketch(each) for each, tag in self._tags.items()}
        self._is_open = True
        self._scale = scale

    def has_changed(self, parameter: torch.Tensor) -> bool:
        """Return True if a parameter has other values than before the first backward pass."""
        before = self._first.get(self.tag(parameter))
        return before is not None and is_apart(before, sketch(parameter))

    @quietly
    def end(self) -> None:
        """Write what a backward pass has added."""
        self._is_open = False
        if self._sums:
            tags = list(self._sums)
            LOG.add("contributed", tags=tags, values=encode(list(self._sums.values())))
        self._sums.clear()

    def note_group(self, arguments: Given, _: Any) -> None:
        """Watch the parameters of an optimizer's group."""
        parameters = arguments["param_group"]["params"]
        self.watch([parameters] if isinstance(parameters, torch.Tensor) else parameters)

    def note_zeroing(self, arguments: Given) -> None:
        """Note gradients that are dropped."""
        owner = arguments["self"]
        if isinstance(owner, nn.Module):
            dropped = list(owner.parameters())
        else:
            dropped = [each for group in owner.param_groups for each in group["params"]]
        tags = [self.tag(each) for each in dropped if each.grad is not None]
        if tags:
            LOG.add("zeroed", tags=[tag for tag in tags if tag != NO_TAG])


CONTRIBUTIONS = Contributions()


def watch_contributions() -> None:
    """Watch the parameters of each optimizer from now on."""
    watch(torch.optim.Optimizer, "add_param_group", after=CONTRIBUTIONS.note_group)
    watch(torch.optim.Optimizer, "zero_grad", before=CONTRIBUTIONS.note_zeroing)
    watch(nn.Module, "zero_grad", before=CONTRIBUTIONS.note_zeroing)


OF_CLASSES = ("cross_entropy", "nll_loss")
CRITERIA = (
    *OF_CLASSES,
    *("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "gaussian_nll_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "poisson_nll_loss"),
)
DEPRECATED = ("size_average", "reduce")
TYPES_OF_CRITERION_SETTINGS = (int, float, bool, str)


def watch_criteria() -> None:
    """Note each loss that is computed with gradients."""
    for name in CRITERIA:
        signature = find_signature(getattr(F, name))
        parameters = signature.parameters.values() if signature else ()
        watch(F, name, _noting(name, {each.name: each.default for each in parameters}))


def _noting(name: str, defaults: dict[str, Any]) -> Callable[[Given], None]:
    def note(arguments: Given) -> None:
        is_batched = torch._C._functorch.peek_interpreter_stack() is not None  # by vmap
        if not torch.is_grad_enabled() or is_batched:
            return
        every = defaults | arguments
        settings = {
            k: v
            for k, v in every.items()
            if isinstance(v, TYPES_OF_CRITERION_SETTINGS) and k not in DEPRECATED
        }
        settings["weight"] = every.get("weight") is not None
        is_mean = settings["reduction"] == "mean"
        divisor = _divisor(name, every) if is_mean else 1.0
        LOG.add("criterion", name=name, settings=settings, divisor=divisor)

    return note


def _divisor(name: str, arguments: Given) -> float | None:
    """Return by what the mean of a loss divides; None if it is not known."""
    target, weight = arguments["target"], arguments.get("weight")
    if name not in OF_CLASSES:
        return float(target.numel()) if weight is None else None
    if target.is_floating_point():
        return float(target.numel() / target.shape[min(1, target.dim() - 1)])
    used = target[target != arguments["ignore_index"]]
    if weight is None:
        return float(used.numel())
    total: Any = weight[used].double().sum()
    return float(total.tolist())


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
        if torch.compiler.is_compiling() or torch.jit.is_tracing():
            return original(self, *arguments, **options)
        if CALLS.is_backward:  # recomputed
            return original(self, *arguments, **options)
        if CALLS.depth or not _has_parameters(self):
            if CALLS.has_gradients if CALLS.depth else torch.is_grad_enabled():
                _note_mode(self)
            return original(self, *arguments, **options)
        if SETTINGS["dtype"] == "fp64":
            arguments, options = _widen_inputs(self, arguments, options) or (arguments, options)
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


@quietly
def _has_parameters(module: nn.Module) -> bool:
    return next(iter(module.parameters()), None) is not None


@quietly
def _note_mode(module: nn.Module) -> None:
    MODES.note(module)


@quietly
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
    if is_training:
        EXCHANGES.open()
    inputs = [arguments, options]
    rows: dict[str, Any] = {"marks": marks(inputs)} if is_training else {}
    if is_training and not PASSES.is_fresh:
        rows |= {"rows": split(inputs), "weights": weigh(None, inputs)}
    sizes = [len(leaf) for leaf in leaves(inputs)[:1]]
    is_wrapper = isinstance(module, DistributedDataParallel)
    about = {"is_wrapper": is_wrapper, "size": sizes[0] if sizes else 0}
    if is_wrapper:
        about["reduces"] = bool(module.require_backward_grad_sync)
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
                indices = torch.arange(local.numel(), device=local.device).view(local.shape)
                local.mul_((1 + epsilon * (indices % 3 - 1)).to(local.dtype))


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
    losses = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    loss = 0.0
    scale = 1.0
    for each in losses:
        if id(each) in CLIPPING.unscaled:
            _, value, scale = CLIPPING.unscaled[id(each)]
            loss += value
        else:
            loss += _value(getattr(each, "_local_tensor", each))
    EXCHANGES.open()
    MODES.keep()
    CLIPPING.num_passes += 1
    reduces = [bool(each.require_backward_grad_sync) for each in CALLS.wrappers]
    LOG.add("backward", loss=loss, scale=scale, reduces=reduces, dtype=str(losses[0].dtype))
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
        after=lambda arguments, _: CALLS.wrappers.add(arguments["self"]),
    )


def watch_saving() -> None:
    """Note the path of each torch.save: two ranks that write one file damage it."""

    def note(arguments: Given) -> None:
        if not hasattr(arguments["f"], "write"):
            LOG.add("save", path=str(arguments["f"]))
            arguments["f"] = private_path(arguments["f"])  # torch writes it by itself

    watch(torch, "save", note)
    redirect_argument(torch.UntypedStorage, "from_file", 0, "filename", False)  # torch.load(mmap)
    redirect_argument(torch.jit, "load", 0, "f", False)
    redirect_argument(torch.jit, "save", 1, "f", True)
