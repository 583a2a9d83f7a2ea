"""The tensors of a divided model, and checks that a model can be divided.

These are plain tensors that share memory with the model's: on 69 parameters they are 3 to 16 times
as fast as DTensors.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trainer.base.errors import ConfigError
from trainer.core.distributed.group import Group
from trainer.core.distributed.world import World
from trainer.core.strategy.mesh_sizes import SHARDED, Mesh, open_group
from trainer.core.strategy.modules.dry_run import changed_buffers
from trainer.core.strategy.optimizer_trial import check_hooks, check_independence, is_elementwise
from trainer.core.strategy.tensor_shards import (
    Shard,
    TensorSource,
    check_model,
    non_persistent,
    read_into,
    tensors_of,
)
from trainer.core.strategy.tensors import Tensors, join_states
from trainer.mesh.assemble import PartitionedModel
from trainer.mesh.full_model import copy_modules, reunite
from trainer.mesh.gradient_sums import GradientSums
from trainer.mesh.owned_optimizer import OwnedOptimizer

ROUNDING_OF_COPIES = 1e-2  # a smaller relative difference of the gradients of copies is rounding


@torch.no_grad()
def check_copies(tensors: DividedTensors, sums: GradientSums, world: World) -> None:
    """Raise ConfigError if the ranks of the tensor axis find other gradients of a whole parameter.

    Such a parameter is between a layer of columns and one of rows: each rank uses it on the outputs
    of its own columns.
    """
    axis = world.groups["tensor"]
    if axis.size == 1:
        return
    names = [name for name, p in tensors.structure.named_parameters() if p.requires_grad]
    ends = torch.zeros(4, len(names), dtype=torch.float64, device=world.device)
    for index, name in enumerate(names):
        part = tensors.parameters.get(name)
        if part is not None and part.grad is not None and sums.is_copied(name):
            gradient = part.grad.double()
            each = torch.stack([gradient.norm(), gradient.sum()])
            ends[:, index] = torch.cat([each, -each])
    dist.all_reduce(ends, dist.ReduceOp.MAX, group=axis.group)
    most, spread = ends[0], (ends[:2] + ends[2:]).amax(0)
    partial = (spread > ROUNDING_OF_COPIES * most.clamp_min(ROUNDING_OF_COPIES * most.max())).byte()
    dist.all_reduce(partial, dist.ReduceOp.MAX)
    for name in (names[index] for index in partial.nonzero().flatten().tolist()):
        raise ConfigError(f"""strategy.mesh.tensor={axis.size}:
            each rank would find a part of the gradient of {name};
            use it outside of the divided layers, or leave these out of tensor_plan""")


def check_shared(
    module: nn.Module, shared: Sequence[str], before: Mapping[str, torch.Tensor], world: World
) -> None:
    """Raise ConfigError if a buffer of `shared`, which several stages use, has changed."""
    changed = set(changed_buffers(module, before))
    named = {name: b in changed for name, b in module.named_buffers()}
    flags = torch.tensor([named.get(name, False) for name in shared])
    if len(flags):
        every = flags.byte().to(world.device)
        dist.all_reduce(every, dist.ReduceOp.MAX)
        for index in every.nonzero().flatten().tolist():
            raise ConfigError(f"""strategy.mesh.pipeline:
                {shared[index]} changes, and several stages use it; use it in one place""")


class DividedTensors(Tensors):
    """The parts of a model's tensors that this rank has: `parameters` are plain parameters.

    `wrapped` are those of the model's modules by name, which may be DTensors; `local` maps each of
    them to this rank's part.
    """

    def __init__(self, module: nn.Module, division: PartitionedModel, mesh: Mesh, world: World):
        self._division = division
        self._mesh = mesh
        self._has_owners = False
        self._replaced = ""
        super().__init__(module, world)
        self.structure = division.structure
        self._registers: list[tuple[dict[str, Any], str, Any]] = [
            (module._parameters, key, parameter)
            for module in self.module.modules()
            for key, parameter in module._parameters.items()
            if division.sharding is not None and parameter is not None
        ]
        self._names = self._find_names()

    def _list_parameters(self) -> dict[str, nn.Parameter]:
        """Make plain parameters of the local parts; they share memory with the model's."""
        placements = self._division.placements
        self.wrapped = self._registered()
        self._shards: dict[str, Shard] = {}
        self.local: dict[torch.Tensor, nn.Parameter] = {}
        self._shard_of: dict[torch.Tensor, Shard] = {}
        parameters = {}
        for name, parameter in self.wrapped.items():
            if parameter not in self.local:
                shard = placements.shard(name, parameter)
                needs_grad = parameter.requires_grad
                is_whole = not placements.is_sharded(parameter)
                local = parameter if is_whole else nn.Parameter(shard.tensor, needs_grad)
                self.local[parameter] = parameters[name] = local
                self._shard_of[local] = shard
            self._shards[name] = self._shard_of[self.local[parameter]]
        return parameters

    def _registered(self) -> dict[str, nn.Parameter]:
        self.refresh()
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: p for name, p in named if not p.is_meta}

    def take_gradients(self) -> None:
        """Move the gradients of sharded parameters to `parameters`."""
        for parameter in self.wrapped.values():
            local = self.local[parameter]
            if parameter is not local and parameter.grad is not None:
                local.grad = parameter.grad.to_local().detach()  # type: ignore[attr-defined]
                parameter.grad = None

    def note_replaced(self) -> None:
        """Note a parameter that the task has replaced: FSDP puts its own back before it is used."""
        for parameters, key, original in self._registers:
            if parameters.get(key) is not original:
                self._replaced = key

    def find_change(self) -> str:
        """Return a line if the model has other parameters, or other memory, than at the start."""
        if self._replaced:
            why = "was replaced or removed after the start, but FSDP trains the old one"
            return f"a parameter called {self._replaced} {why}; keep it, or use strategy=ddp"
        if line := super().find_change():
            return line
        for name, parameter in self.wrapped.items():
            part = self._shard_of[self.local[parameter]].tensor
            live_part = self._division.placements.shard(name, parameter).tensor
            if live_part.data_ptr() != part.data_ptr():
                why = "has other memory than at the start, which alone is trained and saved"
                return f"the parameter {name} {why}; write into it by copy_, not by .data ="
        return ""

    def _find_names(self) -> dict[torch.Tensor, str]:
        every = [self.structure.named_parameters(), self.module.named_parameters()]
        names: dict[torch.Tensor, str] = {}
        for named in (*every, self.parameters.items()):
            names |= {parameter: name for name, parameter in named}
        for parameter, name in names.items():
            if name in self.parameters:
                self.local.setdefault(parameter, self.parameters[name])
        return names

    def adopt(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Make an optimizer step local parts, or whole parameters if it needs them.

        Raises ConfigError for an optimizer that needs more than a parameter at a time, or that made
        its state before the first step.
        """
        if optimizer.state:
            raise ConfigError(f"""build_optimizer:
                {type(optimizer).__name__} has state before its first step; use ddp""")
        groups = optimizer.param_groups
        locals_ = [[self.local[p] for p in g["params"] if p in self.local] for g in groups]
        every = [p for group in locals_ for p in group]
        check_hooks(optimizer)
        if is_elementwise(optimizer):
            for group, own in zip(groups, locals_, strict=True):
                group["params"] = own
            self._has_owners |= self._mesh.pipeline > 1
            return every
        check_independence(optimizer)
        divided = [(p, self._shard_of[p]) for p in every if self._is_divided(p)]
        model = open_group(self._mesh, self._world.groups, "", "shard", "context", "tensor")
        gathered = OwnedOptimizer(optimizer, divided, model)
        self._has_owners = True
        whole = {part: parameter for parameter, part in gathered.owned.items()}
        for group, own in zip(groups, locals_, strict=True):
            group["params"] = [
                whole.get(p, p) for p in own if p in whole or not self._is_divided(p)
            ]
        for parameter, part in gathered.owned.items():
            name = self._names[parameter] = self._names[part]
            is_written = self._division.placements.is_first_copy(name)
            self._shard_of[parameter] = Shard.whole(parameter.detach(), is_written, SHARDED)
        return every

    def _is_divided(self, parameter: nn.Parameter) -> bool:
        name = self._names[parameter]
        return name in self._division.placements.cuts or parameter is not self.wrapped[name]

    def names(self) -> dict[torch.Tensor, str]:
        return self._names

    def collect_plain(self, states: list[dict[str, Any]], group: Group) -> list[dict[str, Any]]:
        """Join the values that only some ranks have. A collective."""
        (has_owners,) = group.max(float(self._has_owners))
        return join_states(states, group) if has_owners else states

    def refresh(self) -> None:
        if self._division.sharding is not None:
            self._division.sharding.refresh()

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """Gather the model on each rank, so that no forward or backward pass communicates."""
        if self._mesh.divides_model:
            with self._division.undivided_draws():
                yield self.reunited()
        elif self._division.sharding is None:
            yield self.module
        else:
            with self._division.sharding.whole():
                yield copy_modules(self.module)

    def reunited(self) -> nn.Module:
        """Return the whole model with the values of all ranks. A collective."""
        self.refresh()
        find = self._division.placements.shard
        buffers = {name: b for name, b in self.module.named_buffers() if not b.is_meta}
        parts = {name: find(name, buffer) for name, buffer in buffers.items()} | self._shards
        return reunite(self.structure, parts, self._world)

    def shard_of(self, tensor: torch.Tensor, is_state: bool = False) -> Shard:
        return self._shard_of[tensor]

    def shards(self) -> dict[str, Shard]:
        self.refresh()
        named = {name: t for name, t in tensors_of(self.module).items() if not t.is_meta}
        find = self._division.placements.shard
        return {name: self._shards.get(name) or find(name, t) for name, t in named.items()}

    def non_persistent(self) -> dict[str, Shard]:
        named = {name: b for name, b in non_persistent(self.module).items() if not b.is_meta}
        return {name: self._division.placements.shard(name, b) for name, b in named.items()}

    def writers(self) -> list[int]:
        return self._division.placements.writers()

    def load(
        self, source: TensorSource, extra: Mapping[str, Any], left_out: Collection[str] = ()
    ) -> None:
        check_model(tensors_of(self.structure), source.shapes(), left_out)
        read_into(self.shards(), source)
        if extra:
            self.module.load_state_dict(extra, strict=False)
        self.refresh()
