"""Distributed data parallel: one process per device, gradients averaged during backward.

The *extras* are one more parameter: values in its gradient are all-reduced with the model's.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import pad
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.nn.parameter import is_lazy

from trainer.base.codec import bytes_of, digest, name_of
from trainer.base.errors import ConfigError
from trainer.core.config.schema import Config
from trainer.core.distributed import accelerator
from trainer.core.distributed.group import find_unequal, number_of
from trainer.core.distributed.rendezvous import choose_backend
from trainer.core.distributed.world import World
from trainer.core.hook_calls import call
from trainer.core.micro_batch import MicroBatch, MicroBatches, copied
from trainer.core.state.sandbox import BufferCopies, keep_passes, sandbox
from trainer.core.strategy.base import ModelSpec, ObjectiveProtocol, Strategy
from trainer.core.strategy.cost import AllReduceCost
from trainer.core.strategy.modules.dry_run import hooked, reaching
from trainer.core.strategy.single import SingleDevice

COMPRESSING = ("fp16", "bf16", "powersgd")  # hooks that send compressed gradients


def open_hook(name: str) -> tuple[Any, Callable[..., Any]]:
    """Return (state, hook) for DDP's register_comm_hook.

    A float64 bucket contains only the extras of DDP, which must not be compressed: it is
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


