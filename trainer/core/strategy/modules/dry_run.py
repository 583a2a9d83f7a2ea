"""Dry run of one micro-batch: it finds cost and changes and undoes them; also of shapes alone.

And what it finds of parameters: the loss must reach them, and the task must not replace them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from trainer.base.errors import ConfigError
from trainer.core.config.schema import Config, StrategySettings
from trainer.core.state.sandbox import is_large_frozen

WEIGHT_NOISE = 0.05  # of a weight
NOISE_SIZE = 2**16 + 1  # elements of noise: a prime, so that rows of a matrix differ, up to as many
LARGE_BYTES = 2**27  # of a model, which takes half a second and more for a row on a CPU


def is_large(model: nn.Module) -> bool:
    """Return True for a model of which passes at the start take few rows.

    Lazy layers need all of them to find their sizes.
    """
    every = [*model.parameters()]
    return not any(map(is_lazy, every)) and sum(p.nbytes for p in every) > LARGE_BYTES


class DispatchMode(TorchDispatchMode):
    """A mode whose operations do not pass through a wrapper of torch.compile, each of them."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


class FlopCounter(DispatchMode):
    """Count floating-point operations with torch's formulas.

    torch's FlopCounterMode would import torch._dynamo, which costs 0.7 s at each start.
    """

    total = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func._overloadpacket in flop_registry and not _is_repeated.get():
            formula = flop_registry[func._overloadpacket]
            self.total += formula(*args, **kwargs, out_val=out)
        return out


_is_repeated: ContextVar[bool] = ContextVar("is_repeated", default=False)  # in this thread


@contextmanager
def uncounted() -> Iterator[None]:
    """Have no counter count the block's operations, which are only computed again."""
    before = _is_repeated.set(True)
    try:
        yield
    finally:
        _is_repeated.reset(before)


class FrozenKept(FlopCounter):
    """Copies large frozen parameters before an operation writes them, and restores them at the end.

    Most of a model may be frozen. `untouched` then has those that nothing has written.
    """

    def __init__(self, model: nn.Module):
        super().__init__()
        self.untouched: list[nn.Parameter] = []
        self._before = [(p, p.detach()) for p in model.parameters() if is_large_frozen(p)]
        self._places = {_place(values) for _, values in self._before}
        self._copies: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # by their storage

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        schema = func._schema
        is_sent = func.namespace == "c10d"  # whose schemas do not say what is written
        for index, argument in enumerate(schema.arguments if schema.is_mutable or is_sent else ()):
            if is_sent or (argument.alias_info is not None and argument.alias_info.is_write):
                self._keep(args[index] if index < len(args) else kwargs.get(argument.name))
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _keep(self, written: Any) -> None:
        for each in tree_leaves(written):
            address = _place(each)
            if address in self._places and address not in self._copies:
                views = [values for _, values in self._before if _place(values) == address]
                self._copies[address] = [(values, values.clone()) for values in views]

    @torch.no_grad()
    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for values, copy in chain(*self._copies.values()):
            values.copy_(copy)
        for parameter, values in self._before:
            if _place(parameter) != _place(values):  # by an assignment to parameter.data
                parameter.data = values
            elif _place(values) not in self._copies:
                self.untouched.append(parameter)


