"""dist.backend=mpi on torch's stock wheels: a process group over mpi4py, for tensors on the CPU.

Every operation is a nonblocking MPI operation, started in the calling thread. So MPI sees the
order of the program, which must be the same on all ranks, and every wait can time out. The main
thread and autograd's thread, which calls DDP's hooks, take turns: a lock is held during each call
into MPI, so THREAD_SERIALIZED is enough.

DDP's reductions are complete when its hook returns: they do not overlap with the rest of backward.
Completing them in another thread gained 10 to 20% of a step over loopback TCP with idle cores, and
nothing over shared memory. Hooks that start further reductions from a result, such as PowerSGD's,
must not do so in a separate thread.
"""

# mypy: disable-error-code="override, assignment"
# (torch's stubs name overloads that nothing calls)

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.base.errors import ConfigError, RunError

BACKEND_NAME = "mpi4py"  # torch reserves the name "mpi"
MPI: Any = None  # mpi4py.MPI, set by `register`: importing it starts MPI, which takes 0.25 s

Tensors = Sequence[Tensor]
Start = Callable[..., Any]

# Types that MPI reduces. Two-byte floats are sent as float32 and rounded once, at the end.
_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_REDUCIBLE = (torch.float64, torch.float32, *_INTEGERS)
_CAST = {torch.float16: torch.float32, torch.bfloat16: torch.float32, torch.bool: torch.uint8}
_OPS = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}
_OPS_OF_BOOL = {"SUM": "MAX", "PRODUCT": "MIN", "MIN": "MIN", "MAX": "MAX"}  # stored as 0 and 1
# Types for data that is only moved, by element size in bytes.
_MOVED_TYPES = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}

_lock = threading.Lock()  # held during every call into MPI
_abandoned: list[Any] = []  # requests that nobody waits for; they keep MPI's memory alive
_open_groups: set[MpiGroup] = set()


def register() -> str:
    """Register the backend with torch and start MPI; return the name for init_process_group.

    Raises ConfigError if mpi4py or the MPI library is missing, or if the library allows one thread
    only. Creating the group raises it if the ranks are not those of MPI.
    """
    global MPI
    if MPI is not None:
        return BACKEND_NAME
    try:
        import mpi4py

        mpi4py.rc.thread_level = "serialized"
        mpi4py.rc.finalize = False
        from mpi4py import MPI as library
    except (ImportError, RuntimeError, OSError) as error:
        raise ConfigError(f"""dist.backend=mpi:
            needs mpi4py: pip install 'lockstep-trainer[mpi]', and an MPI library such
            as Debian's libopenmpi-dev ({str(error).splitlines()[0]})""") from None
    if library.Query_thread() < library.THREAD_SERIALIZED:
        raise ConfigError("""dist.backend=mpi: this MPI library was built for one thread;
            use another, or gloo""")
    MPI = library
    dist.Backend.register_backend(BACKEND_NAME, _create, extended_api=True, devices=["cpu"])
    return BACKEND_NAME


def _create(options: Any, _: Any) -> MpiGroup:
    world = MPI.COMM_WORLD
    rank = options.group_rank
    size = options.group_size
    ranks = list(options.global_ranks_in_group or ())  # empty for the group of all
    if not ranks and world.size != size:
        raise ConfigError(f"""dist.backend=mpi: MPI has {world.size} rank{"s" * (world.size > 1)}
            but the run has {size}; start with mpirun -n {size}""")
    if not ranks and world.rank != rank:
        raise ConfigError(f"""dist.backend=mpi: this is rank {world.rank} of MPI
            and rank {rank} of the run; start with mpirun, and without RANK in the environment""")
    options.store.set(str(rank), "")  # Create_group would wait for a late rank without limit
    options.store.wait([str(other) for other in range(size)], options.timeout)
    with _lock:
        comm = world.Create_group(world.group.Incl(ranks or list(range(size))))
        comm.Set_errhandler(MPI.ERRORS_RETURN)
    return MpiGroup(rank, size, options.group_id, options.timeout, comm)


def _finalize(pid: int) -> None:
    """Call MPI_Finalize, which waits for all ranks, unless a group is open or an error occurred.

    mpirun treats an exit without it as a failure, whatever the exit code, and ends the ranks.
    """
    is_good = not _open_groups and not hasattr(sys, "last_value")
    if is_good and not MPI.Is_finalized() and os.getpid() == pid:
        MPI.Finalize()


