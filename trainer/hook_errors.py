"""Errors in a task's hooks: one line that names the example or the tensors that cause them.

An exception that the task itself raises for all examples keeps its traceback.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Mapping
from types import FrameType, TracebackType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.utils._pytree import tree_map, tree_map_only

from trainer.codec import name_of
from trainer.errors import ConfigError, RunError, message_of, one_line

Returned = TypeVar("Returned")
RAISE = dis.opmap["RAISE_VARARGS"]
OWN = ("torch", "trainer")  # packages whose frames are not the task's
LOSS = "loss(outputs, targets)"
METRICS = "metrics(outputs, targets)"
FAKE = (DataDependentOutputException, DynamicOutputShapeException)  # of tensors without values
OUT_OF_MEMORY = ("out of memory", "allocate memory", "ALLOC_FAILED")  # in messages of torch's
WITHOUT_GPU = ("not compiled with CUDA", "No CUDA GPUs are available", "no NVIDIA driver")
BACKWARD = "leave it out; the trainer calls it, on the mean of what loss returns"
MOST_SHOWN = 300  # characters of a message of torch's


class Rows:
    """The rows that hooks are called with: their split, and their example indices once known."""

    def __init__(self) -> None:
        self.split = "train"
        self.indices: torch.Tensor | None = None

    def begin(self, split: str, indices: torch.Tensor) -> None:
        self.split = split
        self.indices = indices

    def __len__(self) -> int:
        return 0 if self.indices is None else len(self.indices)

    def named(self, row: int) -> str:
        assert self.indices is not None
        return f"{self.split} example {int(self.indices[row])}"


def call_hook(
    name: str, hook: Callable[[Any, Any], Returned], first: Any, second: Any, rows: Rows
) -> Returned:
    """Return `hook(first, second)`; `name` is shown, such as "loss(outputs, targets)".

    Raises RunError for an exception that some rows cause, and names one of them. Raises ConfigError
    for an exception of torch's that all rows cause.
    """
    try:
        return hook(first, second)
    except Exception as error:
        line = None if is_explained(error) else _explain(name, hook, (first, second), error, rows)
        if line is None:
            raise
        raise line from error


def _explain(
    name: str, hook: Callable[[Any, Any], Any], given: tuple[Any, Any], error: Exception, rows: Rows
) -> Exception | None:
    """Return the line for an exception of a hook; None if its traceback says more."""
    what = f"{type(error).__name__}: {one_line(error)[:MOST_SHOWN]}{place_in_task(error)}"
    row = _find_row(hook, given, type(error), rows)
    if row is not None:
        return RunError(f"{name} failed for {rows.named(row)}: {what}; repair it")
    if not is_of_torch(error):
        return None
    if any(f.f_code.co_name == "backward" and _package(f) == "torch" for f, _ in _frames(error)):
        return ConfigError(f"{name} calls backward(){place_in_task(error)}: {BACKWARD}")
    shown = ", ".join(_show(n, tree) for n, tree in zip(_arguments(name), given, strict=True))
    return ConfigError(f"{name} failed: {what}; {shown}; make them fit")


def _arguments(name: str) -> list[str]:
    return name.partition("(")[2].rstrip(")").split(", ")


@torch.no_grad()
def _find_row(
    hook: Callable[[Any, Any], Any], given: tuple[Any, Any], kind: type[Exception], rows: Rows
) -> int | None:
    """Return a row that fails alone, found by bisection; None if rows without it fail too."""
    count = len(rows)

    def fails(first: int, last: int) -> bool:
        def take(tensor: torch.Tensor) -> torch.Tensor:
            return tensor[first:last] if tensor.dim() and len(tensor) == count else tensor

        try:
            hook(*tree_map_only(torch.Tensor, take, given))
        except kind:
            return True
        except Exception:  # it does not take so few rows
            return False
        return False

    first = 0
    last = count
    while last - first > 1:
        middle = (first + last) // 2
        if fails(first, middle):
            last = middle
        elif fails(middle, last):
            first = middle
        else:
            return None
    if count < 2 or not fails(first, last):
        return None
    other = count - 1 if first == 0 else 0
    return None if fails(other, other + 1) and fails(count // 2, count // 2 + 1) else first


# Where an exception was raised --------------------------------------------------------------------


def _frames(error: BaseException) -> list[tuple[FrameType, TracebackType]]:
    frames = []
    step = error.__traceback__
    while step is not None:
        frames.append((step.tb_frame, step))
        step = step.tb_next
    return frames


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def place_in_task(error: BaseException) -> str:
    """Return ` (file.py:12)`, the last line of the task's own code; empty without one."""
    own = [(f, step) for f, step in _frames(error) if _package(f) not in OWN]
    return f" ({own[-1][0].f_code.co_filename}:{own[-1][1].tb_lineno})" if own else ""


