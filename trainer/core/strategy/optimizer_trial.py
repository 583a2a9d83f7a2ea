"""Optimizers on a mesh: trials on small stand-ins.

The trials find an optimizer that needs a closure, one whose step of a parameter depends on the
other parameters, which a rank of a divided model does not have, and a fused step that skips
elements.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import cache
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from trainer.base.errors import ConfigError, one_line
from trainer.core.state.sandbox import keep_generators, sandbox

# These update each element by itself, so a shard can be updated without the rest of its tensor.
ELEMENTWISE = {
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
}
FUSED = ("torch.optim.SGD", "torch.optim.Adam", "torch.optim.AdamW")  # on CPU and CUDA
LONGEST_AXIS = 4  # of a stand-in
STAND_IN_TOLERANCE = 1e-9  # relative, in 64 bits


def check_by_trial(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer whose step an update cannot call, or should not."""
    _check_silence(optimizer)
    if any(inner.state is not optimizer.state for inner in inner_optimizers(optimizer)):
        raise ConfigError(f"""build_optimizer: {type(optimizer).__name__} wraps
            an optimizer whose state no checkpoint holds; share it: self.state = base.state""")
    if not is_elementwise(optimizer):
        _check_closure(optimizer)


def _check_silence(optimizer: Optimizer) -> None:
    """Raise ConfigError for an optimizer whose own code uses torch.distributed."""
    for kind in type(optimizer).__mro__:
        if kind.__module__.startswith(("torch.optim.", "builtins")):
            break
        for function in filter(inspect.isfunction, vars(kind).values()):
            if kind.__module__.startswith("torch.distributed") or _communicates(
                inspect.unwrap(function)  # torch wraps `step`
            ):
                raise ConfigError(f"""build_optimizer: {kind.__name__}.{function.__name__}
                    exchanges tensors between ranks itself; the gradients are summed already;
                    use its version for one process, with zero1 or fsdp""")


def fused_option(
    kind: str, dtypes: Collection[torch.dtype], device: torch.device
) -> dict[str, Any]:
    """Return the option for a fused step of this class; none where torch has no right one."""
    is_right = kind in FUSED and (kind != "torch.optim.SGD" or _steps_all(dtypes, device))
    return {"fused": True} if is_right else {}


def _steps_all(dtypes: Collection[torch.dtype], device: torch.device) -> bool:
    """Return True if torch's fused SGD steps every element of parameters of these dtypes.

    On CPUs it leaves most elements of 16 bits as they are, and their momentum without a value
    (pytorch/pytorch#191763; torch 2.13).
    """
    return device.type != "cpu" or all(d.itemsize > 2 or _is_stepped(d) for d in dtypes)


@cache
@torch.enable_grad()
def _is_stepped(dtype: torch.dtype) -> bool:
    weights = nn.Parameter(torch.ones(64, dtype=dtype, device="cpu"))
    weights.sum().backward()
    optim.SGD([weights], lr=1.0, fused=True).step()
    return not weights.any()


def check_fused(optimizer: Optimizer) -> None:
    """Raise ConfigError for a fused SGD that would leave elements of this rank as they are."""
    if not isinstance(optimizer, optim.SGD):
        return
    for group in optimizer.param_groups:
        if group["fused"] and not all(_steps_all([p.dtype], p.device) for p in group["params"]):
            raise ConfigError("""build_optimizer: SGD(fused=True) skips elements of 16 bits on a CPU
                (pytorch/pytorch#191763); leave fused out""")


def _communicates(function: FunctionType) -> bool:
    names: set[str] = set()
    codes = [function.__code__]
    while codes:
        code = codes.pop()
        names.update(code.co_names)
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    if "distributed" in names and function.__globals__.get("torch") is torch:
        return True
    values = [function.__globals__.get(name) for name in names]
    modules = [
        each.__name__ if inspect.ismodule(each) else each.__module__
        for each in values
        if inspect.ismodule(each) or inspect.isfunction(each)
    ]
    return any(module.startswith("torch.distributed") for module in modules)


def _check_closure(optimizer: Optimizer) -> None:
    """Raise ConfigError if an optimizer cannot step without a closure."""
    try:
        step_stand_ins(optimizer)
    except Exception as error:  # any other failure may be that of the stand-ins
        if "closure" in str(error):
            raise ConfigError(f"""build_optimizer: {type(optimizer).__name__}.step needs a closure,
                and `update` has none ({one_line(error)}); see SAM in docs/tasks.md""") from None


def is_elementwise(optimizer: Optimizer) -> bool:
    """Return True for an optimizer of ELEMENTWISE, unless its step was replaced."""
    return type(optimizer) in ELEMENTWISE and "step" not in vars(optimizer)


def inner_optimizers(optimizer: Optimizer) -> list[Optimizer]:
    """Return the optimizers that an optimizer keeps, such as the one that it wraps."""
    return [leaf for leaf in _attributes(optimizer) if isinstance(leaf, Optimizer)]


