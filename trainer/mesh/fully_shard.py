"""Sharding: parameters, gradients and optimizer state divided over ranks by torch's FSDP2.

ZeRO-3 (Rajbhandari et al., arXiv:1910.02054), and HSDP with copies (Zhao et al., arXiv:2304.11277).
Before a unit's forward and backward its parameters are gathered, and its gradients are summed into
the shards. A *unit* is a block of the task; the rest of the model is one unit more.

Two things are looked after that torch 2.13 does not check. Ranks must run the same units in the
same order: else FSDP2 joins parts of different ones in silence, or gloo ends the process. And an
output may share the memory of a parameter, which is freed after forward: reading it ended all ranks
with SIGSEGV.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._pytree import tree_leaves

from trainer.base.errors import ConfigError
from trainer.core.distributed.world import RankGroup
from trainer.core.strategy.modules.dry_run import hooked

CLONE_ADVICE = "return .clone() of it"


def is_freed(tensor: torch.Tensor) -> bool:
    """Return True for a tensor with elements whose memory was freed."""
    has_memory = not tensor.is_meta and torch._C._has_storage(tensor)
    return bool(has_memory and tensor.numel() and not tensor.untyped_storage().nbytes())


def gathered_parameters(unit: Any) -> Iterator[Any]:
    """Yield what FSDP2 keeps for each parameter of a unit."""
    for group in parameter_groups(unit):
        yield from group.fsdp_params


def parameter_groups(unit: Any) -> Iterator[Any]:
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    yield from filter(None, groups)


@contextmanager
def outputs_checked(
    units: Iterable[nn.Module], modules: Mapping[nn.Module, str], names: Mapping[torch.Tensor, str]
) -> Iterator[None]:
    """Raise ConfigError in the block for an output of a unit that is a part of its parameters.

    `modules` and `names` are the names of modules and of sharded parameters.
    """

    def check(unit: nn.Module, _: Any, output: Any) -> None:
        for leaf in tree_leaves(output):
            if isinstance(leaf, torch.Tensor) and is_freed(leaf):
                of = _find_parameter(unit, leaf, names)
                raise ConfigError(f"""strategy.mesh:
                    the output of {modules.get(unit) or "the model"} shares memory with {of}, which
                    fsdp frees after the forward pass; {CLONE_ADVICE}""")

    with hooked(unit.register_forward_hook(check) for unit in units):  # after FSDP2's
        yield


def _find_parameter(unit: nn.Module, leaf: torch.Tensor, names: Mapping[torch.Tensor, str]) -> str:
    memory = leaf.untyped_storage()._cdata
    for each in gathered_parameters(unit):
        whole = getattr(each, "_unsharded_param", None)
        if whole is not None and whole.untyped_storage()._cdata == memory:
            return f"the parameter {names.get(each.sharded_param, '')}".rstrip()
    return "a parameter"


END_OF_PASS = -1  # of a forward pass


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
        for index, unit in enumerate(self._units):
            hook = partial(self._enter, index)
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
        self._enter(END_OF_PASS)
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
            raise ConfigError(f"""blocks(model): rank {dist.get_rank()} {self._name(unit)}
                where {others}; each rank must run the same blocks in the same order:
                return larger blocks, such as whole layers, or use strategy=ddp""")

    def _name(self, unit: int) -> str:
        if unit == END_OF_PASS:
            return "ends a forward pass"
        return f"runs {self._names.get(self._units[unit], 'a block')}"


class Sharding:
    """The units of a model. Gradients are sums, not means: over gloo a factor on reductions fails
    in 32 bits and less."""

    def __init__(self, divided: RankGroup, copies: RankGroup, device: str, reshard: bool):
        """`divided` are the ranks that divide a copy, `copies` those with the same part."""
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.tensor import DTensor

        self.group = divided
        self._dtensor: type = DTensor
        self._has_copies = copies.size > 1
        self._reshard = reshard
        self._units: list[Any] = []
        self._names: Mapping[nn.Module, str] = {}
        self._checked: set[bool] = set()  # modes in which the outputs were checked
        self._order = UnitOrder(divided)
        axes = (copies, divided) if self._has_copies else (divided,)
        names = ("replicate", "shard")[-len(axes) :]
        ranks = torch.tensor(divided.ranks)
        if self._has_copies:
            own = copies.ranks[copies.rank]
            ranks = torch.stack([ranks - own + other for other in copies.ranks])
        groups = [axis.group for axis in axes]
        mesh_groups = groups if self._has_copies else groups[0]
        self._mesh = DeviceMesh.from_group(mesh_groups, device, mesh=ranks, mesh_dim_names=names)

    def add(self, unit: nn.Module) -> None:
        """Divide the parameters of a unit that no inner unit has. The root is the last one."""
        from torch.distributed.fsdp import fully_shard

        # FSDP does not take scalars, and other ranks have what is on the meta device
        left_out = {p for p in unit.parameters() if not p.dim() or p.is_meta}
        fully_shard(
            unit, mesh=self._mesh, reshard_after_forward=self._reshard, ignored_params=left_out
        )
        self._units.append(unit)

    def close(self, names: Mapping[nn.Module, str]) -> None:
        """Set what all units share, after the last one is added; `names` are for messages."""
        self._names = names
        self._order.watch(self._units, names)
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)

    def fill_unused(self, note: Callable[[torch.Tensor], None]) -> None:
        """Give a parameter that a backward pass does not reach zeros as gradient, and call `note`.

        FSDP2 would leave it out of the sum, whose size would then differ between the ranks: over
        gloo one of them ended with SIGABRT (torch 2.13).
        """
        for unit in self._units:
            for group in parameter_groups(unit):
                group.post_backward = partial(_fill, group, group.post_backward, note)

    @contextmanager
    def outputs_checked(self, module: nn.Module) -> Iterator[None]:
        """Raise ConfigError in the block for an output that is a part of a gathered parameter.

        In the first such block in training, and in the first one in evaluation.
        """
        if module.training in self._checked:
            yield
            return
        names: dict[torch.Tensor, str] = {p: name for name, p in module.named_parameters()}
        with outputs_checked(self._units, self._names, names):
            yield
        self._checked.add(module.training)

    def end(self) -> None:
        """Let go of the process groups: torch's cached specs of DTensors keep the mesh.

        torch 2.12 has more caches of specs than its function clears.
        """
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        self._order.end()
        _clear_sharding_prop_cache()
        getattr(self._mesh, "_pg_registry", {}).clear()

    def __len__(self) -> int:
        return len(self._units)

    def divides(self, parameter: torch.Tensor) -> bool:
        return isinstance(parameter, self._dtensor)

    def begin_backward(self, is_last: bool) -> None:
        """Tell the units whether the next backward pass is the last one of a step."""
        root = self._units[-1]
        root.set_is_last_backward(is_last)
        if self._has_copies:
            root.set_requires_all_reduce(is_last)

    def refresh(self) -> None:
        """Free the gathered parameters."""
        for unit in self._units:
            unit.reshard()

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather the model on each rank, so that no forward or backward pass communicates."""
        self.refresh()
        for unit in self._units:
            unit.set_requires_gradient_sync(False, recurse=False)
            unit.set_reshard_after_forward(False, recurse=False)
            unit.set_reshard_after_backward(False, recurse=False)
            unit.unshard()
        try:
            with self._order.paused():
                yield
        finally:
            for unit in self._units:
                unit.set_requires_gradient_sync(True, recurse=False)
                unit.set_reshard_after_forward(self._reshard, recurse=False)
                unit.set_reshard_after_backward(True, recurse=False)
            self.refresh()


def _fill(
    group: Any, reduce: Callable[[], None], note: Callable[[torch.Tensor], None], *_: Any
) -> None:
    for each in group.fsdp_params if group.reduce_grads else ():
        whole = getattr(each, "_unsharded_param", None)
        if whole is None or not whole.requires_grad or whole.grad is not None:
            continue
        if each.unsharded_accumulated_grad is None:
            note(each.sharded_param)
            whole.grad = torch.zeros_like(whole)
    reduce()