class Alone(DispatchMode):
    """Raises RuntimeError where an operation would wait for other ranks, which run others."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError(f"{func} in a pass of this rank alone")
        return func(*args, **(kwargs or {}))


def _place(value: Any) -> int:
    is_plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
    return value.untyped_storage().data_ptr() if is_plain else 0


@contextmanager
def hooked(hooks: Iterable[Any]) -> Iterator[None]:
    """Remove hooks, registered at the start of the block, at its end."""
    registered = list(hooks)
    try:
        yield
    finally:
        for hook in registered:
            hook.remove()


@torch.no_grad()
def perturb(weights: torch.Tensor, noise: torch.Generator) -> None:
    """Change weights a little and keep their signs; zeros, which hide what is behind them, too.

    The noise of a large tensor repeats: all of SmolLM2's would take 1.2 s to draw.
    """
    if weights.is_floating_point() and weights.numel():
        drawn = (
            torch.randn(min(weights.numel(), NOISE_SIZE), generator=noise).to(weights)
            * WEIGHT_NOISE
        )
        wide = torch.promote_types(weights.dtype, torch.float32)
        mean = torch.linalg.vector_norm(weights, 1, dtype=wide) / weights.numel()
        floor = mean.to(weights).clamp_min(WEIGHT_NOISE)
        added, factors = drawn * floor, drawn.clamp(-0.5, 0.5)
        flat = weights.reshape(-1)
        for part in flat.split(NOISE_SIZE):
            size = len(part)
            part += torch.where(part == 0, added[:size], part * factors[:size])
        if flat.data_ptr() != weights.data_ptr():  # in another order than rows
            weights.copy_(flat.view_as(weights))


def eager(config: Config) -> AbstractContextManager[Any]:
    """Compile nothing in the block: few rows would make torch compile for any number of them, and
    it cannot trace the modes of a dry run. A task may compile parts of its model itself."""
    may_compile = config.run.compile or "torch._dynamo" in sys.modules  # 0.7 s to import
    return torch.compiler.set_stance("force_eager") if may_compile else nullcontext()


def changed_buffers(model: nn.Module, before: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the buffers that differ from `before`: running statistics, not constants."""
    changed = []
    for name, buffer in model.named_buffers():
        if buffer.is_meta:  # another rank has it
            continue
        if name not in before or not torch.equal(buffer, before[name]):
            changed.append(buffer)
    return changed


Known = Mapping[str, tuple[nn.Parameter, bool]]  # at the start, and whether they were trained


def describe_change(at_start: Known, parameters: Mapping[str, nn.Parameter]) -> str:
    """Return a line on the first parameter that is another one than at the start; empty if none."""
    for name in {**at_start, **parameters}:
        before, was_trained = at_start.get(name, (None, False))
        after = parameters.get(name)
        how = ""
        if before is None:
            how = "was added after the start: nothing trains it; build it in build_model"
        elif after is None:
            how = "was removed after the start, so no resume could load a checkpoint; keep it"
        elif after is not before:
            advice = "write its values into the old one by copy_"
            how = f"is another tensor than at the start, which alone is trained; {advice}"
        elif after.requires_grad and not was_trained:
            advice = "build it with requires_grad=True, and set its learning rate to 0 at first"
            how = f"requires a gradient now, but nothing trains it; {advice}"
        if how:
            return f"the parameter {name} {how}"
    return ""


def check_reached(config: StrategySettings, parameters: Mapping[str, nn.Parameter]) -> None:
    """Raise ConfigError naming a parameter to train without a gradient, unless that is allowed.

    Another rank may have a gradient for it, and reduce it.
    """
    if config.find_unused_parameters:
        return
    for name, parameter in parameters.items():
        if parameter.grad is None:
            problem = f"the loss does not depend on the parameter {name}"
            advice = "use it, set requires_grad=False"
            if not parameter.requires_grad:
                problem = f"the parameter {name} was frozen after the start"
                advice = "freeze it from the start by run.freeze"
            advice = f"{advice}, or set strategy.find_unused_parameters=true"
            raise ConfigError(f"strategy={config.name}: {problem}; {advice}")


def reaching(total: torch.Tensor, parameters: Sequence[nn.Parameter]) -> torch.Tensor:
    """Return `total`, from which a backward pass reaches these parameters too, with zeros.

    DDP waits for a gradient of each parameter, and an update that names its optimizers may not
    compute those of others.
    """
    return _Reaching.apply(total, *parameters) if parameters else total


class _Reaching(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: torch.Tensor, *parameters: nn.Parameter) -> torch.Tensor:
        ctx.parameters = parameters
        return total.view_as(total)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, *(p.new_zeros(()).expand_as(p) for p in ctx.parameters)
