"""The parts of a model that a rank of a mesh has, for optimizers, checkpoints and digests.

They are plain tensors that share memory with the model's: on 69 parameters they are 3 to 16 times
as fast as DTensors.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from trainer.distributed.group import Group
from trainer.errors import ConfigError
from trainer.strategy.base import Strategy
from trainer.strategy.context_parallel import Context
from trainer.strategy.mesh import SHARDED, open_group
from trainer.strategy.mesh_model.build import Division
from trainer.strategy.mesh_model.divided_parameters import DividedParameters
from trainer.strategy.mesh_model.full_model import reunite
from trainer.strategy.mesh_model.gradient_sums import GradientSums
from trainer.strategy.mesh_model.optimizer_trial import (
    check_hooks,
    check_independence,
    is_elementwise,
)
from trainer.strategy.mesh_model.owned_optimizer import OwnedOptimizer
from trainer.strategy.mesh_model.unused_parameters import UnusedParameters
from trainer.strategy.modules.dry_run import changed_buffers
from trainer.strategy.protocols import ObjectiveProtocol
from trainer.strategy.shards import (
    Shard,
    TensorSource,
    check_model,
    non_persistent,
    read_into,
    tensors_of,
)


class DividedModel(Strategy):
    """A model of which each rank has parts: `parameters` are these, as plain parameters."""

    def _place(self, model: nn.Module) -> nn.Module:
        """Divide the model. On rank 0 it has its values, on other ranks only its structure."""
        self._reduce_begun: Callable[[Any], Any] = id
        self._has_owners = False
        context = self.world.groups["context"]
        self._context = Context(context) if context.size > 1 else None
        self._divided = Division(self.blueprint, self.mesh, self._context, self._is_compiled)
        self.structure = self._divided.structure
        self._root = self._divided.root
        self._copies = self._divided.copies
        return model

    def _list_parameters(self) -> None:
        """Make plain parameters of the local parts; they share memory with the model's."""
        placements = self._divided.placements
        self._wrapped = self._registered()
        self._replaced = ""
        self._registers: list[tuple[dict[str, Any], str, Any]] = [
            (module._parameters, key, parameter)
            for module in self.module.modules()
            for key, parameter in module._parameters.items()
            if self._divided.sharding is not None and parameter is not None
        ]
        self._shards: dict[str, Shard] = {}
        self._local: dict[torch.Tensor, nn.Parameter] = {}
        self._shard_of: dict[torch.Tensor, Shard] = {}
        self.parameters = {}
        for name, parameter in self._wrapped.items():
            if parameter not in self._local:
                shard = placements.shard(name, parameter)
                needs_grad = parameter.requires_grad
                is_whole = not placements.is_sharded(parameter)
                local = parameter if is_whole else nn.Parameter(shard.tensor, needs_grad)
                self._local[parameter] = self.parameters[name] = local
                self._shard_of[local] = shard
            self._shards[name] = self._shard_of[self._local[parameter]]
        self._sort_parameters()
        self._name_parameters()
        self._unused = UnusedParameters(self._parameters, self.config.find_unused_parameters)
        if self._divided.sharding is not None:
            self._divided.sharding.fill_unused(lambda p: self._unused.note(self._local[p]))
        self._checked: set[int] = set()  # objectives whose loss was watched for a step
        self._sums = GradientSums(self.config.bucket_mb)
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                for turn, group in self._divided.sums_of(name, self._wrapped[name]):
                    self._sums.add(turn, group, parameter)

    def _registered(self) -> dict[str, nn.Parameter]:
        self.refresh()
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: p for name, p in named if not p.is_meta}

    def note_replaced(self) -> None:
        """Note a parameter that the task has replaced: FSDP puts its own back before it is used."""
        for parameters, key, known in self._registers:
            if parameters.get(key) is not known:
                self._replaced = key

    def find_change(self) -> str:
        """Return a line if the model has other parameters, or other memory, than at the start."""
        if self._replaced:
            why = "was replaced or removed after the start, but FSDP trains the old one"
            return f"a parameter called {self._replaced} {why}; keep it, or use strategy=ddp"
        if line := super().find_change():
            return line
        for name, parameter in self._wrapped.items():
            part = self._shard_of[self._local[parameter]].tensor
            now = self._divided.placements.shard(name, parameter).tensor
            if now.data_ptr() != part.data_ptr():
                why = "has other memory than at the start, which alone is trained and saved"
                return f"the parameter {name} {why}; write into it by copy_, not by .data ="
        return ""

    def _name_parameters(self) -> None:
        every = [self.structure.named_parameters(), self.module.named_parameters()]
        self._names: dict[torch.Tensor, str] = {}
        for named in (*every, self.parameters.items()):
            self._names |= {parameter: name for name, parameter in named}
        for parameter, name in self._names.items():
            if name in self.parameters:
                self._local.setdefault(parameter, self.parameters[name])

    def adopt(self, optimizer: Optimizer) -> list[nn.Parameter]:
        """Make an optimizer step local parts, or whole parameters if it needs them.

        Raises ConfigError for an optimizer that needs more than a parameter at a time, or that made
        its state before the first step.
        """
        if optimizer.state:
            why = "has state before its first step"
            raise ConfigError(f"build_optimizer: {type(optimizer).__name__} {why}; use ddp")
        groups = optimizer.param_groups
        locals_ = [[self._local[p] for p in g["params"] if p in self._local] for g in groups]
        every = [p for group in locals_ for p in group]
        check_hooks(optimizer)
        if is_elementwise(optimizer):
            for group, own in zip(groups, locals_, strict=True):
                group["params"] = own
            self._has_owners |= self.mesh.pipeline > 1
            return every
        check_independence(optimizer)
        divided = [(p, self._shard_of[p]) for p in every if self._is_divided(p)]
        model = open_group(self.mesh, self.world.groups, "", "shard", "context", "tensor")
        gathered = OwnedOptimizer(optimizer, divided, model)
        self._has_owners = True
        whole = {part: parameter for parameter, part in gathered.owned.items()}
        for group, own in zip(groups, locals_, strict=True):
            group["params"] = [
                whole.get(p, p) for p in own if p in whole or not self._is_divided(p)
            ]
        for parameter, part in gathered.owned.items():
            name = self._names[parameter] = self._names[part]
            is_written = self._divided.placements.is_first_copy(name)
            self._shard_of[parameter] = Shard.whole(parameter.detach(), is_written, SHARDED)
        return every

    def _is_divided(self, parameter: nn.Parameter) -> bool:
        name = self._names[parameter]
        return name in self._divided.placements.cuts or parameter is not self._wrapped[name]

    def _reading(self, objective: ObjectiveProtocol) -> AbstractContextManager[Any]:
        """Watch the loss of an objective, in the rehearsal and in its first step."""
        if id(objective) in self._checked:
            return nullcontext()
        named = self.module.named_parameters()
        cuts = self._divided.placements.cuts
        return DividedParameters(
            {
                p: name
                for name, p in named
                if p.is_meta or name in cuts or self._divided.placements.is_sharded(p)
            }
        )

    def _check_shared(self, before: Mapping[str, torch.Tensor]) -> None:
        """Raise ConfigError for a buffer that several stages use, and one of them changes."""
        changed = set(changed_buffers(self.module, before))
        named = {name: b in changed for name, b in self.module.named_buffers()}
        flags = torch.tensor([named.get(name, False) for name in self._divided.shared])
        if len(flags):
            every = flags.byte().to(self.world.device)
            dist.all_reduce(every, dist.ReduceOp.MAX)
            for number in every.nonzero().flatten().tolist():
                why = f"{self._divided.shared[number]} changes, and several stages use it"
                raise ConfigError(f"strategy.mesh.pipeline: {why}; use it in one place")

    def names(self) -> dict[torch.Tensor, str]:
        return self._names

    def collect_plain(self, states: list[dict[str, Any]], group: Group) -> list[dict[str, Any]]:
        """Join the values that only some ranks have. A collective."""
        (has_owners,) = group.max(float(self._has_owners))
        if has_owners:
            for text in group.collect_text(json.dumps([state["state"] for state in states])):
                for state, others in zip(states, json.loads(text), strict=True):
                    state["state"] |= others
        return states

    def refresh(self) -> None:
        if self._divided.sharding is not None:
            self._divided.sharding.refresh()

    @contextmanager
    def whole(self) -> Iterator[nn.Module]:
        """Gather the model on each rank, so that no forward or backward pass communicates."""
        if self.mesh.divides_model:
            with self._divided.undivided_draws():
                yield self._reunited()
        elif self._divided.sharding is None:
            yield self.module
        else:
            with self._divided.sharding.whole():
                yield self.module

    def _reunited(self) -> nn.Module:
        self.refresh()
        find = self._divided.placements.shard
        buffers = {name: b for name, b in self.module.named_buffers() if not b.is_meta}
        parts = {name: find(name, buffer) for name, buffer in buffers.items()} | self._shards
        return reunite(self.structure, parts, self.world)

    def shard_of(self, tensor: torch.Tensor) -> Shard:
        return self._shard_of[tensor]

    def shards(self) -> dict[str, Shard]:
        self.refresh()
        named = {name: t for name, t in tensors_of(self.module).items() if not t.is_meta}
        find = self._divided.placements.shard
        return {name: self._shards.get(name) or find(name, t) for name, t in named.items()}

    def non_persistent(self) -> dict[str, Shard]:
        named = {name: b for name, b in non_persistent(self.module).items() if not b.is_meta}
        return {name: self._divided.placements.shard(name, b) for name, b in named.items()}

    def writers(self) -> list[int]:
        return self._divided.placements.writers()

    def load(self, source: TensorSource, extra: Mapping[str, Any]) -> None:
        check_model(tensors_of(self.structure), source.shapes())
        read_into(self.shards(), source)
        if extra:
            self.module.load_state_dict(extra, strict=False)
        self.refresh()
