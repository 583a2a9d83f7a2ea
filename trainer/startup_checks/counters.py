"""Values that a task and a model keep, and numbers that each pass changes."""

from __future__ import annotations

import itertools
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

import numpy
import torch
from torch import nn

from trainer.base.codec import digest
from trainer.base.same import relative
from trainer.base.same.distance import apart
from trainer.core.state import (
    MOST_BYTES,
    MOST_ITEMS,
    OF_A_MODULE,
    OF_A_TASK,
    BufferCopies,
    keep_attributes,
    sandbox,
)
from trainer.core.state.outside import functions_of, is_own
from trainer.startup_checks.explanations import explain_buffers
from trainer.startup_checks.mismatch import compare
from trainer.startup_checks.passes import PassResult
from trainer.startup_checks.unsaved import (
    of_model,
    of_task,
)

FACTORS = (10, 100, 1000)  # passes ahead
RESULT_KINDS = ("loss", "weights", "recorded", "gradient")
Numbers = dict[str, Any]  # by name: an int, a float, or the tensor of a buffer


@dataclass(frozen=True)
class Found:
    """The names of counters, and whether they count passes, not rows."""

    names: Sequence[str] = ()
    is_of_passes: bool = False


@dataclass(frozen=True)
class CounterPasses:
    """Passes over rows: the first one, `whole`, one more over the same rows, and one over few.

    They keep the state that they leave. The buffers are not counters if a step `keeps_buffers`: its
    micro-batches all start with them.
    """

    whole: PassResult
    run: Callable[[], PassResult]
    run_few: Callable[[], PassResult]
    keeps_buffers: bool
    limit: float


class Counters:
    """The numbers of a model and a task: attributes, variables around them, and buffers."""

    def __init__(self, module: nn.Module, task: Any):
        self._module = module
        self._task = task
        self._before = self._read()

    def find(self, passes: CounterPasses) -> Found:
        """Return the counters on which later passes depend, after a first pass."""
        first, second = self._before, self._read()
        if not passes.keeps_buffers:
            first |= dict(self._module.named_buffers())
            second |= passes.whole.buffers
        if not (by := _list_steps(first, second)):
            return Found()
        with sandbox(keep_attributes(self._module, self._task)):
            return self._try_ahead(passes, second, by)

    def have_advanced(self) -> bool:
        return bool(_list_steps(self._before, self._read()))

    def _try_ahead(self, passes: CounterPasses, second: Numbers, by: Numbers) -> Found:
        """Run passes with the counters that a first pass advanced `by` steps at other numbers."""
        try:
            third = self._pass_from(second, by, passes.run)
            by = _still(by, second, third)
            for factor in FACTORS if by else ():
                with self._ahead(third, by, factor):
                    mismatch = compare(passes.whole, passes.run(), passes.limit)
                if mismatch is not None and mismatch.kind in RESULT_KINDS:
                    fewer = _list_steps(second, self._pass_from(second, by, passes.run_few))
                    return Found([*by], all(_is_same(fewer.get(name), by[name]) for name in by))
        except Exception:  # such as a counter that is the index of a table
            return Found()
        return Found()

    def repeat(self, run: Callable[[], Any]) -> Iterator[Any]:
        """Yield the result of a call, and if it counts, those after 10, 100 and 1,000 more."""
        first = self._read()
        yield run()
        second = self._read()
        if not (by := _list_steps(first, second)):
            return
        run()
        third = self._read()
        by = _still(by, second, third)
        for factor in FACTORS if by else ():
            with self._ahead(third, by, factor):
                result = run()
            yield result

    def _pass_from(self, numbers: Numbers, by: Numbers, run: Callable[[], PassResult]) -> Numbers:
        """Return the numbers after a pass that starts with these."""
        with self._ahead(numbers, by, 0):
            return {**run().buffers, **self._read()}

    def _read(self) -> Numbers:
        return {name: value for name, value, _ in self._places()}

    @contextmanager
    def _ahead(self, numbers: Numbers, by: Numbers, factor: int) -> Iterator[None]:
        """Let counters be `factor` steps further in the block than `numbers`."""
        wanted = {name: numbers[name] + factor * step for name, step in by.items()}
        writers = [(write, value, name) for name, value, write in self._places() if name in wanted]
        restores = [BufferCopies(self._module).restore]
        restores += [partial(write, value) for write, value, _ in writers]
        with sandbox(*restores):
            with torch.no_grad():
                for name, buffer in self._module.named_buffers():
                    if name in wanted:
                        buffer.copy_(wanted[name])
            for write, _, name in writers:
                write(wanted[name])
            yield

    def _places(self) -> Iterator[tuple[str, Any, Callable[[Any], None]]]:
        """Yield the name of each number, its value, and a function that writes it."""
        modules = [*self._module.named_modules()]
        for path, module in modules:
            yield from _numbers_of(module, f"{path}.".lstrip("."), OF_A_MODULE)
        yield from _numbers_of(self._task, "self.", OF_A_TASK)
        kinds = {
            base for each in (self._task, *dict(modules).values()) for base in type(each).__mro__
        }
        own = [kind for kind in kinds if is_own(kind)]
        for kind in own:
            yield from _numbers_of(kind, f"{kind.__name__}.", ())
        modules_of_own = [sys.modules[name] for name in {kind.__module__ for kind in own}]
        for each in modules_of_own:
            yield from _numbers_of(each, "", ())
        functions = [f for module in dict(modules).values() for f in functions_of(module)]
        functions += [f for each in map(vars, (*own, *modules_of_own)) for f in each.values()]
        for function in functions:
            if isinstance(function, FunctionType):
                yield from _numbers_in(function)
        for key, text in os.environ.items():
            if text.isdecimal():
                yield f"os.environ[{key!r}]", int(text), partial(_write_variable, key)


