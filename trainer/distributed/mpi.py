"""dist.backend=mpi on torch's stock wheels: a process group over mpi4py, for tensors on the CPU.

Every operation is one of MPI's nonblocking ones, started in the thread that asks for it: MPI sees the order of the
program, which must be the same on all ranks, and every wait can end in a timeout. The main thread and autograd's, which
call DDP's hooks, take turns: a lock is held over each call into MPI, for which THREAD_SERIALIZED is enough.

DDP's reductions are complete when its hook returns: they do not overlap with the rest of backward. Completed by a
thread behind it, they gained 10 to 20% of a step over loopback TCP with idle cores and nothing over shared memory; and
hooks that go on from a result, as PowerSGD's does with further reductions, must not do so in a thread of their own.
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

from trainer.errors import ConfigError, RunError

NAME = "mpi4py"  # torch keeps "mpi" for itself
MPI: Any = None  # mpi4py.MPI from `register` on: importing it starts MPI, which takes a quarter of a second

Tensors = Sequence[Tensor]

# What MPI can reduce. Two-byte floats it does not know: they go as float32 and are rounded once, at the end.
_TYPES = {torch.float64: "DOUBLE", torch.float32: "FLOAT", torch.bool: "UINT8_T"}
_TYPES |= {
    getattr(torch, name): f"{name.upper()}_T"
    for name in ("int64", "int32", "int16", "int8", "uint8")
}
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_OPS = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}
_OPS_OF_BOOL = {
    "SUM": "MAX",
    "PRODUCT": "MIN",
    "MIN": "MIN",
    "MAX": "MAX",
}  # of bytes that are 0 or 1
_UNITS = {
    1: "BYTE",
    2: "INT16_T",
    4: "INT32_T",
    8: "INT64_T",
    16: "C_DOUBLE_COMPLEX",
}  # of what is only moved

_turn = threading.Lock()  # held over every call into MPI
_abandoned: list[
    Any
] = []  # requests that nobody waits for any more; they hold the memory that MPI writes to
_standing: set[MpiGroup] = set()  # not shut down


def register() -> str:
    """Make the backend known to torch, and start MPI; the backend's name for `dist.init_process_group`.

    Raises ConfigError when mpi4py or the MPI library is missing, or the library allows one thread only. Forming the
    group raises it when the ranks are not those of MPI.
    """
    global MPI
    if MPI is not None:
        return NAME
    try:
        import mpi4py

        mpi4py.rc.thread_level, mpi4py.rc.finalize = "serialized", False
        from mpi4py import MPI as library
    except (ImportError, RuntimeError, OSError) as error:
        advice = "pip install 'lockstep-trainer[mpi]', and an MPI library such as Debian's libopenmpi-dev"
        reason = str(error).splitlines()[0]
        raise ConfigError(f"dist.backend=mpi: needs mpi4py: {advice} ({reason})") from None
    if library.Query_thread() < library.THREAD_SERIALIZED:
        raise ConfigError(
            "dist.backend=mpi: this MPI library was built for one thread; use another, or gloo"
        )
    MPI = library
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    return NAME


def _create(options: Any, _: Any) -> MpiGroup:
    world, rank, size = MPI.COMM_WORLD, options.group_rank, options.group_size
    ranks = options.global_ranks_in_group  # none for the group of all
    if not ranks and world.size != size:
        there = f"MPI has {world.size} rank{'s' * (world.size > 1)}"
        raise ConfigError(
            f"dist.backend=mpi: {there} and the run has {size}; start with mpirun -n {size}"
        )
    if not ranks and world.rank != rank:
        differ = f"this is rank {world.rank} of MPI and rank {rank} of the run"
        raise ConfigError(
            f"dist.backend=mpi: {differ}; start with mpirun, and without RANK in the environment"
        )
    options.store.set(str(rank), "")  # Create_group would wait for a late rank for ever
    options.store.wait([str(other) for other in range(size)], options.timeout)
    with _turn:
        comm = world.Create_group(world.group.Incl(list(ranks or range(size))))
        comm.Set_errhandler(MPI.ERRORS_RETURN)
    return MpiGroup(rank, size, options.group_id, options.timeout, comm)


def _end(pid: int) -> None:
    """MPI_Finalize waits for all ranks: it is for a process that has shut its groups down and met no exception since.

    An end without it, whatever the exit code, is a failure to mpirun, which then ends the other ranks.
    """
    is_good = not _standing and not hasattr(sys, "last_value")
    if is_good and not MPI.Is_finalized() and os.getpid() == pid:
        MPI.Finalize()


class _Part(NamedTuple):
    """One operation of MPI: `start` gives its request; `finish` then writes the outputs not written in place."""

    start: Callable[[], Any]
    outputs: Tensors = ()
    finish: Callable[[], None] = lambda: None


class _Work(dist.Work):
    """Operations under way. Whoever waits drives them, and nobody else."""

    def __init__(self, name: str, parts: Sequence[_Part], timeout: timedelta):
        super().__init__()
        self._name, self._parts, self._timeout = name, parts, timeout
        self._requests: list[Any] = []
        with _turn:
            self._requests.extend(part.start() for part in parts)

    def __del__(self) -> None:
        _abandoned.extend(self._requests)

    def is_completed(self) -> bool:
        with _turn:
            if self._requests and all(request.Test() for request in self._requests):
                self._requests = []
                for part in self._parts:
                    part.finish()
            return not self._requests

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        """Raises RunError after the timeout, the group's if none is given."""
        limit_s, since = (timeout or self._timeout).total_seconds(), time.monotonic()
        while not self.is_completed():
            if time.monotonic() - since > limit_s:
                late = f"the other ranks did not join within {limit_s:g} s (dist.timeout_s)"
                raise RunError(f"{self._name} over MPI: {late}")
            if (
                time.monotonic() - since < 1e-3
            ):  # small messages need to be asked for at once; then others may work
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
    """torch's collectives, each by MPI's of the same name. What is only moved goes unseen, whatever its dtype.

    Names and arguments of the methods are those that torch.distributed and DDP's C++ call. Not carried: torch's Join,
    whose C++ keeps a work without its Python half, and crashes.
    """

    def __init__(self, rank: int, size: int, name: str, timeout: timedelta, comm: Any):
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._name, self._comm, self._timeout = name, comm, timeout
        _standing.add(self)
        atexit.register(_end, os.getpid())

    def getGroupName(self) -> str:
        return self._name

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def shutdown(self) -> None:
        if self in _standing:
            _standing.remove(self)
            with _turn:
                self._comm.Free()

    def _work(self, name: str, parts: Sequence[_Part]) -> _Work:
        return _Work(name, parts, self._timeout)

    def barrier(self, opts: Any = None) -> _Work:
        return self._work("barrier", [_Part(self._comm.Ibarrier)])

    def broadcast(self, tensors: Tensors, opts: Any) -> _Work:
        start = partial(self._comm.Ibcast, root=opts.rootRank)
        return self._work("broadcast", [_moved(start, tensor) for tensor in tensors])

    def send(self, tensors: Tensors, dst: int, tag: int) -> _Work:
        start = partial(self._comm.Isend, dest=dst, tag=tag)
        return self._work(
            "send", [_Part(partial(start, _message(_wire(tensor)))) for tensor in tensors]
        )

    def recv(self, tensors: Tensors, src: int, tag: int) -> _Work:
        start = partial(self._comm.Irecv, source=src, tag=tag)
        return self._work("recv", [_moved(start, tensor) for tensor in tensors])

    def allreduce(self, tensors: Tensors, opts: Any) -> _Work:
        return self._work(
            "all_reduce", [self._reduced(self._comm.Iallreduce, tensor, opts) for tensor in tensors]
        )

    def reduce(self, tensors: Tensors, opts: Any) -> _Work:
        start, is_here = (
            partial(self._comm.Ireduce, root=opts.rootRank),
            self.rank() == opts.rootRank,
        )
        return self._work(
            "reduce", [self._reduced(start, tensor, opts, is_here) for tensor in tensors]
        )

    def _reduced(
        self, start: Callable[..., Any], tensor: Tensor, opts: Any, is_here: bool = True
    ) -> _Part:
        wire, message, op = _to_reduce(tensor, opts)
        if not is_here:
            return _Part(partial(start, message, None, op))
        return _Part(
            partial(start, MPI.IN_PLACE, message, op),
            [tensor],
            partial(self._finish, tensor, wire, opts),
        )

    def _finish(self, tensor: Tensor, wire: Tensor, opts: Any) -> None:
        if opts.reduceOp.op.name == "AVG":
            wire.div_(self.size())
        _write([tensor], wire)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> _Work:
        return self._work(
            "reduce_scatter",
            [self._shared(o, i, opts) for o, i in zip(outputs, inputs, strict=True)],
        )

    def _shared(self, output: Tensor, inputs: Tensors, opts: Any) -> _Part:
        wire, (memory, kind), op = _to_reduce(_join(inputs), opts)
        own, counts = wire.new_empty(output.numel()), [tensor.numel() for tensor in inputs]
        start = partial(
            self._comm.Ireduce_scatter, [memory, kind], [_message(own)[0], kind], counts, op
        )
        return _Part(start, [output], partial(self._finish, output, own, opts))

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any
    ) -> _Work:
        rows = [
            i.reshape(self.size(), o.numel()).unbind() for o, i in zip(outputs, inputs, strict=True)
        ]
        return self.reduce_scatter(outputs, rows, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> _Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> _Work:
        start = self._comm.Iallgather
        return self._work(
            "all_gather", [_gathered(start, o, i) for o, i in zip(outputs, inputs, strict=True)]
        )

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: Any = None
    ) -> _Work:
        return self.allgather([[output] for output in outputs], inputs)

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> _Work:
        return self.allgather([[output]], [input])

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> _Work:
        """Only the root has outputs."""
        start, outputs = partial(self._comm.Igather, root=opts.rootRank), outputs or [[]]
        return self._work(
            "gather", [_gathered(start, o, i) for o, i in zip(outputs, inputs, strict=True)]
        )

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> _Work:
        send = _message(_join(inputs[0])) if self.rank() == opts.rootRank else None
        return self._work(
            "scatter", [_moved(partial(self._comm.Iscatter, send, root=opts.rootRank), *outputs)]
        )

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Work:
        wire = _join(inputs)
        joined = wire.new_empty(sum(output.numel() for output in outputs))
        (memory, kind), (own, _) = _message(wire), _message(joined)
        counts, own_counts = (
            [tensor.numel() for tensor in tensors] for tensors in (inputs, outputs)
        )
        start = partial(self._comm.Ialltoallv, [memory, counts, kind], [own, own_counts, kind])
        return self._work("all_to_all", [_Part(start, outputs, partial(_write, outputs, joined))])

    def all_to_all_single(
        self, output: Tensor, input: Tensor, of: list[int], to: list[int], opts: Any = None
    ) -> _Work:
        """Numbers of rows of each rank and to each rank; none given is as many for each."""
        outputs = output.split(of or [len(output) // self.size()] * self.size())
        return self.alltoall(outputs, input.split(to or [len(input) // self.size()] * self.size()))

    allreduce_coalesced = allreduce
    # what torch before 2.13 calls them
    _allgather_base, _reduce_scatter_base, alltoall_base = (
        all_gather_single,
        reduce_scatter_single,
        all_to_all_single,
    )
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _wire(tensor: Tensor) -> Tensor:
    """The tensor itself where MPI can read and write its memory, else a copy."""
    if tensor.device.type != "cpu":
        raise ConfigError(
            f"dist.backend=mpi: carries tensors on the CPU, and one is on {tensor.device}; use nccl"
        )
    return tensor.detach().contiguous()


def _join(tensors: Tensors) -> Tensor:
    return torch.cat([_wire(tensor).view(-1) for tensor in tensors])


def _message(wire: Tensor, kind: str | None = None) -> tuple[Any, Any]:
    """(memory, MPI's type); the request holds the memory for as long as MPI uses it."""
    if wire.numel() >= 2**31:
        raise ConfigError(
            f"dist.backend=mpi: a tensor of {wire.numel()} elements; MPI counts to 2**31 - 1; use gloo"
        )
    return wire.view(-1).view(torch.uint8).numpy(), getattr(MPI, kind or _UNITS[wire.itemsize])


def _to_reduce(tensor: Tensor, opts: Any) -> tuple[Tensor, tuple[Any, Any], Any]:
    """(the tensor that MPI reduces, its message, MPI's operation)."""
    name, wire = opts.reduceOp.op.name, _wire(tensor).to(_WIDER.get(tensor.dtype, tensor.dtype))
    op = (_OPS_OF_BOOL if wire.dtype == torch.bool else _OPS).get(name)
    if op is None or wire.dtype not in _TYPES or (name == "AVG" and not wire.is_floating_point()):
        raise ValueError(f"MPI has no {name} of {tensor.dtype}")
    return wire, _message(wire, _TYPES[wire.dtype]), getattr(MPI, op)


def _moved(start: Callable[..., Any], tensor: Tensor) -> _Part:
    wire = _wire(tensor)
    return _Part(partial(start, _message(wire)), [tensor], partial(_write, [tensor], wire))


def _gathered(start: Callable[..., Any], outputs: Tensors, tensor: Tensor) -> _Part:
    wire = _wire(tensor)
    joined = wire.new_empty(sum(output.numel() for output in outputs))
    return _Part(
        partial(start, _message(wire), _message(joined)), outputs, partial(_write, outputs, joined)
    )


def _write(tensors: Tensors, wire: Tensor) -> None:
    """Into the tensors what stands in `wire` one after the other, unless it is their memory."""
    if len(tensors) == 1 and tensors[0].data_ptr() == wire.data_ptr():
        return
    for tensor, part in zip(
        tensors, wire.view(-1).split([t.numel() for t in tensors]), strict=True
    ):
        tensor.detach().copy_(part.view(tensor.shape))
