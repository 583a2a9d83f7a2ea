"""Numbers that each pass changes, in a task, a model and around them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer.core.state.sandbox import BufferCopies, keep_attributes, sandbox
from trainer.startup_checks.explanations import explain_buffers
from trainer.startup_checks.mismatch import compare
from trainer.startup_checks.passes import PassResult
from trainer.startup_checks.snapshots import scopes_of

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
        if not (by := _list_increments(first, second)):
            return Found()
        with sandbox(keep_attributes(self._module, self._task)):
            return self._try_ahead(passes, second, by)

    def have_advanced(self) -> bool:
        return bool(_list_increments(self._before, self._read()))

    def _try_ahead(self, passes: CounterPasses, second: Numbers, by: Numbers) -> Found:
        """Run passes with the counters that a first pass advanced `by` steps at other numbers."""
        try:
            third = self._pass_from(second, by, passes.run)
            by = _increments_in_both(by, second, third)
            for factor in FACTORS if by else ():
                with self._ahead(third, by, factor):
                    mismatch = compare(passes.whole, passes.run(), passes.limit)
                if mismatch is not None and mismatch.kind in RESULT_KINDS:
                    fewer = _list_increments(second, self._pass_from(second, by, passes.run_few))
                    return Found([*by], all(_is_same(fewer.get(name), by[name]) for name in by))
        except Exception:  # such as a counter that is the index of a table
            return Found()
        return Found()

    def repeat(self, run: Callable[[], Any]) -> Iterator[Any]:
        """Yield the result of a call, and if it counts, those after 10, 100 and 1,000 more."""
        first = self._read()
        yield run()
        second = self._read()
        if not (by := _list_increments(first, second)):
            return
        run()
        third = self._read()
        by = _increments_in_both(by, second, third)
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
        for scope in scopes_of(self._module, self._task):
            for key, value in scope.items():
                name, write = scope.naming.format(key), partial(scope.variables.__setitem__, key)
                if isinstance(value, list) and len(value) == 1 and _is_number(value[0]):
                    yield name, value[0], partial(value.__setitem__, 0)
                elif _is_number(value):
                    yield name, value, write
                elif isinstance(value, itertools.count) and repr(value)[6:-1].isdecimal():
                    yield name, int(repr(value)[6:-1]), _writing(write, itertools.count)
                elif scope.variables is os.environ and value.isdecimal():
                    yield name, int(value), _writing(write, str)


def _writing(write: Callable[[Any], None], kind: Callable[[int], Any]) -> Callable[[int], None]:
    return lambda number: write(kind(number))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _list_increments(first: Mapping[str, Any], second: Mapping[str, Any]) -> Numbers:
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


def _increments_in_both(
    by: Numbers, first: Mapping[str, Any], second: Mapping[str, Any]
) -> Numbers:
    """Return the steps between two passes of those that changed before, too."""
    return {name: step for name, step in _list_increments(first, second).items() if name in by}


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
