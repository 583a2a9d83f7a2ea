"""Backend "simccl" for tests: NCCL's rules for tensors of the simulated accelerator, over gloo.

It refuses tensors that are not on the device, dtypes and operations that NCCL does not have, a
device that two ranks use, another order of collectives, and a rank that does not come. Memory that
is used before `wait` is a race. `violations` has what NCCL may survive but does not promise.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllToAllOptions

from harness.simulated_accelerator import NAME, module
from harness.simulated_memory import block_of, to_cpu
from harness.simulated_streams import note_launch, note_wait

BACKEND = "simccl"
_DTYPES = {
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32),
    *(torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.float8_e5m2),
}
violations: list[str] = []
_Tensors = Sequence[torch.Tensor]


class CollectiveError(RuntimeError):
    """A call that NCCL refuses, or that would hang."""


class Work(dist.Work):
    """A collective under way: until it is waited for, its memory belongs to it."""

    def __init__(
        self, name: str, outputs: _Tensors, inputs: _Tensors = (), finish: Any = None
    ) -> None:
        super().__init__()
        self._outputs, self._finish = list(outputs), finish
        self._held = [block_of(t) for t in (*inputs, *outputs) if t.numel()]
        for how, tensors in (("read", inputs), ("written", outputs)):
            for tensor in tensors:
                block_of(tensor).held_by = f"{how} by {name}"

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        finish, self._finish = self._finish, None
        if finish is not None:
            finish()
        for block in self._held:
            block.held_by = ""
        return True

    block_current_stream = synchronize = wait

    def is_completed(self) -> bool:
        return self._finish is None

    def is_success(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return self._outputs

    def get_future(self) -> torch.futures.Future:
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self._outputs)
        return future


class Group(dist.ProcessGroup):
    """A communicator: its ranks call the same collectives in one order."""

    supports_splitting = supports_coalescing = False

    def __init__(self, options: Any):
        rank, size = options.group_rank, options.group_size
        super().__init__(rank, size)
        self._name, self._limit, self._store = options.group_id, options.timeout, options.store
        store = dist.PrefixStore("gloo", options.store)
        self._gloo = dist.ProcessGroupGloo(store, rank, size, self._limit)
        self._calls = 0
        self._pairs: dict[int, int] = {}
        self._devices: set[torch.device] = set()

    def getBackendName(self) -> str:  # torch's name
        return BACKEND

    def getGroupName(self) -> str:
        return self._name

    def _get_backend(self, device: torch.device) -> Group:
        return self

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(NAME)]

    def shutdown(self) -> None:
        """Nothing stays open."""

    # What NCCL refuses.

    def _check(self, name: str, tensors: _Tensors, op: str = "") -> None:
        for t in tensors:
            if t.device.type != NAME or t.is_sparse:
                raise CollectiveError(f"{name}: Tensors must be CUDA and dense, not on {t.device}")
            is_last = t.dim() == 4 and t.is_contiguous(memory_format=torch.channels_last)
            if not t.is_contiguous() and not is_last:
                raise CollectiveError(f"{name}: Tensors must be contiguous")
            if t.dtype not in _DTYPES:
                raise CollectiveError(f"{name}: Unconvertible NCCL type {t.dtype}")
            if (bound := self._bound()) not in (None, t.device):
                on = f"the group is bound to {bound}, the tensor is on {t.device}"
                raise CollectiveError(f"Attempt to perform collective on tensor: {on}")
            if t.device not in self._devices:  # a communicator for each device
                self._open(t.device)
        if op in ("BAND", "BOR", "BXOR"):
            raise CollectiveError(f"Cannot use ReduceOp.{op} with NCCL")

    def _bound(self) -> torch.device | None:
        """Return the device of init_process_group(device_id=...), as on every group."""
        return getattr(dist.group.WORLD, "bound_device_id", None)

    def _open(self, device: torch.device) -> None:
        mine = f"{socket.gethostname()} {module.get_device_properties(device).uuid}"
        every = self._share(f"device/{len(self._devices)}", mine)
        if every.count(mine) > 1:
            ranks = [rank for rank, theirs in enumerate(every) if theirs == mine]
            raise CollectiveError(f"Duplicate GPU detected : ranks {ranks} on {device}")
        self._devices.add(device)

    def _share(self, key: str, mine: str) -> list[str]:
        """Return what each rank has said under a key; raise if one says nothing in time."""
        keys = [f"{key}/{rank}" for rank in range(self.size())]
        self._store.set(keys[self.rank()], mine)
        try:
            self._store.wait(keys, self._limit)
        except dist.DistStoreError:
            missing = [rank for rank, k in enumerate(keys) if not self._store.check([k])]
            late = f"{key} of group {self._name}: ranks {missing} did not join"
            raise dist.DistBackendError(f"Watchdog caught collective timeout: {late}") from None
        return [value.decode() for value in self._store.multi_get(keys)]

    def _agree(self, *signature: Any) -> None:
        """Raise unless all ranks call the same collective now."""
        note_launch(f"nccl:{signature[0]}")
        self._calls += 1
        mine = json.dumps(signature, default=str)
        every = self._share(f"call/{self._calls}", mine)
        other = next((rank for rank, theirs in enumerate(every) if theirs != mine), None)
        if other is not None:
            calls = f"rank {self.rank()} calls {mine}, rank {other} calls {every[other]}"
            raise CollectiveError(f"collective {self._calls} of group {self._name}: {calls}")
        if self._calls > 2:
            self._store.delete_key(f"call/{self._calls - 2}/{self.rank()}")

    # The collectives, on copies in host memory.

    def _sum(self, tensor: torch.Tensor, options: Any) -> torch.Tensor:
        """Return the reduction of a tensor over the ranks, on the host, in its dtype."""
        op = _name_of(options.reduceOp)
        data = to_cpu(tensor).clone(memory_format=torch.contiguous_format)
        is_narrow = tensor.dtype in (torch.float16, torch.bfloat16)
        wide = data.float() if is_narrow else data.byte() if data.dtype == torch.bool else data
        reduce = dist.AllreduceOptions()
        is_any = data.dtype == torch.bool and op == "SUM"
        reduce.reduceOp = dist.ReduceOp.MAX if is_any else dist.ReduceOp.SUM
        if op not in ("SUM", "AVG"):
            reduce.reduceOp = options.reduceOp
        self._gloo.allreduce([wide], reduce).wait()
        return (wide / self.size() if op == "AVG" else wide).to(tensor.dtype)

    def _gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the bytes of the tensors of all ranks, which have one size."""
        mine = to_cpu(tensor).contiguous().view(-1).view(torch.uint8).clone()
        boxes = [torch.empty_like(mine) for _ in range(self.size())]
        self._gloo.allgather([boxes], [mine], AllgatherOptions()).wait()
        return boxes

    def allreduce(self, tensors: _Tensors, options: Any = None) -> Work:
        options = options or dist.AllreduceOptions()
        self._check("all_reduce", tensors, _name_of(options.reduceOp))
        sizes = [(t.numel(), t.dtype) for t in tensors]
        self._agree("all_reduce", _name_of(options.reduceOp), sizes)
        for t in tensors:
            to_cpu(t).copy_(self._sum(t, options))
        return Work("all_reduce", tensors)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: _Tensors, options: Any) -> Work:
        self._check("reduce", tensors, _name_of(options.reduceOp))
        sizes = [(t.numel(), t.dtype) for t in tensors]
        self._agree("reduce", _name_of(options.reduceOp), options.rootRank, sizes)
        for t in tensors:
            total = self._sum(t, options)
            if self.rank() == options.rootRank:
                to_cpu(t).copy_(total)
        return Work("reduce", tensors)

    def broadcast(self, tensors: _Tensors, options: Any) -> Work:
        self._check("broadcast", tensors)
        self._agree("broadcast", options.rootRank, [(t.numel(), t.dtype) for t in tensors])
        for t in tensors:
            _put(t, self._gather(t)[options.rootRank])
        return Work("broadcast", tensors)

    def allgather(self, outputs: Sequence[_Tensors], inputs: _Tensors, options: Any = None) -> Work:
        for outs, mine in zip(outputs, inputs, strict=True):
            self._check("all_gather", [mine, *outs])
            self._agree("all_gather", [(t.numel(), t.dtype) for t in outs])
            for out, box in zip(outs, self._gather(mine), strict=True):
                _put(out, box)
        return Work("all_gather", [t for outs in outputs for t in outs], inputs)

    def all_gather_single(self, output: Any, mine: Any, options: Any = None) -> Work:
        self._check("all_gather_single", [output, mine])
        if output.numel() != mine.numel() * self.size() or output.dtype != mine.dtype:
            raise CollectiveError("all_gather_single: the output must have the inputs of all ranks")
        self._agree("all_gather_single", mine.numel(), mine.dtype)
        _put(output, torch.cat(self._gather(mine)))
        return Work("all_gather_single", [output], [mine])

    def reduce_scatter_single(self, output: Any, mine: Any, options: Any = None) -> Work:
        options = options or dist.ReduceScatterOptions()
        op = _name_of(options.reduceOp)
        self._check("reduce_scatter", [output, mine], op)
        if mine.numel() != output.numel() * self.size() or output.dtype != mine.dtype:
            raise CollectiveError("reduce_scatter: the input must have the outputs of all ranks")
        self._agree("reduce_scatter", op, output.numel(), output.dtype)
        part = self._sum(mine, options).view(self.size(), -1)[self.rank()]
        to_cpu(output).view(-1).copy_(part)
        return Work("reduce_scatter", [output], [mine])

    def gather(self, outputs: Sequence[_Tensors], inputs: _Tensors, options: Any) -> Work:
        outs = list(outputs[0]) if outputs and self.rank() == options.rootRank else []
        self._check("gather", [*inputs, *outs])
        self._agree("gather", options.rootRank, inputs[0].numel(), inputs[0].dtype)
        for out, box in zip(outs, self._gather(inputs[0]), strict=False):
            _put(out, box)
        return Work("gather", outs, inputs)

    def scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], options: Any) -> Work:
        given = list(inputs[0]) if inputs and self.rank() == options.rootRank else []
        self._check("scatter", [*outputs, *given])
        self._agree("scatter", options.rootRank, outputs[0].numel(), outputs[0].dtype)
        whole = torch.cat([t.reshape(-1) for t in given or [outputs[0]] * self.size()])
        parts = self._gather(whole)[options.rootRank].chunk(self.size())
        _put(outputs[0], parts[self.rank()])
        return Work("scatter", outputs, given)

    def all_to_all_single(
        self, output: Any, mine: Any, of: Any = (), to: Any = (), options: Any = None
    ) -> Work:
        self._check("all_to_all_single", [output, mine])
        self._agree("all_to_all_single", mine.dtype)
        width = mine.element_size() * mine.numel() // max(1, len(mine))
        of = [n * width for n in of or [len(output) // self.size()] * self.size()]
        to = [n * width for n in to or [len(mine) // self.size()] * self.size()]
        got = torch.empty(sum(of), dtype=torch.uint8)
        data = to_cpu(mine).contiguous().view(-1).view(torch.uint8).clone()
        self._gloo.alltoall_base(got, data, of, to, AllToAllOptions()).wait()
        _put(output, got)
        return Work("all_to_all_single", [output], [mine])

    def barrier(self, opts: Any = None) -> Work:
        self._agree("barrier")
        note_wait("barrier")
        return Work("barrier", [])

    # NCCL runs the operations of a pair of ranks in one stream: their order must be mirrored.

    def send(self, tensors: _Tensors, peer: int, tag: int = 0) -> Work:
        data = to_cpu(tensors[0]).contiguous().view(-1).view(torch.uint8).clone()
        finish = self._paired("send", tensors[0], peer)
        work = self._gloo.send([data], peer, tag)
        return Work("send", [], tensors, lambda: (finish(), work.wait()))

    def recv(self, tensors: _Tensors, peer: int, tag: int = 0) -> Work:
        finish = self._paired("recv", tensors[0], peer)
        nbytes = tensors[0].numel() * tensors[0].element_size()
        data = torch.empty(nbytes, dtype=torch.uint8)
        work = self._gloo.recv([data], peer, tag)

        def end() -> None:
            finish()
            work.wait()
            _put(tensors[0], data)

        return Work("recv", tensors, (), end)

    def _paired(self, what: str, tensor: torch.Tensor, peer: int) -> Callable[[], None]:
        """Count an operation of a pair; return what checks later that the peer mirrors it."""
        self._check(what, [tensor])
        note_launch(f"nccl:{what}")
        number = self._pairs[peer] = self._pairs.get(peer, 0) + 1
        pair = f"{min(peer, self.rank())}-{max(peer, self.rank())}/{number}"
        self._store.set(f"pair/{pair}/{self.rank()}", what)

        def check() -> None:
            key = f"pair/{pair}/{peer}"
            try:
                self._store.wait([key], self._limit)
            except dist.DistStoreError:
                late = f"{what} {pair} of group {self._name}: rank {peer} issued nothing"
                raise dist.DistBackendError(late) from None
            if self._store.get(key).decode() == what:
                line = f"operation {pair} of group {self._name}: both ranks {what}"
                violations.append(f"{line}, which deadlocks on NCCL unless it is small")

        return check

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single


def _name_of(op: Any) -> str:
    return str(getattr(op, "op", op)).rpartition(".")[2]


def _put(tensor: torch.Tensor, data: torch.Tensor) -> None:
    """Write bytes into a tensor of the device."""
    to_cpu(tensor).copy_(data.view(tensor.dtype).view(tensor.shape))


def register() -> None:
    """Register the backend in this process, for devices that are registered before."""

    def create(options: Any, _: Any) -> Group:
        return Group(options)

    backend: Any = dist.Backend
    backend.register_backend(BACKEND, create, extended_api=True, devices=[NAME])
