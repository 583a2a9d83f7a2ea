"""A task that uses the parameters of a divided model itself, in its loss or its train_step."""

from __future__ import annotations

import functools
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from trainer.errors import ConfigError
from trainer.strategy.mesh import Mesh
from trainer.strategy.sharded.freed_memory import is_freed
from trainer.strategy.tensor_parallel.loss_parallel import ABOUT

ADVICE = (
    "use weight_decay for a penalty, an attribute of the task for a fixed teacher, a frozen part of"
    " the model for one that follows it (docs/tasks.md, Penalties and teachers), or strategy=zero1"
)
DIVIDED = "which this mesh divides"
GRADIENTS = "use strategy=ddp, as only update computes gradients of parameters there"
CHAIN = "give a block inputs and the output of the one before only, or use strategy=fsdp"
_MIXED = re.compile(
    r"expected device meta|mixed torch\.Tensor and DTensor|on device meta|[Mm]eta tensor"
    r"|FSDP does not support deepcopy"
)
_READ = re.compile(r"item\(\) cannot be called on meta tensors")
_FREED = re.compile(r"setStorage: .* storage of size 0|expected device \w+ but got meta")


class DividedParameters(TorchFunctionMode):
    """Raises ConfigError where a loss uses one of `parts`: parameters that ranks have in parts."""

    def __init__(self, parts: Mapping[torch.Tensor, str]):
        super().__init__()
        self._parts = parts

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func not in ABOUT:
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and leaf in self._parts:
                    why = f"the loss uses {self._parts[leaf]}, {DIVIDED}"
                    advice = GRADIENTS if func is torch.autograd.grad else ADVICE
                    raise ConfigError(f"strategy.mesh: {why}; {advice}")
                if isinstance(leaf, torch.Tensor) and is_freed(leaf):
                    why = "the loss uses a part of a parameter, which fsdp frees after the forward"
                    raise ConfigError(f"strategy.mesh: {why} pass; keep .clone() of it")
        return func(*args, **(kwargs or {}))


@contextmanager
def parts_named(mesh: Mesh) -> Iterator[None]:
    """Raise ConfigError where the task's code mixes tensors with parts of parameters, or takes
    gradients of gradients through parameters that are not there any more."""
    try:
        with _gradients_checked() if mesh.shard > 1 else nullcontext():
            yield
    except (RuntimeError, AssertionError, ConfigError) as error:
        if not mesh.is_divided:
            raise
        if _FREED.search(str(error)):
            why = "a gradient of a gradient needs parameters that are freed, or on other ranks"
            advice = "use strategy=ddp, or under fsdp torch.autograd.grad in forward"
            raise ConfigError(f"strategy.mesh: {why}; {advice}") from error
        if _READ.search(str(error)):
            place = _task_line(error.__cause__ or error)
            why = f"{place} reads the value of a tensor, and a dry run has shapes only"
            advice = "pass masks and positions as inputs, or use strategy=fsdp"
            raise ConfigError(f"strategy.mesh: {why}; {advice}") from error
        if not _MIXED.search(str(error)):
            raise
        place = _task_line(error.__context__ or error)  # of torch's error, which a hook's may hide
        if mesh.pipeline > 1:
            why = f"{place} uses what another stage has, a parameter or the output of a block"
            raise ConfigError(f"strategy.mesh.pipeline: {why}; {CHAIN}") from error
        why = f"{place} uses parameters that this mesh divides, or that other ranks have"
        raise ConfigError(f"strategy.mesh: {why}; {ADVICE}") from error


@contextmanager
def _gradients_checked() -> Iterator[None]:
    """Raise ConfigError where torch.autograd.grad is asked for gradients of sharded parameters.

    It has none, or with allow_unused=True returns None.
    """
    from torch.distributed.tensor import DTensor

    grad = torch.autograd.grad

    @functools.wraps(grad)
    def checked(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(leaf, DTensor) for leaf in tree_leaves(inputs)):
            frame = sys._getframe(1)
            what = f"torch.autograd.grad at {frame.f_code.co_filename}:{frame.f_lineno}"
            why = f"{what} is asked for gradients of parameters, {DIVIDED}"
            raise ConfigError(f"strategy.mesh: {why}; {GRADIENTS}")
        return grad(outputs, inputs, *args, **kwargs)

    torch.autograd.grad = checked
    try:
        yield
    finally:
        torch.autograd.grad = grad


def _task_line(error: BaseException) -> str:
    """Return `file.py:12`, the last line outside of torch, this package and the stdlib."""
    package = str(Path(__file__).parents[2])
    library = str(Path(traceback.__file__).parent)
    frames = traceback.extract_tb(error.__traceback__)
    others = [f for f in frames if not f.filename.startswith((package, "<"))]
    own = [
        frame
        for frame in others
        if "/torch/" not in frame.filename
        and ("site-packages" in frame.filename or not frame.filename.startswith(library))
    ]
    frame = (own or frames)[-1]
    return f"{frame.filename}:{frame.lineno}"
