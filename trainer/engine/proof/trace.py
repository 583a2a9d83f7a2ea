"""Trace: what each module of a model got, returned and drew in a pass, to find where two differ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from trainer.rng.forward import Draws
from trainer.rng.philox import coins
from trainer.rng.rehearsals import Draw
from trainer.strategy.mesh_model.mesh_proof import apart

Key = tuple[str, int]  # a module's name, and the number of its call


@dataclass
class Call:
    """One call of a module. `drawn` are its draws, `is_raw` if it used torch's generator itself."""

    module: nn.Module
    inputs: list[torch.Tensor]
    outputs: list[torch.Tensor]
    positions: tuple[int, int]  # numbers of draws before and after
    drawn: list[Draw]
    is_raw: bool
    has_coins: bool  # drew from numpy's or Python's generator


class CallTrace:
    """A context that records the calls of a model's modules, in the order in which they end."""

    def __init__(self, module: nn.Module, draws: Draws, rows: int):
        self.rows = rows
        self.calls: dict[Key, Call] = {}
        self.drawn: list[Draw] = []
        self._module = module
        self._draws = draws
        self._open: list[tuple[Any, ...]] = []
        self._counts: dict[str, int] = {}

    def __enter__(self) -> CallTrace:
        self._hooks: list[Any] = []
        self._noting = self._draws.rehearsals.noting()
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
        for hook in self._hooks:
            hook.remove()
        self._noting.__exit__(None, None, None)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs = _tensors((args, kwargs))
        self._open.append((inputs, self._draws.position(), len(self.drawn), _generator(), coins()))

    def _leave(self, name: str, module: nn.Module, outputs: Any) -> None:
        inputs, position, drawn, before, of_coins = self._open.pop()
        number = self._counts.get(name, 0)
        self._counts[name] = number + 1
        seed, state = _generator()
        is_raw = seed == before[0] and not torch.equal(state, before[1])
        positions = (position, self._draws.position())
        drawn_here = self.drawn[drawn:]
        has_coins = coins() != of_coins
        self.calls[name, number] = Call(
            module, inputs, _tensors(outputs), positions, drawn_here, is_raw, has_coins
        )


def _generator() -> tuple[int, torch.Tensor]:
    generator = torch.default_generator
    return generator.initial_seed(), generator.get_state()


def _tensors(tree: Any) -> list[torch.Tensor]:
    leaves = tree_leaves(tree)
    return [leaf.detach() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def find_module(
    whole: CallTrace, parts: Sequence[CallTrace], limit: float
) -> tuple[Key, Call] | None:
    """Return the innermost module whose calls differ although they got the same.

    `parts` are traces of the same rows in parts; one trace is of the same rows again.
    """
    for key, call in whole.calls.items():
        others = [part.calls.get(key) for part in parts]
        found = [other for other in others if other is not None]
        if len(found) < len(parts):
            continue
        if not _agree(call.inputs, [each.inputs for each in found], limit):
            continue
        starts = all(each.positions[0] == call.positions[0] for each in found)
        ends = all(each.positions[1] == call.positions[1] for each in found)
        if (starts and not ends) or not _agree(
            call.outputs, [each.outputs for each in found], limit
        ):
            return key, call
    return None


def describe(key: Key, call: Call) -> str:
    """Return the name of the called module, and its class."""
    kind = type(call.module).__name__
    return f"{key[0]} ({kind})" if key[0] else f"the model ({kind})"


def _agree(
    whole: Sequence[torch.Tensor], parts: Sequence[Sequence[torch.Tensor]], limit: float
) -> bool:
    if any(len(part) != len(whole) for part in parts):
        return True  # such as a list with an entry for each row: nothing to compare
    rows = zip(whole, *parts, strict=True)
    return all(_is_close(one, others, limit) for one, *others in rows)


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
