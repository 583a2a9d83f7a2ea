"""Data parallelism: one process over several GPUs (DP), or one per rank, gradients averaged in backward (DDP)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from trainer.config.schema import Config
from trainer.distributed.group import choose_backend
from trainer.distributed.world import World
from trainer.errors import ConfigError
from trainer.strategy.base import (
    Loss,
    MicroBatch,
    MicroBatches,
    SingleDevice,
    Strategy,
    call,
    changed_buffers,
    untouched,
)
from trainer.strategy.hooks import COMPRESSING, open_hook

# torch 2.13 renames the switch: buffers are not broadcast before every forward.
_SYNC_BUFFERS = (
    "forward_sync_buffers"
    if "forward_sync_buffers" in inspect.signature(TorchDDP).parameters
    else "broadcast_buffers"
)


class DataParallel(SingleDevice):
    """torch's DP: one process cuts each micro-batch over its GPUs. Without a GPU it is a single device."""

    @classmethod
    def check(cls, config: Config, world: World) -> None:
        if world.world_size > 1:
            raise ConfigError(
                f"strategy=dp: is one process over the GPUs, and {world.world_size} were started; use ddp"
            )

    def wrap(self, model: nn.Module, rehearsal: MicroBatch, loss: Loss) -> nn.Module:
        module = super().wrap(model, rehearsal, loss)
        return (
            nn.DataParallel(module, list(self.world.devices))
            if self.world.device.type == "cuda"
            else module
        )


class DistributedDataParallel(Strategy):
    """torch's DDP. What else the ranks must agree on rides in its gradient reduction, so it costs no collective.

    A small parameter beside the model, out of sight of optimizer, clipping and state, receives as its gradient the
    weight of the batch, the request to stop, and the running statistics of the model. Those are thus the ranks' mean
    after every step: evaluation and saving find them equal and change nothing.
    """

    @classmethod
    def check(cls, config: Config, world: World) -> None:
        if config.strategy.comm_hook == "bf16" and choose_backend(config.dist, world) != "nccl":
            raise ConfigError("strategy.comm_hook=bf16: needs dist.backend=nccl; use fp16")

    def wrap(self, model: nn.Module, rehearsal: MicroBatch, loss: Loss) -> nn.Module:
        self.place(model)
        with untouched(self.module) as before:
            self.rehearse(rehearsal, loss)
            self._running = self._changed(before)
            self._check_reached()
        is_compressed = self.config.comm_hook in COMPRESSING
        dtype = (
            torch.float64
            if is_compressed
            else torch.promote_types(self.precision.dtype, torch.float32)
        )
        carrier = _Carrier(self.module, 2 + sum(b.numel() for b in self._running), dtype)
        self._ride = carrier.ride
        wrapped = TorchDDP(carrier, **self._switches())
        if self.config.comm_hook != "none":
            state, hook = open_hook(self.config.comm_hook)
            wrapped.registeropen_hook(state, hook)
        # DDP orders its buckets anew after its first backward, which changes the bits of sums over 3 ranks and more.
        reached: list[torch.Tensor] = []
        hooks = [p.register_post_accumulate_grad_hook(reached.append) for p in self._parameters]
        with untouched(self.module):
            self.forward_backward(wrapped, [rehearsal], loss)
        for hook in hooks:
            hook.remove()
        self._last = reached[-1]
        return wrapped

    def forward_backward(
        self, model: nn.Module, micro_batches: MicroBatches, loss: Loss
    ) -> torch.Tensor:
        last = len(micro_batches)
        for number, (inputs, targets) in enumerate(micro_batches, 1):
            with nullcontext() if number == last else model.no_sync():  # type: ignore[operator]
                with self.precision.autocast():
                    outputs, ride = call(model, inputs)
                    total, carried = loss(outputs, targets)
                if number == last and self._running:
                    carried = torch.cat([carried, *(b.detach().flatten() for b in self._running)])
                roots = [
                    self.precision.root(total, loss.scale),
                    carried.to(ride.dtype),
                ]  # the gradients to begin with
                torch.autograd.backward([total, ride[: len(carried)]], roots)
        self._check_reached()
        return self._unload()

    def tell_gradients(self, hook: Callable[[Any], None]) -> None:
        self._last.register_post_accumulate_grad_hook(hook)

    def _check_reached(self) -> None:
        """Raise ConfigError naming a parameter that backward did not reach: DDP would wait for its gradient."""
        if not self.config.find_unused_parameters and any(p.grad is None for p in self._parameters):
            name = next(
                n for n, p in self.module.named_parameters() if p.requires_grad and p.grad is None
            )
            advice = "use it, set requires_grad=False, or give strategy.find_unused_parameters=true"
            raise ConfigError(
                f"strategy=ddp: the loss does not depend on the parameter {name}; {advice}"
            )

    def _switches(self) -> dict[str, Any]:
        block = self.config
        switches: dict[str, Any] = {_SYNC_BUFFERS: False, "gradient_as_bucket_view": True}
        if self.world.device.type == "cuda" and block.devices_per_rank == 1:
            switches["device_ids"] = [self.world.device]
        names = {
            "static_graph": block.static_graph,
            "find_unused_parameters": block.find_unused_parameters,
        }
        return {**switches, **names, "bucket_cap_mb": block.bucket_mb}

    def _changed(self, before: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """The floating buffers that a forward pass changed on any rank."""
        buffers = [b for b in self.module.buffers() if b.is_floating_point()]
        here = {id(b) for b in changed_buffers(self.module, before)}
        flags = [id(b) in here for b in buffers]
        agreed = torch.tensor(flags, dtype=torch.uint8, device=self.world.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return [b for b, is_changed in zip(buffers, agreed.tolist(), strict=True) if is_changed]

    @torch.no_grad()
    def _unload(self) -> torch.Tensor:
        """Take what rode along out of the ride's gradient, which DDP has averaged over the ranks."""
        gradient = self._ride.grad
        assert gradient is not None
        totals = gradient[:2] * self.data_parallel_size
        if self._running:
            parts = gradient[2:].split([b.numel() for b in self._running])
            torch._foreach_copy_(
                self._running, [p.view_as(b) for p, b in zip(parts, self._running, strict=True)]
            )
        self._ride.grad = None
        return totals


class _Carrier(nn.Module):
    """The model, and the parameter whose gradient carries what the ranks must agree on.

    DDP keeps dtypes apart: in a dtype of its own the ride takes a reduction of its own.
    """

    def __init__(self, module: nn.Module, size: int, dtype: torch.dtype):
        super().__init__()
        self.module = module
        device = next(p.device for p in module.parameters() if p.requires_grad)
        self.ride = nn.Parameter(torch.zeros(size, dtype=dtype, device=device))

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor]:
        return self.module(
            *args, **kwargs
        ), self.ride * 1  # in the graph of the outputs, so never "unused"