def _write_variable(key: str, count: int) -> None:
    os.environ[key] = str(count)


def _numbers_in(function: FunctionType) -> Iterator[tuple[str, Any, Any]]:
    """Yield the numbers in the closure of a function."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            value = cell.cell_contents
        except ValueError:  # empty
            continue
        if _is_number(value):
            yield f"{function.__qualname__}.{name}", value, partial(setattr, cell, "cell_contents")


def _write_count(owner: Any, key: str, count: int) -> None:
    setattr(owner, key, itertools.count(count))


def _numbers_of(owner: Any, prefix: str, left_out: Any) -> Iterator[tuple[str, Any, Any]]:
    for key, value in list(vars(owner).items()):
        if key in left_out or key.startswith("__"):
            continue
        if isinstance(value, list) and len(value) == 1 and _is_number(value[0]):
            yield f"{prefix}{key}", value[0], partial(value.__setitem__, 0)
        elif _is_number(value):
            yield f"{prefix}{key}", value, partial(setattr, owner, key)
        elif isinstance(value, itertools.count) and repr(value)[6:-1].isdecimal():
            yield f"{prefix}{key}", int(repr(value)[6:-1]), partial(_write_count, owner, key)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _list_steps(first: Mapping[str, Any], second: Mapping[str, Any]) -> Numbers:
    """Return the differences of the numbers that have changed."""
    steps = {}
    for name, value in second.items():
        before = first.get(name)
        if isinstance(value, torch.Tensor):
            is_number = value.dtype not in (torch.bool, torch.uint8)
            if is_number and before is not None and before.shape == value.shape:
                before = before.to(value)
                if not torch.equal(before, value):
                    steps[name] = value - before
        elif before is None or value != before:
            steps[name] = value - (before or 0)
    return steps


def _still(by: Numbers, first: Mapping[str, Any], second: Mapping[str, Any]) -> Numbers:
    """Return the steps between two passes of those that changed before, too."""
    return {name: step for name, step in _list_steps(first, second).items() if name in by}


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return bool(one == other)


def explain_counters(counters: Found, buffers: Container[str]) -> str:
    """Return the reason for numbers that each pass advances, and on which later passes depend."""
    if counted := [name for name in counters.names if name in buffers]:
        return explain_buffers(counted, can_rewind=counters.is_of_passes)
    why = f"depend on {', '.join(counters.names[:3])}, which each pass changes and no buffer holds"
    return f"model or loss {why}; make it a buffer, or a function of self.step"


SNAPSHOT_DEPTH = 3  # of containers, and of attributes of attributes
Snapshot = dict[str, Any]  # by the name of what holds the value


def take_snapshot(model: nn.Module, task: Any, has_private: bool = False) -> Snapshot:
    """Return copies of the attributes of a task and a model, and of the model's buffers.

    Attributes of a model that begin with _ are left out, unless it `has_private`.
    """
    return {
        name: copy_plain(value, SNAPSHOT_DEPTH) for name, value in _named(model, task, has_private)
    }


def _named(model: nn.Module, task: Any, has_private: bool) -> Iterator[tuple[str, Any]]:
    yield from of_model(model, has_private)
    yield from of_task(task)
    yield from model.named_buffers()


def find_different(one: Snapshot, other: Snapshot, limit: float) -> list[str]:
    """Return the names whose values differ by more than rounding."""
    return [name for name in one if name in other and _differ(one[name], other[name], limit)]


def digest_snapshot(snapshot: Snapshot) -> dict[str, float]:
    """Return a number for each name, the same for equal values."""
    return {name: _number(value) for name, value in snapshot.items()}


def find_unequal(ranks: Sequence[Mapping[str, float]], rank: int) -> list[str]:
    """Return the names whose values on a rank differ from those on rank 0, from their digests."""
    return [name for name, value in ranks[0].items() if ranks[rank].get(name) != value]


def copy_plain(value: Any, depth: int) -> Any:
    """Return a plain copy of a value; None for what cannot be compared."""
    if isinstance(value, torch.Tensor):
        is_readable = not value.is_meta and value.layout is torch.strided
        return value.detach().clone() if is_readable and value.nbytes <= MOST_BYTES else None
    if isinstance(value, numpy.ndarray):
        is_number = value.dtype.kind in "biuf" and value.nbytes <= MOST_BYTES
        return torch.from_numpy(numpy.array(value)) if is_number else None
    if isinstance(value, (bool, int, float, str)):
        return value
    if not depth:
        return None
    if isinstance(value, nn.Module):
        return {n: copy_plain(t, 1) for n, t in value.state_dict(keep_vars=True).items()}
    if isinstance(value, (list, tuple, deque)) and len(value) <= MOST_ITEMS:
        return [copy_plain(item, depth - 1) for item in value]
    if isinstance(value, Mapping) and len(value) <= MOST_ITEMS:
        return {str(key): copy_plain(item, depth - 1) for key, item in value.items()}
    is_own = isinstance(getattr(value, "__dict__", None), dict)
    if is_own and not type(value).__module__.startswith(("torch", "numpy", "trainer.")):
        return {key: copy_plain(item, depth - 1) for key, item in vars(value).items()}
    return None


def _differ(one: Any, other: Any, limit: float) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return not apart(one, other) <= limit
    if isinstance(one, list) and isinstance(other, list):
        pairs = zip(one, other, strict=False)
        return len(one) != len(other) or any(_differ(*pair, limit) for pair in pairs)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() != other.keys() or any(_differ(one[k], other[k], limit) for k in one)
    if isinstance(one, float) and isinstance(other, float):
        return relative(one, other, abs(other)) > limit
    return type(one) is not type(other) or bool(one != other)


def _number(value: Any) -> float:
    if isinstance(value, torch.Tensor):
        return digest(value)
    if isinstance(value, list):
        return sum((n + 1) * _number(item) for n, item in enumerate(value)) + len(value)
    if isinstance(value, dict):
        return sum((n + 1) * _number(item) for n, item in enumerate(value.values())) + len(value)
    if isinstance(value, (int, float)):
        return float(value) if math.isfinite(value) else -1.0
    return float(len(value)) if isinstance(value, str) else 0.0
