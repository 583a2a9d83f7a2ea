"""Comm hooks, which DDP calls for each bucket of gradients, and buffers that NCCL cannot send."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.codec import bytes_of

COMPRESSING = ("fp16", "bf16", "powersgd")  # hooks that send compressed gradients


def open_hook(name: str) -> tuple[Any, Callable[..., Any]]:
    """Return (state, hook) for DDP's register_comm_hook.

    A float64 bucket contains only the ride of ddp.py, which must not be compressed: it is
    all-reduced.
    """
    if name == "parameter_server":
        return None, _reduce_on_rank_0
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    state = None
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=10)
    hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
    compress = hooks.get(name, powerSGD_hook.powerSGD_hook)

    def hook(state, bucket):  # no annotations: DDP reads them, and rejects strings
        if bucket.buffer().dtype == torch.float64:
            return default_hooks.allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]
        if name != "powersgd":
            return compress(state, bucket)
        # PowerSGD's callbacks start their own reductions, over gloo in threads without an order:
        # 3 of 3 runs with several buckets and SyncBN hung or crashed (torch 2.13). So wait here.
        return _completed(compress(state, bucket).wait())

    return state, hook


def _reduce_on_rank_0(state, bucket):
    """Reduce to rank 0 and broadcast the mean, like a parameter server.

    Backward waits for it.
    """
    gradient = bucket.buffer()
    dist.reduce(gradient, 0)
    dist.broadcast(gradient.div_(dist.get_world_size()), 0)
    return _completed(gradient)


def _completed(gradient: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(gradient)
    return future


SENT = {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool}
SENT |= {torch.int64, torch.int32, torch.int8, torch.uint8}


def share_odd_buffers(module: nn.Module) -> None:
    """Send rank 0's buffers of dtypes that NCCL has not, as bytes; DDP leaves them out."""
    odd = {name: b for name, b in module.named_buffers() if b.dtype not in SENT}
    for buffer in odd.values():
        whole = buffer.contiguous()
        dist.broadcast(bytes_of(whole), 0)
        buffer.copy_(whole)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, [*odd])
