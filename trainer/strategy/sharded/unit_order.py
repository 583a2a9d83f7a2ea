"""The order in which ranks run the units of a sharded model: each rank must run the same ones.

A rank gathers a unit together with the others. If their rows use different units, FSDP2 joins parts
of different ones in silence, or gloo ends the process (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.distributed.world import RankGroup
from trainer.errors import ConfigError

END = -1  # of a forward pass


class UnitOrder:
    """Checks, before a unit is gathered, that all ranks run it next.

    Ranks agree on each unit that follows others for the first time, and on each new end of a
    forward pass. So later steps have nothing to exchange. A rank that then takes a new path alone
    waits in vain, for half of the time that the others wait in the collective.
    """

    def __init__(self, axis: RankGroup):
        """Open a process group for the agreements. A collective."""
        limit = None if axis.timeout is None else axis.timeout / 2
        words: Any = {"timeout": limit, "backend": "gloo", "use_local_synchronization": True}
        self._is_paused = False
        self._group: Any = dist.new_group(list(axis.ranks), **words)
        self._names: Mapping[nn.Module, str] = {}
        self._units: list[nn.Module] = []
        self._paths: dict[bool, dict[int, Any]] = {True: {}, False: {}}  # of training, evaluation
        self._outside: dict[int, Any] = {}  # units that are called alone, not by the root
        self._path = self._outside

    def watch(self, units: Sequence[nn.Module], names: Mapping[nn.Module, str]) -> None:
        """Watch units that FSDP2 has taken. The last one is the root, which has the rest."""
        self._names = names
        *self._units, root = units
        for number, unit in enumerate(self._units):
            hook = partial(self._enter, number)
            unit.register_forward_pre_hook(hook, prepend=True)  # before FSDP2's
        root.register_forward_pre_hook(self._begin_pass, prepend=True)
        root.register_forward_hook(self._end_pass)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Check nothing during the block, in which no unit communicates."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    def end(self) -> None:
        """Let go of the process group."""
        self._group = None

    def _begin_pass(self, root: nn.Module, *_: Any) -> None:
        self._path = self._paths[root.training]

    def _end_pass(self, root: nn.Module, *_: Any) -> None:
        self._enter(END)
        self._path = self._outside

    def _enter(self, unit: int, *_: Any) -> None:
        is_backward = torch._C._current_graph_task_id() != -1  # a recomputation gathers nothing
        if self._group is None or self._is_paused or is_backward:
            return
        if unit not in self._path:
            self._agree(unit)
        following = self._path.setdefault(unit, {})
        if self._path is not self._outside:
            self._path = following

    def _agree(self, unit: int) -> None:
        ends = torch.tensor([unit, -unit])
        try:
            dist.all_reduce(ends, dist.ReduceOp.MAX, group=self._group)
            others = "another rank does not"
        except RuntimeError as error:
            if "imed out" not in str(error):
                raise  # another rank has exited
            ends[1] = -unit - 1
            others = "the other ranks do not"
        if ends[0] != -ends[1]:
            why = f"rank {dist.get_rank()} {self._name(unit)} where {others}"
            must = "each rank must run the same blocks in the same order"
            advice = "return larger blocks, such as whole layers, or use strategy=ddp"
            raise ConfigError(f"blocks(model): {why}; {must}: {advice}")

    def _name(self, unit: int) -> str:
        if unit == END:
            return "ends a forward pass"
        return f"runs {self._names.get(self._units[unit], 'a block')}"
