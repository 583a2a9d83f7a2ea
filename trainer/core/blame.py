"""Blame for a failure: names the example or the tensors that cause it, in one line.

An exception that the task itself raises for all examples keeps its traceback.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterator, Mapping
from types import FrameType, TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
)
from torch.utils._pytree import tree_map

from trainer.base.codec import name_of
from trainer.base.errors import ConfigError, RunError, message_of, one_line
from trainer.base.model_calls import call_plainly
from trainer.base.python_code import owner_of_frame, place_in
from trainer.core.micro_batch import Rows, slice_rows

RAISE = dis.opmap["RAISE_VARARGS"]
LOSS_HOOK = "loss(outputs, targets)"
METRICS_HOOK = "metrics(outputs, targets)"
FAKE = (DataDependentOutputException, DynamicOutputShapeException)  # of tensors without values
OUT_OF_MEMORY = ("out of memory", "allocate memory", "ALLOC_FAILED")  # in messages of torch's
WITHOUT_GPU = ("not compiled with CUDA", "No CUDA GPUs are available", "no NVIDIA driver")
BACKWARD = "leave it out; the trainer calls it, on the mean of what loss returns"
MOST_OF_AN_ERROR = 300  # characters of a message of torch's


def explain_hook(
    name: str, hook: Callable[[Any, Any], Any], given: tuple[Any, Any], error: Exception, rows: Rows
) -> Exception | None:
    """Return the line for an exception of a hook, "loss(outputs, targets)".

    A RunError for an exception that some rows cause, which names one of them. A ConfigError for an
    exception of torch's that all rows cause. None if the traceback says more.
    """
    if is_explained(error):
        return None
    what = f"{type(error).__name__}: {one_line(error)[:MOST_OF_AN_ERROR]}{place_in_task(error)}"
    row = _find_row(hook, given, type(error), rows)
    if row is not None:
        return RunError(f"{name} failed for {rows.named(row)}: {what}; repair it")
    if not is_of_torch(error):
        return None
    if any(
        f.f_code.co_name == "backward" and owner_of_frame(f) == "torch" for f, _ in _frames(error)
    ):
        return ConfigError(f"{name} calls backward(){place_in_task(error)}: {BACKWARD}")
    shown = ", ".join(_show(n, tree) for n, tree in zip(_arguments(name), given, strict=True))
    return ConfigError(f"{name} failed: {what}; {shown}; make them fit")


def _arguments(name: str) -> list[str]:
    return name.partition("(")[2].rstrip(")").split(", ")


def find_rows(fails: Callable[[int, int], bool], count: int) -> Iterator[int]:
    """Yield the rows with which something fails, in order, of `count` rows.

    `fails(first, last)` computes those rows apart from the others. By bisection: few calls suffice
    if few rows are to blame. Rows that fail only together are not found.
    """
    pending = [(0, count)] if count else []
    while pending:
        first, last = pending.pop()
        if not fails(first, last):
            continue
        if last - first == 1:
            yield first
            continue
        middle = (first + last) // 2
        pending += [(middle, last), (first, middle)]


@torch.no_grad()
def _find_row(
    hook: Callable[[Any, Any], Any], given: tuple[Any, Any], kind: type[Exception], rows: Rows
) -> int | None:
    """Return the first row that fails alone; None if rows without it fail too."""
    count = len(rows)

    def fails(first: int, last: int) -> bool:
        try:
            hook(*slice_rows(given, first, last, count))
        except kind:
            return True
        except Exception:  # it does not take so few rows
            return False
        return False

    row = next(find_rows(fails, count), None) if count > 1 else None
    if row is None:
        return None
    other = count - 1 if row == 0 else 0
    return None if fails(other, other + 1) and fails(count // 2, count // 2 + 1) else row


# Where an exception was raised --------------------------------------------------------------------


def _frames(error: BaseException) -> list[tuple[FrameType, TracebackType]]:
    frames = []
    step = error.__traceback__
    while step is not None:
        frames.append((step.tb_frame, step))
        step = step.tb_next
    return frames


def place_in_task(error: BaseException) -> str:
    """Return ` (file.py:12)`, the last line of the task's code or a package's that it uses."""
    line = place_in(error.__traceback__, "user", "installed")
    return f" ({line})" if line else ""


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
    if owner_of_frame(frame) in ("torch", "lockstep"):
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


def explain_model(
    model: nn.Module, inputs: Any, error: Exception, rows: Rows | None
) -> Exception | None:
    """Return the line for an exception of a model; None if its traceback says more."""
    what = f"{type(error).__name__}: {one_line(error)[:MOST_OF_AN_ERROR]}{place_in_task(error)}"
    if rows is not None:
        row = _find_row(
            lambda given, _: call_plainly(model, given), (inputs, None), type(error), rows
        )
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
    elif "could not create a primitive" in what:  # oneDNN's, such as of an LSTM without AVX-512
        advice = "this CPU cannot compute it in 16 bits; set strategy.precision=fp32"
    return ConfigError(f"{called} failed: {what}; {_show('inputs', inputs)}{how}; {advice}")
