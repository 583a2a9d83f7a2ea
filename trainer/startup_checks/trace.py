"""Trace: what each module of a model got, returned and drew in a pass, to find where two differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from trainer.base.errors import ConfigError
from trainer.base.same.distance import apart
from trainer.core.rng import global_rngs
from trainer.core.rng.draw_traces import Draw
from trainer.core.rng.forward import ExampleRng


def _refuse(*_: Any, **__: Any) -> Any:
    raise RuntimeError("a gradient through the rows of all ranks is not tried in parts")


class Gathering:
    """The tensors that the losses of a pass's micro-batches gather.

    A loss runs twice: first to know its tensors, then with those of all micro-batches joined.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.is_used = False  # by the loss, in a pass over whole rows
        self._number = 0  # of the micro-batch
        self._given: list[list[torch.Tensor]] = []
        self._is_joined = False
        self._call = 0

    @contextmanager
    def over(self, count: int) -> Iterator[Gathering]:
        """Gather over so many micro-batches in the block."""
        self.is_on = True
        if count == 1:
            self.is_used = False
        self._given = [[] for _ in range(count)]
        self._is_joined = False
        try:
            yield self
        finally:
            self.is_on = False
            self._given = []

    def begin(self, batch_number: int) -> None:
        """Begin the loss of a micro-batch."""
        self._number = batch_number
        self._call = 0

    def join(self) -> None:
        """Return joined rows from now on."""
        self._is_joined = True

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Refuse gradients in a loss: those through the rows of other ranks are sums over ranks."""
        original_grad = torch.autograd.grad
        torch.autograd.grad = _refuse
        try:
            yield
        finally:
            torch.autograd.grad = original_grad

    def take_if_on(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the rows of all micro-batches in a pass over several, else those of this one."""
        return self.take(tensor) if self.is_on else (tensor, 0)

    def take(self, tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
        """Return the rows of all micro-batches, and the number of the first one of this one."""
        self.is_used = True
        if not self._is_joined:
            self._given[self._number].append(tensor)
            return tensor, 0
        every = [tensors[self._call] for tensors in self._given]
        every[self._number] = tensor
        self._call += 1
        return torch.cat(every), sum(map(len, every[: self._number]))


Tensors = dict[str, torch.Tensor]  # by their places in what a call gets or returns
Key = tuple[str, int]  # a module's name, and the number of its call
LOSS_NAME = "the loss"  # in place of a module's name


@dataclass
class Call:
    """One call of a module, or of the loss, which is None.

    `drawn` are its draws, `is_raw` if it used torch's generator itself.
    """

    module: nn.Module | None
    inputs: Tensors
    outputs: Tensors
    positions: tuple[int, int]  # numbers of draws before and after
    drawn: list[Draw]
    is_raw: bool
    has_global_draws: bool  # drew from numpy's or Python's generator


class CallTrace:
    """A context that records the calls of a model's modules, in the order in which they end."""

    def __init__(self, module: nn.Module, draws: ExampleRng, rows: int):
        self.rows = rows
        self.calls: dict[Key, Call] = {}
        self.drawn: list[Draw] = []
        self._module = module
        self._draws = draws
        self._open: list[tuple[Any, ...]] = []
        self._counts: dict[str, int] = {}
        self._is_entered = False

    def __enter__(self) -> CallTrace:
        self._hooks: list[Any] = []
        self._is_entered = True
        self._noting = self._draws.traces.noting()
        self.drawn = self._noting.__enter__()
        for name, module in self._module.named_modules():
            if isinstance(module, torch.jit.ScriptModule):  # takes no hooks
                continue
            self._hooks.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))

            def leave(
                module: nn.Module, args: Any, kwargs: Any, outputs: Any, name: str = name
            ) -> None:
                self._leave(name, module, outputs)

            self._hooks.append(module.register_forward_hook(leave, with_kwargs=True))
        return self

    def __exit__(self, *error: object) -> None:
        self._is_entered = False
        for hook in self._hooks:
            hook.remove()
        self._noting.__exit__(None, None, None)

    def of_loss(self, loss: Callable[[Any, Any], Any], outputs: Any, targets: Any) -> Any:
        """Return the values of the loss, and record its call if the trace is entered."""
        if not self._is_entered:
            return loss(outputs, targets)
        self._enter(None, (outputs, targets), {})
        returned = loss(outputs, targets)
        self._leave(LOSS_NAME, None, returned)
        return returned

    def _enter(self, module: nn.Module | None, args: Any, kwargs: Any) -> None:
        inputs = _tensors((args, kwargs))
        self._open.append((inputs, self._position(), len(self.drawn), _generator(), global_rngs()))

    def _leave(self, name: str, module: nn.Module | None, outputs: Any) -> None:
        inputs, position, drawn, before, of_global_rngs = self._open.pop()
        call_number = self._counts.get(name, 0)
        self._counts[name] = call_number + 1
        seed, state = _generator()
        is_raw = seed == before[0] and not torch.equal(state, before[1])
        positions = (position, self._position())
        drawn_here = self.drawn[drawn:]
        has_global_draws = global_rngs() != of_global_rngs
        self.calls[name, call_number] = Call(
            module, inputs, _tensors(outputs), positions, drawn_here, is_raw, has_global_draws
        )

    def _position(self) -> int:
        """Return the number of draws so far; -1 once a model has seeded torch itself."""
        try:
            return self._draws.position()
        except ConfigError:
            return -1


