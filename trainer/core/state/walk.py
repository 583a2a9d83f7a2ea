"""One walk over Python values: what each is made of, to a depth. A subclass says what it makes.

`Keeper` in sandbox.py undoes changes; the startup checks copy values, and mark them.
"""

from __future__ import annotations

import copy
import itertools
import math
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import suppress
from functools import cache, partial
from itertools import islice
from operator import length_hint
from types import GeneratorType, ModuleType
from typing import Any, Generic, TypeVar

import numpy
import torch
from torch import nn
from torch.optim import Optimizer

DEPTH = 4  # of containers and objects in each other
MOST_BYTES = 2**24  # of a tensor or an array that is read
MOST_ITEMS = 1000  # of a container
PLAIN = (bool, int, float, complex, str, bytes, type(None))
# not any mapping: to read or refill one may be to read or write a file, as with shelve
CONTAINERS = (list, tuple, deque, set, frozenset, dict)
OF_A_MODULE = {*vars(nn.Module()), "_compiled_call_impl"}
_NOTEBOOK = ("IPython", "ipykernel", "traitlets")  # which other threads change
# packages whose objects are not looked into
_CLOSED = ("torch", "numpy", "trainer.", "builtins", "collections", "threading", "_", *_NOTEBOOK)
_EXAMPLES: tuple[Iterable[Any], ...] = ([], (), "", b"", range(0), range(2**70))
_OF_CONTAINERS: tuple[type, ...] = tuple(type(iter(each)) for each in _EXAMPLES)
_ITERATORS = (*_OF_CONTAINERS, itertools.count, itertools.cycle)

T = TypeVar("T")
Restore = Callable[[], Any]  # puts something back
Parts = list[tuple[Any, T]]  # what a walk made of the parts of a value, by their keys


class Walk(Generic[T]):
    """A walk over values, `constant` ones apart."""

    samples = False  # looks at the first items of a container with more than MOST_ITEMS
    repeats = True  # looks again into what is met a second time, outside of itself
    most_values = math.inf  # that are visited from one `begin` on

    def __init__(self, constant: Iterable[object] = ()):
        self._constant = {id(each) for each in constant}
        self._seen: set[int] = set()
        self._left = self.most_values

    def begin(self, value: Any) -> T:
        """Visit a value as the first one."""
        self._seen.clear()
        self._left = self.most_values
        return self.visit(value)

    def plain(self, value: Any) -> T:
        """Make something of a number, a string, None, or a scalar of numpy's as Python's."""
        raise NotImplementedError

    def closed(self, value: Any) -> T:
        """Make something of what is not looked into: too deep or large, a class, a library's."""
        raise NotImplementedError

    def tensor(self, value: torch.Tensor) -> T:
        raise NotImplementedError

    def array(self, value: numpy.ndarray) -> T:
        raise NotImplementedError

    def position(self, state: Any, restore: Restore | None) -> T:
        """Make something of a generator of numbers, an iterator or a generator.

        `state` says where it is, and can be compared; `restore` puts it back there. An iterator has
        none: `copy_iterator` copies it before it goes on.
        """
        raise NotImplementedError

    def container(self, value: Any, parts: Parts[T]) -> T:
        raise NotImplementedError

    def owner(self, value: Any, parts: Parts[T]) -> T:
        """Make something of an object, a module or an optimizer, whose parts are attributes."""
        raise NotImplementedError

    def enters(self, kind: type) -> bool:
        """Return True if objects of a class are looked into."""
        return kind.__module__ == "__main__" or not kind.__module__.startswith(_CLOSED)

    def visit(self, value: Any, depth: int = DEPTH) -> T:
        self._left -= 1
        if isinstance(value, numpy.generic):
            return self.plain(value.item())
        if isinstance(value, PLAIN):
            return self.plain(value)
        is_met = id(value) in self._constant or id(value) in self._seen
        if is_met or depth < 0 or self._left < 0 or isinstance(value, (type, ModuleType)):
            return self.closed(value)
        self._seen.add(id(value))
        try:
            return self._visit_parts(value, depth)
        finally:
            if self.repeats:
                self._seen.discard(id(value))

    def _visit_parts(self, value: Any, depth: int) -> T:
        if isinstance(value, torch.Tensor):
            return self.tensor(value)
        if isinstance(value, numpy.ndarray):
            return self.array(value)
        if (position := position_of(value)) is not None:
            return self.position(*position)
        if isinstance(value, CONTAINERS):
            return self._visit_container(value, depth)
        if isinstance(value, Optimizer):
            return self.owner(value, [*self._parts_of_optimizer(value, depth)])
        is_entered = isinstance(value, nn.Module) or self.enters(type(value))
        # that of dict[str, int], a type in a variable, is the one of dict, which cannot be written
        if is_entered and (isinstance(getattr(value, "__dict__", None), dict) or slots_of(value)):
            return self.owner(value, [*self._parts_of_owner(value, depth)])
        return self.closed(value)

    def _visit_container(self, value: Any, depth: int, most: float = MOST_ITEMS) -> T:
        is_namespace = isinstance(value, dict) and "__spec__" in value  # without builtins all ends
        if is_namespace or (len(value) > most and not self.samples):
            return self.closed(value)
        every = value.items() if isinstance(value, dict) else enumerate(value)
        items = islice(every, min(len(value), MOST_ITEMS) if self.samples else None)
        return self.container(value, [(key, self.visit(each, depth - 1)) for key, each in items])

    def _parts_of_owner(self, value: Any, depth: int) -> Iterator[tuple[Any, T]]:
        """Yield attributes; of a module also its tensors and the modules in it, as deep as it."""
        for key, each in attributes_of(value):
            yield key, self.visit(each, depth - 1)
        if isinstance(value, nn.Module):
            for key, tensor in (*value._parameters.items(), *value._buffers.items()):
                yield key, self.visit(tensor, depth)
            for key, module in value._modules.items():
                yield key, self.visit(module, depth)

    def _parts_of_optimizer(self, value: Optimizer, depth: int) -> Iterator[tuple[Any, T]]:
        """Yield the state of all parameters, options, parameters and attributes."""
        yield "state", self._visit_container(value.state, DEPTH, math.inf)
        for group in value.param_groups:
            yield "param_groups", self._visit_container(group, 1)
            yield from (("params", self.visit(parameter, 0)) for parameter in group["params"])
        for key, each in attributes_of(value):
            yield key, self.visit(each, depth - 1)


