"""Data parallelism: every rank holds the model, gradients are averaged while backward runs."""

from __future__ import annotations

import inspect
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from trainer.errors import ConfigError
from trainer.strategy.base import Loss, MicroBatch, MicroBatches, Strategy, call, untouched

# torch 2.13 renames the switch: buffers are not broadcast before every forward.
_SYNC_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in inspect.signature(TorchDDP).parameters else "broadcast_buffers"
)


class DistributedDataParallel(Strategy):
    """torch's DDP. What else the ranks must agree on rides in its gradient reduction, so it costs no collective.

    A small parameter beside the model, out of sight of optimizer, clipping and state, receives as its gradient the
    weight of the batch, the request to stop, and the running statistics of the model. Those are thus the ranks' mean
    after every step: evaluation and saving find them equal and change nothing.
    """

    def wrap(self, model: nn.Module, rehearsal: MicroBatch, loss: Loss) -> nn.Module:
        self.place(model)
        self._running: list[torch.Tensor] = []
        with untouched(self.module) as before:
            with self.precision.autocast():
                scaled, _ = loss(call(self.module, rehearsal[0]), rehearsal[1])
            scaled.backward()
            self._running = self._changed(before)
            _check_used(self.module)
        self._parameters = [p for p in self.module.parameters() if p.requires_grad]  # lazy modules know them now
        carrier = _Carrier(self.module, 2 + sum(b.numel() for b in self._running))
        self._ride = carrier.ride
        switches: dict[str, Any] = {_SYNC_BUFFERS: False, "gradient_as_bucket_view": True}
        if self.world.device.type == "cuda":
            switches["device_ids"] = [self.world.device]
        wrapped = TorchDDP(carrier, **switches)
        # DDP orders its buckets anew after its first backward, which changes the bits of sums over 3 ranks and more.
        with untouched(self.module):
            self.forward_backward(wrapped, [rehearsal], loss)
        wrapped.zero_grad(set_to_none=True)
        return wrapped

    def forward_backward(self, model: nn.Module, micro_batches: MicroBatches, loss: Loss) -> torch.Tensor:
        last = len(micro_batches)
        for number, (inputs, targets) in enumerate(micro_batches, 1):
            with nullcontext() if number == last else model.no_sync():  # type: ignore[operator]
                with self.precision.autocast():
                    outputs, ride = call(model, inputs)
                    scaled, carried = loss(outputs, targets)
                if number == last and self._running:
                    carried = torch.cat([carried, *(b.detach().flatten() for b in self._running)])
                (scaled + (ride[: len(carried)] * carried).sum()).backward()
        return self._unload()

    def _changed(self, before: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """The floating buffers that a forward pass changed on any rank: running statistics, and not constants."""
        buffers = {name: b for name, b in self.module.named_buffers() if b.is_floating_point()}
        flags = [name not in before or not torch.equal(b, before[name]) for name, b in buffers.items()]
        agreed = torch.tensor(flags, dtype=torch.uint8, device=self.world.device)
        dist.all_reduce(agreed, dist.ReduceOp.MAX)
        return [b for b, is_changed in zip(buffers.values(), agreed.tolist(), strict=True) if is_changed]

    @torch.no_grad()
    def _unload(self) -> torch.Tensor:
        """Take what rode along out of the ride's gradient, which DDP has averaged over the ranks."""
        gradient = self._ride.grad
        assert gradient is not None
        totals = gradient[:2] * self.data_parallel_size
        if self._running:
            parts = gradient[2:].split([b.numel() for b in self._running])
            torch._foreach_copy_(self._running, [p.view_as(b) for p, b in zip(parts, self._running, strict=True)])
        self._ride.grad = None
        return totals


def _check_used(module: nn.Module) -> None:
    """Raise ConfigError naming a parameter that backward does not reach: DDP would wait for its gradient."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad and parameter.grad is None:
            advice = "use it, set requires_grad=False, or train with strategy=single"
            raise ConfigError(f"strategy=ddp: the loss does not depend on the parameter {name}; {advice}")


class _Carrier(nn.Module):
    """The model, and the parameter whose gradient carries what the ranks must agree on."""

    def __init__(self, module: nn.Module, size: int):
        super().__init__()
        self.module = module
        first = next(p for p in module.parameters() if p.requires_grad)
        self.ride = nn.Parameter(torch.zeros(size, dtype=first.dtype, device=first.device))

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor]:
        return self.module(*args, **kwargs), self.ride * 1  # in the graph of the outputs, so never "unused"