def _attributes(optimizer: Optimizer) -> list[Any]:
    """Return all that an optimizer keeps outside of its groups and state."""
    return tree_leaves(
        [value for key, value in vars(optimizer).items() if key not in _GROUPS_AND_STATE]
    )


def check_hooks(optimizer: Optimizer) -> None:
    """Raise ConfigError for step hooks, which would see this rank's parts of the parameters."""
    if any(getattr(optimizer, kind, None) for kind in _STEP_HOOKS):
        raise ConfigError(f"""build_optimizer:
            {type(optimizer).__name__} has a step hook, which would get parts of parameters;
            put it into the step of a class of your own, or use ddp""")


def check_independence(optimizer: Optimizer) -> None:
    """Raise ConfigError if a step needs more than one parameter and its gradient at a time."""
    subject = f"build_optimizer: {type(optimizer).__name__}"
    own = vars(optimizer).get("step")
    if own is not None and getattr(own, "__self__", None) is not optimizer:
        raise ConfigError(f"""{subject} has another step than its class, which cannot be tried;
            write a class with this step, or use ddp""")
    others = _attributes(optimizer)
    shapes = {p.shape for group in optimizer.param_groups for p in group["params"]}
    for leaf in (leaf for leaf in others if isinstance(leaf, torch.Tensor)):
        if isinstance(leaf, nn.Parameter):
            raise ConfigError(f"""{subject} keeps parameters outside of param_groups,
                and ranks step different ones; read them from param_groups, or use ddp""")
        if leaf.dim() and leaf.shape in shapes:
            raise ConfigError(f"""{subject} keeps tensors of its parameters outside of its state,
                and ranks step different ones;
                make them in the first step, in self.state[parameter], or use ddp""")
    for inner in inner_optimizers(optimizer):
        if not all(any(g is own for own in optimizer.param_groups) for g in inner.param_groups):
            raise ConfigError(f"""{subject} wraps an optimizer with param_groups of its own,
                and ranks step different ones; share them, or use ddp""")
    stepped_in_halves: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    with suppress(Exception):  # a failure may be that of the stand-ins
        whole = step_stand_ins(optimizer)
        for first in range(2):
            stepped_in_halves += step_stand_ins(optimizer, first, 2)
            expected += whole[first::2]
    for one, other in zip(stepped_in_halves, expected, strict=False):
        if not torch.allclose(one, other, rtol=STAND_IN_TOLERANCE, atol=0):
            raise ConfigError(f"""{subject} steps a parameter by the values of others,
                and ranks step different ones; use ddp""")


_GROUPS_AND_STATE = ("param_groups", "state", "defaults")
_STEP_HOOKS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
GRADIENT_SIZES = (1.0, 1e3, 1e-3)  # a limit of their norm is reached in one of the steps


@torch.no_grad()
def step_stand_ins(optimizer: Optimizer, first: int = 0, every: int = 1) -> Sequence[torch.Tensor]:
    """Return stand-ins of every so many parameters after three steps of a copy of the optimizer.

    It has no other parameters, and no step hooks, which could change the model.
    """
    optimizer_copy = object.__new__(type(optimizer))
    generator = torch.Generator().manual_seed(0)
    memo: dict[int, Any] = {id(optimizer): optimizer_copy}
    gradients: dict[nn.Parameter, torch.Tensor] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            sizes = [min(size, LONGEST_AXIS) for size in parameter.shape]
            values = torch.randn([2, *sizes], generator=generator, dtype=torch.float64)
            memo[id(parameter)] = stand_in = nn.Parameter(values[0], parameter.requires_grad)
            gradients[stand_in] = values[1]
    vars(optimizer_copy).update(copy.deepcopy(vars(optimizer), memo))
    stand_ins = list(gradients)[first::every]
    for group in optimizer_copy.param_groups:
        group["params"] = [p for p in group["params"] if any(p is each for each in stand_ins)]
    for each in (optimizer_copy, *inner_optimizers(optimizer_copy)):
        for kind in _STEP_HOOKS:
            vars(each).get(kind, {}).clear()
    with sandbox(keep_generators()):
        for size in GRADIENT_SIZES:
            for parameter in stand_ins:
                parameter.grad = gradients[parameter] * size
            optimizer_copy.step()
    return stand_ins


def surround_step(
    optimizer: Optimizer, before: Callable[[], None] | None, after: Callable[[], None]
) -> None:
    """Call `before` and `after` around each whole step of an optimizer.

    Hooks of torch's run around the step of each of its classes: twice if it calls `super().step()`,
    and never in a wrapper that does not call `Optimizer.__init__`.
    """
    step = optimizer.step

    @functools.wraps(step)
    def whole_step(*args: Any, **kwargs: Any) -> Any:
        if before is not None:
            before()
        returned = step(*args, **kwargs)
        after()
        return returned

    optimizer.step = whole_step  # type: ignore[method-assign]