def left_out_of(value: Any) -> Set[str]:
    """Return the attributes that torch itself gives a module or an optimizer."""
    if isinstance(value, nn.Module):
        return OF_A_MODULE
    return of_an_optimizer() if isinstance(value, Optimizer) else frozenset()


def attributes_of(value: Any) -> list[tuple[str, Any]]:
    """Return an object's attributes, without those that torch gives a module or an optimizer."""
    left_out = left_out_of(value)
    pairs = [*slots_of(value).items(), *getattr(value, "__dict__", {}).items()]
    return [(key, each) for key, each in pairs if key not in left_out]


def slots_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object that its classes name in `__slots__`."""
    every = [vars(kind).get("__slots__", ()) for kind in type(value).__mro__]
    names = [n for slots in every for n in ([slots] if isinstance(slots, str) else slots)]
    return {n: getattr(value, n) for n in names if n[:2] != "__" and hasattr(value, n)}


@cache
def of_an_optimizer() -> set[str]:
    """Return the attributes that torch itself gives an optimizer.

    The first optimizer of a process imports torch._dynamo, 0.9 s, which a run of `use` never needs.
    """
    return {
        *vars(torch.optim.SGD([torch.zeros(1)])),
        *("grad_scale", "found_inf", "_opt_called", "_step_count", "_numel_cache"),
        *("_need_device_dtype_check_for_fused", "_step_supports_amp_scaling"),
    }


def position_of(value: Any) -> tuple[Any, Restore | None] | None:
    """Return the arguments of `Walk.position`; None for other values."""
    if isinstance(value, torch.Generator):
        state = value.get_state()
        return state.numpy().tobytes(), partial(value.set_state, state)
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        own = value.getstate()
        return own, partial(value.setstate, own)
    if isinstance(value, numpy.random.Generator):
        bits = value.bit_generator
        return str(bits.state), partial(setattr, bits, "state", bits.state)
    if isinstance(value, numpy.random.RandomState):
        held = value.get_state(legacy=False)
        return str(held), partial(value.set_state, held)
    if isinstance(value, _ITERATORS):
        return (repr(value), length_hint(value, -1)), None
    if isinstance(value, GeneratorType):
        return repr(place_of(value)), None  # None at its end
    return None


def copy_iterator(value: Any) -> Any:
    """Return a copy of an iterator that goes on from the same place, or the value itself.

    Of a cycle only if it goes over a container: a copy would share any other iterator.
    """
    if not isinstance(value, _ITERATORS):
        return value
    with warnings.catch_warnings(), suppress(Exception):  # Python 3.14 copies no itertools
        warnings.simplefilter("ignore", DeprecationWarning)  # of itertools, from Python 3.12 on
        if not isinstance(value, itertools.cycle):
            return copy.copy(value)
        parts: Any = value.__reduce__()
        _, (inner,), (saved, is_saved) = parts
        if isinstance(inner, _OF_CONTAINERS):
            again: Any = copy.copy(inner)
            copied: Any = itertools.cycle(again)
            copied.__setstate__((list(saved), is_saved))
            return copied
    return value


def place_of(generator: GeneratorType) -> Any:
    """Return the instruction at which a generator waits, with its plain variables."""
    frame = generator.gi_frame
    if frame is None:
        return None
    return frame.f_lasti, {k: v for k, v in frame.f_locals.items() if isinstance(v, (int, str))}