def is_of_a_group(error: Exception) -> bool:
    """Return True for an exception of a collective: another rank has ended or does not answer."""
    return isinstance(error, dist.DistError) or "gloo/" in message_of(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an allocation failed, on a GPU or on the CPU."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    if isinstance(error, RunError) or not isinstance(error, RuntimeError):
        return False
    return any(text in str(error) for text in OUT_OF_MEMORY)


def is_explained(error: Exception) -> bool:
    """Return True for an exception that no hook is to blame for, or that has its line already."""
    kinds = (is_out_of_memory, is_of_a_group, is_of_compiler, is_without_gpu)
    is_known = isinstance(error, (ConfigError, RunError, *FAKE))
    return is_known or any(is_one(error) for is_one in kinds)


def is_of_compiler(error: BaseException) -> bool:
    """Return True if torch's compiler, which only run.compile imports, cannot compile here."""
    return any(kind.__name__ == "BackendCompilerFailed" for kind in type(error).__mro__)


def is_without_gpu(error: BaseException) -> bool:
    """Return True if the task asks for a GPU, and torch sees none."""
    is_torchs = not isinstance(error, (ConfigError, RunError))
    return is_torchs and any(text in message_of(error) for text in WITHOUT_GPU)


def is_of_second_backward(error: BaseException) -> bool:
    """Return True if the graph of a forward pass was differentiated a second time."""
    return isinstance(error, RuntimeError) and "through the graph a second time" in str(error)


def is_of_torch(error: Exception) -> bool:
    """Return True for an exception of torch's computations, not one of the task's code."""
    if is_of_a_group(error):
        return False
    frame, step = _frames(error)[-1]
    if _package(frame) in OWN:
        return True
    is_raised = frame.f_code.co_code[step.tb_lasti] == RAISE
    return type(error) is RuntimeError and not is_raised


def _show(name: str, tree: Any) -> str:
    """Describe an argument: `outputs: float32 (22, 3)`."""
    text = str(tree_map(_form, tree)).replace("'", "")
    return f"{name}: {text if len(text) < 200 else f'{text[:200]}...'}"


def _form(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return f"{name_of(leaf.dtype)} {tuple(leaf.shape)}"
    return type(leaf).__name__


# The model ----------------------------------------------------------------------------------------


def call(model: nn.Module, inputs: Any, rows: Rows | None = None) -> Any:
    """Call `model` with a tensor, with the items of a tuple, or with a dict as keywords.

    With `rows`, the rows of a model that this rank can run alone, an example that makes it fail is
    named.
    """
    try:
        return _call(model, inputs)
    except Exception as error:
        line = None if is_explained(error) else _explain_model(model, inputs, error, rows)
        if line is None:
            raise
        raise line from error


def _call(model: nn.Module, inputs: Any) -> Any:
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def _explain_model(
    model: nn.Module, inputs: Any, error: Exception, rows: Rows | None
) -> Exception | None:
    """Return the line for an exception of a model; None if its traceback says more."""
    what = f"{type(error).__name__}: {one_line(error)[:MOST_SHOWN]}{place_in_task(error)}"
    if rows is not None:
        row = _find_row(lambda given, _: _call(model, given), (inputs, None), type(error), rows)
        if row is not None:
            return RunError(f"the model failed for {rows.named(row)}: {what}; repair it")
    names = {id(module): name for name, module in model.named_modules()}
    ids = [id(frame.f_locals.get("self")) for frame, _ in _frames(error)]
    inside = [names[each] for each in ids if each in names]
    if not inside or not is_of_torch(error):
        return None
    name = inside[-1].removeprefix("module.")
    called = f"the model's module {name}" if name else "the model"
    how = ""
    if isinstance(inputs, (tuple, list, Mapping)):
        how = f", each an argument of the model ({type(inputs).__name__})"
    advice = "make them fit"
    if isinstance(model.get_submodule(inside[-1]), nn.SyncBatchNorm) and "on GPU" in what:
        advice = "leave it nn.BatchNorm, and set strategy.sync_batchnorm=true, which CPUs can too"
    return ConfigError(f"{called} failed: {what}; {_show('inputs', inputs)}{how}; {advice}")
