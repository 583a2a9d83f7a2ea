"""Distributed data parallel: one process per device, gradients averaged during backward.

The *ride* is an extra parameter: values in its gradient are all-reduced with the model's gradients.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from trainer.config.schema import Config
from trainer.data.preparation import MicroBatch
from trainer.distributed import accelerator
from trainer.distributed.backend import choose_backend
from trainer.distributed.world import World
from trainer.errors import ConfigError
from trainer.hook_errors import call
from trainer.micro_batch import copied
from trainer.strategy.base import Blueprint, MicroBatches, ObjectiveProtocol, Strategy
from trainer.strategy.cost import (
    AGREED,
    ESTIMATED,
    MEASURED,
    Cost,
    MemoryRow,
    Message,
    PlannedRank,
    reduced,
)
from trainer.strategy.modules.comm_hooks import COMPRESSING, open_hook, share_odd_buffers
from trainer.strategy.modules.dry_run import untouched
from trainer.strategy.modules.reached_parameters import reaching
from trainer.strategy.single import SingleDevice

# torch 2.13 renames the option that turns off DDP's broadcast of buffers before every forward.
_KNOWN = inspect.signature(TorchDDP).parameters
_SYNC_BUFFERS = "forward_sync_buffers" if "forward_sync_buffers" in _KNOWN else "broadcast_buffers"


class AllReduceCost(Cost):
    """The cost of one all-reduce of the gradients, a bucket at a time, and of the ride."""

    @classmethod
    def messages(cls, rank: PlannedRank) -> list[Message]:
        sizes = [p.nbytes for p in rank.trained]
        ride = (AGREED + rank.num_statistics) * max(4, rank.itemsize)
        block = rank.config.strategy
        count = count_buckets([ride, *(rank.gradients or sizes[::-1])], block.bucket_mb)
        is_plain = block.comm_hook == "none"
        note = "" if is_plain else f"before strategy.comm_hook={block.comm_hook}"
        source = MEASURED if is_plain else ESTIMATED
        sent = reduced(sum(sizes) + ride, rank.mesh.replicate)
        return [Message("replicate", "all-reduce of gradients", count, sent, source, note)]

    @classmethod
    def memory(cls, rank: PlannedRank) -> list[MemoryRow]:
        buckets = MemoryRow("buckets of ddp", 0, note="the same memory as the gradients")
        return [buckets] if rank.mesh.data_size > 1 else []


def count_buckets(sizes: Sequence[int], bucket_mb: float) -> int:
    """Return the number of DDP's buckets: each is closed by the tensor that fills it."""
    count = 0
    filled = 0
    for size in sizes:
        count += filled == 0
        filled += size
        if filled >= bucket_mb * 2**20:
            filled = 0
    return count