def _generator() -> tuple[int, torch.Tensor]:
    generator = torch.default_generator
    return generator.initial_seed(), generator.get_state()


def _tensors(tree: Any) -> Tensors:
    """Return copies: a later module may change a tensor in place, and would blame this one.

    The name of an item of a list has an index.
    """
    named = tree.items() if isinstance(tree, Mapping) else [("", tree)]
    tensors = {}
    for key, value in named:
        for index, leaf in enumerate(tree_leaves(value)):
            if isinstance(leaf, torch.Tensor):
                name = str(key) if value is leaf else f"{key}[{index}]"
                tensors[name] = leaf.detach().clone()
    return tensors


def find_module(
    whole: CallTrace, parts: Sequence[CallTrace], limit: float
) -> tuple[Key, Call] | None:
    """Return the innermost module whose calls differ although they got the same.

    `parts` are traces of the same rows in parts; one trace is of the same rows again.
    """
    for key, call in whole.calls.items():
        others = [part.calls.get(key) for part in parts]
        counterparts = [other for other in others if other is not None]
        if len(counterparts) < len(parts):
            continue
        if not _agree(call.inputs, [each.inputs for each in counterparts], limit):
            continue
        starts = all(each.positions[0] == call.positions[0] for each in counterparts)
        ends = all(each.positions[1] == call.positions[1] for each in counterparts)
        if (starts and not ends) or not _agree(
            call.outputs, [each.outputs for each in counterparts], limit
        ):
            return key, call
    return None


def differs_alone(key: Key, call: Call, first: CallTrace, limit: float) -> bool:
    """Return True if a call gives the rows of the first part other results than in the whole.

    No part comes before the first one, so no state that another left can be the reason.
    """
    other = first.calls[key]
    for name, output in call.outputs.items():
        own = other.outputs.get(name)
        has_rows = own is not None and own.dim() and len(own) == first.rows
        if own is not None and has_rows and apart(output[: first.rows], own) > limit:
            return True
    return False


def describe(key: Key, call: Call) -> str:
    """Return the name of the called module, and its class."""
    if call.module is None:
        return LOSS_NAME
    kind = type(call.module).__name__
    return f"{key[0]} ({kind})" if key[0] else f"the model ({kind})"


def _agree(whole: Tensors, parts: Sequence[Tensors], limit: float) -> bool:
    names = list(whole)
    if any(part.keys() != whole.keys() for part in parts):
        # such as a list with an entry for each row, or for each layer that was not dropped
        names = [n for n in names if "[" not in n and all(n in part for part in parts)]
    return all(_is_close(whole[name], [part[name] for part in parts], limit) for name in names)


def _is_close(whole: torch.Tensor, parts: Sequence[torch.Tensor], limit: float) -> bool:
    """Compare a tensor with those of its parts, joined along the axis that grows with the rows."""
    if any(part.dim() != whole.dim() or part.dtype != whole.dtype for part in parts):
        return True
    for axis in range(whole.dim()):
        sizes = [part.shape[axis] for part in parts]
        rest = {(*part.shape[:axis], *part.shape[axis + 1 :]) for part in [whole, *parts]}
        if sum(sizes) == whole.shape[axis] and len(rest) == 1:
            return apart(whole, torch.cat(list(parts), axis)) <= limit
    if all(part.shape == whole.shape for part in parts):
        return all(apart(one, other) <= limit for one, other in pairwise([whole, *parts]))
    return True