@torch.no_grad()
def share_start(module: nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's parameters and buffers, by sending those that differ. A collective.

    DDP sends all of them, through buffers of 250 MB: over gloo that takes 4 s for SmolLM2-135M,
    where the digests of what each rank has built take 0.5 s. Raises ConfigError for other shapes.
    """
    tensors = [*module.parameters(), *module.buffers()]
    kinds = [[name_of(tensor.dtype), list(tensor.shape)] for tensor in tensors]
    if find_unequal(torch.tensor([number_of(kinds)]), device).any():
        raise ConfigError("""build_model: parameters or buffers have other shapes or dtypes on
            some ranks: must be equal; give lazy layers their sizes""")
    own = torch.tensor([digest(tensor) for tensor in tensors], dtype=torch.int64)
    unequal = find_unequal(own, device).tolist()
    for tensor, differs in zip(tensors, unequal, strict=True):
        if differs:
            whole = tensor.detach().contiguous()
            dist.broadcast(bytes_of(whole), 0)  # as bytes: NCCL has no int16
            tensor.copy_(whole)


# torch 2.13 renames the option that turns off DDP's broadcast of buffers before every forward.
_DDP_OPTIONS = inspect.signature(TorchDDP).parameters
_SYNC_BUFFERS = (
    "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers"
)


class DistributedDataParallel(Strategy):
    """torch's DDP, whose gradient reduction also carries the other values that ranks agree on.

    The extras are a small parameter next to the model, which the optimizer, clipping and state_dict
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
        if hook in COMPRESSING and config.strategy.weights != "fp32":
            raise ConfigError(f"""strategy.comm_hook={hook}: compresses float32 gradients,
                and strategy.precision={precision} has none; use none or parameter_server""")
        if hook == "bf16" and choose_backend(config.dist, world) != "nccl":
            raise ConfigError("strategy.comm_hook=bf16: needs dist.backend=nccl; use fp16")

    @classmethod
    def build(cls, spec: ModelSpec) -> Strategy:
        """Build the strategy; on one rank SingleDevice gives the same numbers without a wrapper."""
        comm_hook = spec.config.strategy.comm_hook
        is_alone = spec.world.world_size == 1 and comm_hook == "none"
        return (SingleDevice if is_alone else cls)(spec)

    def __init__(self, spec: ModelSpec):
        super().__init__(spec)
        self._wrapped: Any = None
        self._extras = nn.Parameter(torch.zeros(2))
        self._unreached: list[nn.Parameter] = []  # by the loss alone, beside a task's other updates

    def prepare(self, batch: MicroBatch, objective: ObjectiveProtocol) -> None:
        if not dist.is_initialized():  # one process on a machine without a network
            hook = self.config.comm_hook
            raise ConfigError(f"strategy.comm_hook={hook}: needs a network interface; use none")
        before = BufferCopies(self.module)
        reached: list[torch.Tensor] = []
        trainable = [p for p in self.module.parameters() if p.requires_grad and not is_lazy(p)]
        hooks = (p.register_post_accumulate_grad_hook(reached.append) for p in trainable)
        with sandbox(keep_passes(self.module, before, has_large=False)), hooked(hooks):
            self._dry_run(batch, objective)
            self.statistics.find(self.module, before, self._any_rank)
            self._check_reached(objective)
            self._unreached = [p for p in self.tensors.trained if p.grad is None]
        is_compressed = self.config.comm_hook in COMPRESSING
        dtype = torch.float64 if is_compressed else self.precision.wide
        has_graph = self.config.find_unused_parameters
        carrier = _ModelWithExtras(self.module, 2 + sum(self.statistics.sizes), dtype, has_graph)
        self._extras = carrier.extras
        share_start(self.module, self.world.device)
        self._wrapped = TorchDDP(carrier, **self._switches())
        if self.config.comm_hook != "none":
            self._wrapped.register_comm_hook(*open_hook(self.config.comm_hook))
        # DDP reorders its buckets after the first backward, which changes the bits of sums over
        # three or more ranks, and what a hook keeps by bucket: there that backward is not a step.
        is_plain = self.config.comm_hook == "none" and not self.config.static_graph
        if self.world.world_size > 2 or not is_plain:
            with sandbox(keep_passes(self.module)):
                self.forward_backward([copied(batch)], objective)
        (reached or self.tensors.trained)[-1].register_post_accumulate_grad_hook(
            self.spec.reduce_begun
        )

    def forward_backward(self, batch: MicroBatches, objective: ObjectiveProtocol) -> torch.Tensor:
        last = len(batch)
        others = self._unreached if objective.others is None else objective.others
        if self.config.find_unused_parameters:
            others = ()  # DDP finds itself what has no gradient
        statistics = self.statistics
        if statistics.are_used:
            statistics.begin()
        for batch_number, (inputs, targets) in enumerate(batch, 1):
            if statistics.are_used:
                statistics.rewind()
            with nullcontext() if batch_number == last else self._wrapped.no_sync():
                with self.precision.autocast():
                    outputs, extras = call(self._wrapped, inputs, self.rows)
                    total, carried = objective(outputs, targets)
                if statistics.are_used:
                    statistics.note(targets, inputs)
                if batch_number == last and statistics.are_used and statistics.sizes:
                    parts = [part.detach().flatten() for part in statistics.read()]
                    carried = torch.cat([carried, *parts])
                root = self.precision.root(total, objective.scale)
                total = reaching(total, others if batch_number == last else ())
                if len(carried) < len(extras):
                    carried = pad(carried, (0, len(extras) - len(carried)))
                torch.autograd.backward([total, extras], [root, carried.to(extras)])
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
            "init_sync": False,  # see share_start
            _SYNC_BUFFERS: False,
            "gradient_as_bucket_view": True,
            "static_graph": block.static_graph,
            "find_unused_parameters": block.find_unused_parameters,
            "bucket_cap_mb": block.bucket_mb,
        }
        if accelerator.is_used(self.world.device) and block.devices_per_rank == 1:
            switches["device_ids"] = [self.world.device]
        return switches

    def _unload(self) -> torch.Tensor:
        """Return the carried totals, and write the statistics, from the averaged gradient."""
        gradient = self._extras.grad
        assert gradient is not None
        self._extras.grad = None
        if self.statistics.are_used and (sizes := self.statistics.sizes):
            self.statistics.write(gradient[2:].split(sizes))
            gradient = gradient[:2]
        return gradient * self.mesh.data_size


class _ModelWithExtras(nn.Module):
    """The model together with the extras, the parameter whose gradient carries other values.

    DDP reduces each dtype separately: extras whose dtype no gradient has are reduced alone.
    """

    def __init__(self, module: nn.Module, size: int, dtype: torch.dtype, has_graph: bool):
        super().__init__()
        self._has_graph = has_graph
        self.module = module
        device = next(p.device for p in module.parameters() if p.requires_grad)
        self.extras = nn.Parameter(torch.zeros(size, dtype=dtype, device=device))

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, torch.Tensor]:
        outputs = self.module(*args, **kwargs)
        # in a graph of its own only where DDP looks there for what is unused: 50 us
        return outputs, self.extras * 1 if self._has_graph else self.extras


STRATEGY = DistributedDataParallel