class DistributedDataParallel(Strategy):
    """torch's DDP, whose gradient reduction also carries the other values that ranks agree on.

    The ride is a small parameter next to the model, which the optimizer, clipping and state_dict
    do not include. Its gradient is the weight of the batch, the request to stop, and the model's
    running statistics. One extra all-reduce would cost 50 to 100 % of a small step over gloo. The
    running statistics are the mean over the ranks after every step, so evaluation and saving do
    not change them.
    """

    takes_comm_hook = True
    on_mesh = "parallel"
    cost = AllReduceCost

    @classmethod
    def check(cls, config: Config, world: World) -> None:
        super().check(config, world)
        hook = config.strategy.comm_hook
        precision = config.strategy.precision
        if hook in COMPRESSING and precision in ("fp64", "bf16", "fp16"):
            why = f"compresses float32 gradients, and strategy.precision={precision} has none"
            raise ConfigError(f"strategy.comm_hook={hook}: {why}; use none or parameter_server")
        if hook == "bf16" and choose_backend(config.dist, world) != "nccl":
            raise ConfigError("strategy.comm_hook=bf16: needs dist.backend=nccl; use fp16")

    @classmethod
    def build(cls, blueprint: Blueprint) -> Strategy:
        """Build the strategy; on one rank SingleDevice gives the same numbers without a wrapper."""
        comm_hook = blueprint.config.strategy.comm_hook
        is_alone = blueprint.world.world_size == 1 and comm_hook == "none"
        return (SingleDevice if is_alone else cls)(blueprint)

    def __init__(self, blueprint: Blueprint):
        super().__init__(blueprint)
        self._wrapped: Any = None
        self._ride = nn.Parameter(torch.zeros(2))

    def prepare(self, batch: MicroBatch, objective: ObjectiveProtocol) -> None:
        if not dist.is_initialized():  # one process on a machine without a network
            hook = self.config.comm_hook
            raise ConfigError(f"strategy.comm_hook={hook}: needs a network interface; use none")
        with untouched(self.module) as before:
            self._rehearse(batch, objective)
            self.statistics.find(self.module, before, self._any_rank)
            self._check_reached(objective)
        is_compressed = self.config.comm_hook in COMPRESSING
        dtype = torch.float64 if is_compressed else self.precision.wide
        carrier = _Carrier(self.module, 2 + sum(self.statistics.sizes), dtype)
        self._ride = carrier.ride
        share_odd_buffers(carrier)
        self._wrapped = TorchDDP(carrier, **self._switches())
        if self.config.comm_hook != "none":
            self._wrapped.register_comm_hook(*open_hook(self.config.comm_hook))
        # DDP reorders its buckets after the first backward, which changes the bits of sums over
        # three or more ranks. So the first backward is not a step.
        reached: list[torch.Tensor] = []
        hooks = [p.register_post_accumulate_grad_hook(reached.append) for p in self.tensors.trained]
        with untouched(self.module):
            self.forward_backward([copied(batch)], objective)
        for hook in hooks:
            hook.remove()
        reached[-1].register_post_accumulate_grad_hook(self.blueprint.reduce_begun)

    def forward_backward(self, batch: MicroBatches, objective: ObjectiveProtocol) -> torch.Tensor:
        last = len(batch)
        others = self.tensors.trained if objective.others is None else objective.others
        if self.config.find_unused_parameters:
            others = ()  # DDP finds itself what has no gradient
        self.statistics.begin()
        for number, (inputs, targets) in enumerate(batch, 1):
            self.statistics.rewind()
            with nullcontext() if number == last else self._wrapped.no_sync():
                with self.precision.autocast():
                    outputs, ride = call(self._wrapped, inputs, self.rows)
                    total, carried = objective(outputs, targets)
                self.statistics.note(targets, inputs)
                if number == last and self.statistics.sizes:
                    statistics = [part.detach().flatten() for part in self.statistics.read()]
                    carried = torch.cat([carried, *statistics])
                root = self.precision.root(total, objective.scale)
                total = reaching(total, others if number == last else ())
                parts = [total, ride[: len(carried)]]
                torch.autograd.backward(parts, [root, carried.to(ride)])
        self._check_reached(objective)
        return self._unload()

    def list_remarks(self, is_resumed: bool) -> list[str]:
        lines = super().list_remarks(is_resumed)
        if is_resumed and self.config.comm_hook == "powersgd":
            lines.append("PowerSGD starts with an empty error memory, so this resume is not exact")
        return lines

    def _switches(self) -> dict[str, Any]:
        block = self.config
        switches: dict[str, Any] = {
            _SYNC_BUFFERS: False,
            "gradient_as_bucket_view": True,
            "static_graph": block.static_graph,
            "find_unused_parameters": block.find_unused_parameters,
            "bucket_cap_mb": block.bucket_mb,
        }
        if accelerator.is_used(self.world.device) and block.devices_per_rank == 1:
            switches["device_ids"] = [self.world.device]
        return switches

    @torch.no_grad()
    def _unload(self) -> torch.Tensor:
        """Return the carried totals and write the statistics, from the ride's averaged gradient."""
        gradient = self._ride.grad
        assert gradient is not None
        totals = gradient[:2] * self.mesh.data_size
        if sizes := self.statistics.sizes:
            self.statistics.write(gradient[2:].split(sizes))
        self._ride.grad = None
        return totals


class _Carrier(nn.Module):
    """The model together with the ride, the parameter whose gradient carries other values.

    DDP reduces each dtype separately: a ride whose dtype no gradient has is reduced alone.
    """

    def __init__(self, module: nn.Module, size: int, dtype: torch.dtype):
        super().__init__()
        self.module = module
        device = next(p.device for p in module.parameters() if p.requires_grad)
        self.ride = nn.Parameter(torch.zeros(size, dtype=dtype, device=device))

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor]:
        # in the graph of the outputs, so DDP never finds it unused
        return self.module(*args, **kwargs), self.ride * 1


STRATEGY = DistributedDataParallel
