"""Sharding: parameters, gradients and optimizer state divided over ranks by torch's FSDP2.

ZeRO-3 (Rajbhandari et al., arXiv:1910.02054), and HSDP with copies (Zhao et al., arXiv:2304.11277).
Before a unit's forward and backward its parameters are gathered, and its gradients are summed into
the shards. A *unit* is a block of the task; the rest of the model is one unit more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from trainer.distributed.world import RankGroup
from trainer.strategy.sharded.freed_memory import outputs_checked, parameter_groups
from trainer.strategy.sharded.unit_order import UnitOrder


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
        given = groups if self._has_copies else groups[0]
        self._mesh = DeviceMesh.from_group(given, device, mesh=ranks, mesh_dim_names=names)

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