class _Part(NamedTuple):
    """One MPI operation, started by `start`; consecutive parts of `wire` are the outputs."""

    start: Callable[[], Any]
    outputs: Tensors = ()
    wire: Tensor | None = None
    divisor: int = 1

    def finish(self) -> None:
        """Divide, and copy to the outputs unless MPI wrote to their memory directly."""
        if self.wire is None:
            return
        if self.divisor > 1:
            self.wire.div_(self.divisor)
        parts = self.wire.view(-1).split([tensor.numel() for tensor in self.outputs])
        for tensor, part in zip(self.outputs, parts, strict=True):
            if tensor.data_ptr() != part.data_ptr():
                tensor.detach().copy_(part.view(tensor.shape))


class _Work(dist.Work):
    """Pending operations. Only the waiting thread drives them."""

    def __init__(self, name: str, parts: Sequence[_Part], timeout: timedelta):
        super().__init__()
        self._name = name
        self._parts = parts
        self._timeout = timeout
        self._requests: list[Any] = []
        with _lock:
            self._requests.extend(part.start() for part in parts)

    def __del__(self) -> None:
        _abandoned.extend(self._requests)

    def is_completed(self) -> bool:
        with _lock:
            if self._requests and all(request.Test() for request in self._requests):
                self._requests = []
                for part in self._parts:
                    part.finish()
            return not self._requests

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Wait until all are complete. Raises RunError after the timeout (default: the group's)."""
        limit_s = (timeout or self._timeout).total_seconds()
        began = time.monotonic()
        while not self.is_completed():
            seconds = time.monotonic() - began
            if seconds > limit_s:
                raise RunError(f"""{self._name} over MPI:
                    the other ranks did not join within {limit_s:g} s (dist.timeout_s)""")
            if seconds < 1e-3:  # small messages complete fast, so do not sleep yet
                os.sched_yield()
            else:
                time.sleep(1e-4)
        return True

    def get_future(self) -> torch.futures.Future:
        self.wait()
        future: torch.futures.Future = torch.futures.Future()
        future.set_result([tensor for part in self._parts for tensor in part.outputs])
        return future


class MpiGroup(dist.ProcessGroup):
    """torch's collectives, each by MPI's of the same name; data that is only moved has any dtype.

    Names and arguments of the methods are those that torch.distributed and DDP's C++ code call.
    torch's Join is not supported: its C++ code keeps a work without its Python half, and crashes.
    """

    def __init__(self, rank: int, size: int, name: str, timeout: timedelta, comm: Any):
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name = name
        self._comm = comm
        self._timeout = timeout
        _open_groups.add(self)
        atexit.register(_finalize, os.getpid())

    def _get_backend(self, device: torch.device) -> MpiGroup:
        """Return itself: torch 2.15 calls this in batch_isend_irecv."""
        return self

    def getGroupName(self) -> str:
        return self._name

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def shutdown(self) -> None:
        if self in _open_groups:
            _open_groups.remove(self)
            with _lock:
                self._comm.Free()

    def _work(self, name: str, parts: Sequence[_Part]) -> _Work:
        return _Work(name, parts, self._timeout)

    def barrier(self, opts: Any = None) -> _Work:
        return self._work("barrier", [_Part(self._comm.Ibarrier)])

    def broadcast(self, tensors: Tensors, opts: Any) -> _Work:
        start = partial(self._comm.Ibcast, root=opts.rootRank)
        return self._work("broadcast", [_move(start, tensor) for tensor in tensors])

    def send(self, tensors: Tensors, dst: int, tag: int) -> _Work:
        start = partial(self._comm.Isend, dest=dst, tag=tag)
        return self._work("send", [_Part(partial(start, _message(_wire(t)))) for t in tensors])

    def recv(self, tensors: Tensors, src: int, tag: int) -> _Work:
        start = partial(self._comm.Irecv, source=src, tag=tag)
        return self._work("recv", [_move(start, tensor) for tensor in tensors])

    def allreduce(self, tensors: Tensors, opts: Any) -> _Work:
        start = self._comm.Iallreduce
        return self._work("all_reduce", [self._reduce(start, t, opts) for t in tensors])

    def reduce(self, tensors: Tensors, opts: Any) -> _Work:
        start = partial(self._comm.Ireduce, root=opts.rootRank)
        is_root = self.rank() == opts.rootRank
        return self._work("reduce", [self._reduce(start, t, opts, is_root) for t in tensors])

    def _reduce(self, start: Start, tensor: Tensor, opts: Any, has_output: bool = True) -> _Part:
        wire, op, divisor = self._prepare(tensor, opts)
        message = _message(wire, wire.dtype)
        if not has_output:
            return _Part(partial(start, message, None, op))
        return _Part(partial(start, MPI.IN_PLACE, message, op), [tensor], wire, divisor)

    def _prepare(self, tensor: Tensor, opts: Any) -> tuple[Tensor, Any, int]:
        """Return (the tensor that MPI reduces, MPI's operation, the divisor of the result)."""
        name = opts.reduceOp.op.name
        wire = _wire(tensor).to(_CAST.get(tensor.dtype, tensor.dtype))
        op = (_OPS_OF_BOOL if tensor.dtype == torch.bool else _OPS).get(name)
        is_mean_of_integers = name == "AVG" and not wire.is_floating_point()
        if op is None or is_mean_of_integers or wire.dtype not in _REDUCIBLE:
            raise ValueError(f"MPI has no {name} of {tensor.dtype}")
        return wire, getattr(MPI, op), self.size() if name == "AVG" else 1

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> _Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._work("reduce_scatter", [self._scatter_sums(o, i, opts) for o, i in pairs])

    def _scatter_sums(self, output: Tensor, inputs: Tensors, opts: Any) -> _Part:
        wire, op, divisor = self._prepare(_join(inputs), opts)
        own = wire.new_empty(output.numel())
        counts = [tensor.numel() for tensor in inputs]
        messages = [_message(tensor, wire.dtype) for tensor in (wire, own)]
        start = partial(self._comm.Ireduce_scatter, *messages, counts, op)
        return _Part(start, [output], own, divisor)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> _Work:
        pairs = zip(outputs, inputs, strict=True)
        rows = [i.reshape(self.size(), o.numel()).unbind() for o, i in pairs]
        return self.reduce_scatter(outputs, rows, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> _Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> _Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._work("all_gather", [_gather(self._comm.Iallgather, o, i) for o, i in pairs])

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> _Work:
        return self.allgather([[output] for output in outputs], inputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> _Work:
        return self.allgather([[output]], [input])

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> _Work:
        """Gather to the root; the other ranks pass no outputs."""
        start = partial(self._comm.Igather, root=opts.rootRank)
        pairs = zip(outputs or [[]], inputs, strict=True)
        return self._work("gather", [_gather(start, o, i) for o, i in pairs])

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> _Work:
        send = _message(_join(inputs[0])) if self.rank() == opts.rootRank else None
        start = partial(self._comm.Iscatter, send, root=opts.rootRank)
        return self._work("scatter", [_move(start, *outputs)])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Work:
        wire = _join(inputs)
        joined = wire.new_empty(sum(output.numel() for output in outputs))
        sent = [_message(wire), [tensor.numel() for tensor in inputs]]
        received = [_message(joined), [tensor.numel() for tensor in outputs]]
        start = partial(self._comm.Ialltoallv, sent, received)
        return self._work("all_to_all", [_Part(start, outputs, joined)])

    def all_to_all_single(
        self, output: Tensor, input: Tensor, of: list[int], to: list[int], opts: Any = None
    ) -> _Work:
        """Exchange rows: `of` and `to` are numbers of rows per rank, empty for equal parts."""
        outputs = output.split(of or [len(output) // self.size()] * self.size())
        return self.alltoall(outputs, input.split(to or [len(input) // self.size()] * self.size()))

    allreduce_coalesced = allreduce
    # The names before torch 2.13:
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    alltoall_base = all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _wire(tensor: Tensor) -> Tensor:
    """Return the tensor itself if MPI can read and write its memory, else a copy."""
    if tensor.device.type != "cpu":
        raise ConfigError(f"""dist.backend=mpi:
            carries CPU tensors only, but one is on {tensor.device}; use nccl""")
    return tensor.detach().contiguous()


def _join(tensors: Tensors) -> Tensor:
    return torch.cat([_wire(tensor).view(-1) for tensor in tensors])


def _message(wire: Tensor, dtype: torch.dtype | None = None) -> Any:
    """Return the memory as an array for MPI; the request keeps it alive while MPI uses it."""
    if wire.numel() >= 2**31:
        raise ConfigError(f"""dist.backend=mpi: a tensor has {wire.numel()} elements;
            MPI allows at most 2**31 - 1; use gloo""")
    return wire.view(-1).view(dtype or _MOVED_TYPES[wire.itemsize]).numpy()


def _move(start: Start, tensor: Tensor) -> _Part:
    wire = _wire(tensor)
    return _Part(partial(start, _message(wire)), [tensor], wire)


def _gather(start: Start, outputs: Tensors, tensor: Tensor) -> _Part:
    wire = _wire(tensor)
    joined = wire.new_empty(sum(output.numel() for output in outputs))
    start = partial(start, _message(wire), _message(joined))
    return _Part(start, outputs, joined)
