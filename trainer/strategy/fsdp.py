"""Fully sharded data parallel: parameters, gradients and optimizer state divided over the ranks.

It uses torch's FSDP2, `fully_shard` (ZeRO-3: Rajbhandari et al., arXiv:1910.02054; HSDP: Zhao et
al., arXiv:2304.11277). Before a unit's forward and backward its parameters are gathered, and its
gradients are summed into the shards. A *unit* is a block of the task; the rest of the model is one
unit more. Everything else works on the local shards: optimizers, norm, EMA, digests, checkpoints.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.utils import get_total_norm

from trainer.config.schema import Config
from trainer.data.batches import MicroBatch, count_rows
from trainer.data.order import counted
from trainer.distributed.group import Group, choose_backend
from trainer.distributed.world import World
from trainer.errors import ConfigError, RunError
from trainer.strategy.base import MicroBatches, Objective, Precision, Strategy, call
from trainer.strategy.exchange import exchange_over_gloo
from trainer.strategy.gathered import Gathered
from trainer.strategy.handover import Values, inner_first
from trainer.strategy.rehearsal import FlopCounter, untouched
from trainer.strategy.shards import Shard, Source, check_model, read_into
from trainer.strategy.single import SingleDevice

# These update each element by itself, so a shard can be updated without the rest of its tensor.
ELEMENTWISE = {
    *(optim.SGD, optim.Adam, optim.AdamW, optim.Adamax, optim.NAdam, optim.RAdam),
    *(optim.Adagrad, optim.Adadelta, optim.RMSprop, optim.Rprop, optim.ASGD),
}


class FullyShardedDataParallel(Strategy):
    """FSDP2 over `strategy.mesh.shard` ranks, and HSDP with `strategy.mesh.replicate` copies.

    `parameters` are the local shards, as plain parameters that share memory with FSDP's: on 69
    parameters they are 3 to 16 times as fast as DTensors. Gradients are sums, not means: over gloo
    a factor on reductions fails in 32 bits and less.
    """

    takes_shards = True
    builds_on_rank_0 = True
    averages = False

    @classmethod
    def check(cls, config: Config, world: World) -> None:
        block = config.strategy
        super().check(config, world)
        if block.devices_per_rank > 1:
            given = f"strategy.devices_per_rank={block.devices_per_rank}"
            raise ConfigError(f"{given}: must be 1 with strategy=fsdp; use ddp")
        if block.mesh.shard == 1 and world.world_size > 1:
            raise ConfigError("strategy.mesh.shard=1: strategy=fsdp has nothing to divide; use ddp")
        if world.world_size > 1 and choose_backend(config.dist, world) == "mpi":
            raise ConfigError("dist.backend=mpi: cannot gather shards; use gloo or nccl")

    @classmethod
    def build(
        cls,
        config: Config,
        world: World,
        precision: Precision,
        model: nn.Module,
        blocks: Sequence[nn.Module] = (),
    ) -> Strategy:
        """Build the strategy; on one rank SingleDevice gives the same numbers without sharding."""
        made = SingleDevice if world.world_size == 1 else cls
        return made(config, world, precision, model, blocks)

    def _place(self, model: nn.Module) -> nn.Module:
        """Divide the model. On rank 0 it has its values, on other ranks only its structure."""
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor

        self._reduce_begun: Callable[[Any], Any] = id
        self._has_owners = False
        self._dtensor: type = DTensor
        mesh = self.mesh
        axes = {"replicate": mesh.replicate, "shard": mesh.shard}
        if mesh.replicate == 1:
            del axes["replicate"]
        device = self.world.device.type
        devices = init_device_mesh(device, tuple(axes.values()), mesh_dim_names=tuple(axes))
        self._shard_group = devices["shard"].get_group()
        values = Values(model, self.world, self.precision.dtype)
        self._units: list[Any] = [*inner_first(model, self.blocks), model]
        for unit in self._units:
            values.fill(unit.modules())
            scalars = {p for p in unit.parameters() if not p.dim()}  # FSDP does not take them
            fully_shard(
                unit,
                mesh=devices,
                reshard_after_forward=self.config.reshard,
                ignored_params=scalars,
            )
        for unit in self._units:
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        if device == "cpu":
            exchange_over_gloo(self._units)
        return model

    def _list_parameters(self) -> None:
        """Make plain parameters of the local shards; they share memory with FSDP's."""
        self._wrapped: dict[str, Any] = dict(self.module.named_parameters())
        self._shards: dict[torch.Tensor, Shard] = {}
        self.parameters = {}
        for name, parameter in self._wrapped.items():
            shard = self.shard_of(parameter)
            is_divided = isinstance(parameter, self._dtensor)
            needs_grad = parameter.requires_grad
            local = nn.Parameter(shard.tensor, needs_grad) if is_divided else parameter
            self.parameters[name] = local
            self._shards[local] = shard
        self._sort_parameters()
        self._scalars = [p for p in self._parameters if not self._shards[p].shape]
        self._names: dict[torch.Tensor, str] = {p: name for name, p in self.parameters.items()}
        self._names |= {p: name for name, p in self._wrapped.items()}
        self._local = {p: self.parameters[name] for name, p in self._wrapped.items()}

    # Training -----------------------------------------------------------------------------------

    def prepare(self, batch: MicroBatch, objective: Objective) -> None:
        with untouched(self.module) as before:
            with FlopCounter() as counter:
                self._forward_backward([batch], objective)
            inputs, targets = batch
            self.flops = counter.total / count_rows(targets, inputs)
            self.statistics.find(self.module, before, self._any_rank)
            self._check_reached()
        self.drop_gradients()
        self._compile(self.blocks or [self.module])

    def forward_backward(self, batch: MicroBatches, objective: Objective) -> torch.Tensor:
        self.statistics.begin()
        totals = self._forward_backward(batch, objective)
        self._reduce_begun(None)
        parts = [totals.double(), *self._reached()]
        statistics = [part.detach().double().flatten() for part in self.statistics.read()]
        summed = torch.cat([*parts, *statistics])
        dist.all_reduce(summed)
        if self._scalars:
            self._reduce_scalars()
        self._check_reached()
        self._write_statistics(summed[sum(map(len, parts)) :])
        self._check_same(summed[2:4], parts[1:])
        return summed[:2].to(totals.dtype)

    def _forward_backward(self, batch: Any, objective: Objective) -> torch.Tensor:
        """Compute the sums of gradients over the ranks that divide the model, in the shards."""
        totals = None
        last = len(batch)
        module: Any = self.module
        for number, (inputs, targets) in enumerate(batch, 1):
            self.statistics.rewind()
            module.set_is_last_backward(number == last)
            if self.mesh.replicate > 1:
                module.set_requires_all_reduce(number == last)
            with self.precision.autocast():
                total, carried = objective(call(module, inputs), targets)
            self.statistics.note(targets, inputs)
            torch.autograd.backward(total, self.precision.root(total, objective.scale))
            totals = carried if totals is None else totals + carried
        assert totals is not None
        for name, parameter in self._wrapped.items():
            local = self.parameters[name]
            if parameter is not local and parameter.grad is not None:
                local.grad = parameter.grad.to_local().detach()
                parameter.grad = None
        return totals

    def _reduce_scalars(self) -> None:
        gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in self._scalars]
        flat = torch.stack(gradients)
        dist.all_reduce(flat)
        for parameter, gradient in zip(self._scalars, flat.unbind(), strict=True):
            if parameter.grad is not None:
                parameter.grad.copy_(gradient)

    @torch.no_grad()
    def _write_statistics(self, summed: torch.Tensor) -> None:
        buffers = self.statistics.buffers
        if self.statistics.rows is None:  # torch's own: the mean over the ranks
            summed = summed / self.mesh.data_size
        parts = summed.split([buffer.numel() for buffer in buffers]) if buffers else []
        pairs = zip(parts, buffers, strict=True)
        self.statistics.write([part.view_as(buffer).to(buffer.dtype) for part, buffer in pairs])

    def _reached(self) -> list[torch.Tensor]:
        """Return a fingerprint of the parameters that have a gradient, and its square."""
        if not self.config.find_unused_parameters:
            return []
        number = hash(tuple(p.grad is not None for p in self._parameters)) % 2**24
        return [torch.tensor([number, number**2], dtype=torch.float64, device=self.world.device)]

    def _check_same(self, summed: torch.Tensor, own: Sequence[torch.Tensor]) -> None:
        """Raise RunError if the ranks reached different parameters: their sums are then wrong."""
        if own and not torch.equal(summed, own[0] * self.mesh.data_size):
            why = "the ranks used different parameters in a step"
            raise RunError(f"strategy=fsdp: {why}; use the same ones on all ranks, or use ddp")

    def reduce(
        self, found_inf: torch.Tensor, wants_norm: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        values = torch.zeros(2, dtype=torch.float64, device=self.world.device)
        values[0] = found_inf
        if wants_norm:
            values[1] = self._square()
        dist.all_reduce(values)
        found = (values[0] > 0).to(found_inf.dtype)
        return found, values[1].sqrt().to(torch.promote_types(self.precision.dtype, torch.float32))

    def _square(self) -> torch.Tensor:
        """Return this rank's part of the square of the gradients' norm."""
        copies: dict[int, list[torch.Tensor]] = {}
        for parameter in self._parameters:
            if parameter.grad is not None:
                is_divided = bool(self._shards[parameter].shape)
                number = self.mesh.replicate if is_divided else self.mesh.data_size
                copies.setdefault(number, []).append(parameter.grad)
        norms = {
            n: get_total_norm([g.float() if g.dtype.itemsize < 4 else g for g in gradients])
            for n, gradients in copies.items()
        }
        return sum((norm.double() ** 2 / n for n, norm in norms.items()), torch.zeros(()))

    def on_gradients(self, hook: Callable[[Any], None]) -> None:
        self._reduce_begun = hook

    def close(self) -> nn.Module | None:
        """Let go of the process groups, which at exit could end the process with SIGABRT.

        FSDP2's modules keep them, and so do torch's cached specs of DTensors.
        """
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()
        return None

    def list_remarks(self, is_resumed: bool) -> list[str]:
        shards = [self._shards[p] for p in self.parameters.values()]
        total = sum(torch.Size(shard.shape).numel() for shard in shards)
        own = sum(shard.tensor.numel() for shard in shards)
        size = sum(shard.tensor.nbytes for shard in shards)
        mesh = self.mesh
        axes = f"replicate {mesh.replicate} x " * (mesh.replicate > 1) + f"shard {mesh.shard}"
        again = "and again in backward, " if self.config.reshard else ""
        units = counted(len(self._units), "unit")
        lines = [
            f"mesh: {axes}; rank 0 has {own:,} of {total:,} parameters, {size:,} bytes",
            f"shard: each micro-batch gathers {units} in forward {again}"
            "and sums gradients into the shards",
        ]
        if mesh.replicate > 1:
            lines.append("replicate: each step sums the gradients of a shard over its copies")
        return lines

    # Local shards -------------------------------------------------------------------------------

    def adopt(self, optimizer: optim.Optimizer) -> list[nn.Parameter]:
        """Make an optimizer step local shards, or whole parameters if it needs them.

        Raises ConfigError for an optimizer that made its state before the first step.
        """
        if optimizer.state:
            why = "has state before its first step"
            raise ConfigError(f"build_optimizer: {type(optimizer).__name__} {why}; use ddp")
        groups = optimizer.param_groups
        locals_ = [[self._local[p] for p in group["params"]] for group in groups]
        every = [p for group in locals_ for p in group]
        if type(optimizer) in ELEMENTWISE:
            for group, own in zip(groups, locals_, strict=True):
                group["params"] = own
            return every
        divided = [(p, self._shards[p]) for p in every if self._shards[p].shape]
        gathered = Gathered(optimizer, divided, self._shard_group)
        self._has_owners = True
        whole = {part: parameter for parameter, part in gathered.owned.items()}
        for group, own in zip(groups, locals_, strict=True):
            group["params"] = [
                whole.get(p, p) for p in own if p in whole or not self._shards[p].shape
            ]
        for parameter, part in gathered.owned.items():
            self._shards[parameter] = Shard.whole(parameter.detach(), self.mesh.replica == 0)
            self._names[parameter] = self._names[part]
        return every

    def whole_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self._wrapped.items():
            is_divided = isinstance(parameter, self._dtensor)
            yield name, parameter.full_tensor() if is_divided else parameter

    def names(self) -> dict[torch.Tensor, str]:
        return self._names

    def collect_plain(self, states: list[dict[str, Any]], group: Group) -> list[dict[str, Any]]:
        """Join the values that only the owners of whole parameters have. A collective."""
        if self._has_owners:
            for text in group.collect_text(json.dumps([state["state"] for state in states])):
                for state, others in zip(states, json.loads(text), strict=True):
                    state["state"] |= others
        return states

    def refresh(self) -> None:
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
            yield
        finally:
            for unit in self._units:
                unit.set_requires_gradient_sync(True, recurse=False)
                unit.set_reshard_after_forward(self.config.reshard, recurse=False)
                unit.set_reshard_after_backward(True, recurse=False)
            self.refresh()

    def shard_of(self, tensor: torch.Tensor) -> Shard:
        if tensor in getattr(self, "_shards", {}):
            return self._shards[tensor]
        if not isinstance(tensor, self._dtensor):
            return Shard.whole(tensor.detach(), self.world.rank == 0)
        shape = tuple(tensor.shape)
        rows = -(-shape[0] // self.mesh.shard)  # as torch.chunk divides
        first = min(rows * self.mesh.shard_rank, shape[0])
        local = cast(Any, tensor).to_local().detach()
        return Shard(local, shape, (first, *(0,) * (len(shape) - 1)), self.mesh.replica == 0)

    def shards(self) -> dict[str, Shard]:
        self.refresh()
        return super().shards()

    def writers(self) -> list[int]:
        return list(range(self.mesh.shard))

    def load(self, source: Source, extra: Mapping[str, Any]) -> None:
        shards = self.shards()
        check_model(shards, source.shapes())
        read_into(shards, source)
        if extra:
            self.module.load_state_dict(extra, strict=False)
        self.refresh()


STRATEGY = FullyShardedDataParallel
