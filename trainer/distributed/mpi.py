"""dist.backend=mpi on torch's stock wheels: a process group over mpi4py, for tensors on the CPU.

Every operation is one of MPI's nonblocking ones, started in the thread that asks for it, so MPI sees them in the order
of the program, which must be the same on all ranks. One lock is held over each call into MPI: the main thread,
autograd's threads, which call DDP's reductions, and the one that completes these behind backward take turns, for which
THREAD_SERIALIZED is enough. No operation blocks under the lock, so every wait can end in a timeout.
"""

# mypy: disable-error-code="override, assignment"
# (torch's stubs name overloads that nothing calls)

from __future__ import annotations

import atexit
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from trainer.errors import ConfigError, RunError

NAME = "mpi4py"  # torch keeps "mpi" for itself
MPI: Any = None  # mpi4py.MPI from `register` on: importing it starts MPI, which takes a quarter of a second

# What MPI can reduce. Two-byte floats it does not know: they go as float32 and are rounded once, at the end.
_TYPES = {
    torch.float64: "DOUBLE",
    torch.float32: "FLOAT",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.int16: "INT16_T",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.bool: "UINT8_T",
}
_UNITS = {1: "BYTE", 2: "INT16_T", 4: "INT32_T", 8: "INT64_T", 16: "C_DOUBLE_COMPLEX"}  # of what is only moved
_WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}
_OPS = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}
_OPS |= {name: name for name in ("BAND", "BOR", "BXOR")}
_OF_BOOL = {"SUM": "MAX", "PROD": "MIN"}  # of bytes that are 0 or 1

Tensors = Sequence[torch.Tensor]

_turn = threading.Lock()  # held over every call into MPI
_behind: list[_Work] = []  # what a thread completes behind backward; there is one while there is such work
_abandoned: deque[list[Any]] = deque()  # requests that nobody waits for any more; they hold the memory MPI writes to
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
        raise ConfigError("dist.backend=mpi: this MPI library was built for one thread; use another, or gloo")
    MPI = library
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu"])
    return NAME


def _create(options: Any, _: Any) -> MpiGroup:
    world, rank, size = MPI.COMM_WORLD, options.group_rank, options.group_size
    ranks = options.global_ranks_in_group  # none for the group of all
    if not ranks and world.size != size:
        there = f"MPI has {world.size} rank{'s' * (world.size > 1)}"
        raise ConfigError(f"dist.backend=mpi: {there} and the run has {size}; start with mpirun -n {size}")
    if not ranks and world.rank != rank:
        differ = f"this is rank {world.rank} of MPI and rank {rank} of the run"
        raise ConfigError(f"dist.backend=mpi: {differ}; start with mpirun, and without RANK in the environment")
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
    outputs: Sequence[torch.Tensor] = ()
    finish: Callable[[], None] = lambda: None


class _Work(dist.Work):
    """Operations under way. Whoever waits drives them, and nobody else, but for a future that C++ waits for."""

    def __init__(self, name: str, parts: Sequence[_Part], timeout: timedelta):
        super().__init__()
        self._name, self._parts, self._timeout, self._began = name, parts, timeout, time.monotonic()
        self._is_done = False
        self._error: Exception | None = None
        self._future: _Future | None = None
        self._status = MPI.Status()
        self._requests: list[Any] = []
        with _turn:
            for _ in range(len(_abandoned)):
                if not _are_done(requests := _abandoned.popleft()):
                    _abandoned.append(requests)
            for part in parts:
                self._requests.append(part.start())

    def __del__(self) -> None:
        if self._requests:
            _abandoned.append(self._requests)

    def is_completed(self) -> bool:
        """Lets MPI go on. Ends the work when it is done, has failed, or took longer than its timeout."""
        with _turn:
            if self._is_done:
                return True
            try:
                self._is_done = self._advance()
            except Exception as error:
                self._is_done, self._error = True, error
            if not self._is_done:
                return False
            future, self._future = self._future, None  # no cycle, which would keep the tensors
        if future is not None:
            future.complete()
        return True

    def _advance(self) -> bool:
        if _are_done(self._requests, self._status):
            self._requests = []
            for part in self._parts:
                part.finish()
            return True
        limit_s = self._timeout.total_seconds()
        if time.monotonic() - self._began > limit_s:
            raise RunError(f"{self._name} over MPI: the other ranks did not join within {limit_s:g} s (dist.timeout_s)")
        return False

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._timeout = timeout or self._timeout
        self._drive(math.inf)
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future:
        self._drive(1e-4)  # small reductions end within that time, and waking a thread takes twice as long
        with _turn:
            if self._future is not None:
                return self._future
            future = _Future(self)
            if not self._is_done:
                self._future = future
                _behind.append(self)
                if len(_behind) == 1:
                    threading.Thread(target=_complete_behind, name="mpi", daemon=True).start()
                return future
        future.complete()
        return future

    def _drive(self, limit_s: float) -> None:
        began = time.monotonic()
        while not self.is_completed() and time.monotonic() - began < limit_s:
            _pause(began)

    def outputs(self) -> list[torch.Tensor]:
        return [tensor for part in self._parts for tensor in part.outputs]

    def _source_rank(self) -> int:
        return self._status.source


def _are_done(requests: list[Any], status: Any = None) -> bool:
    return all(request.Test(status) for request in requests)


def _complete_behind() -> None:
    began = time.monotonic()
    while True:
        with _turn:
            _behind[:] = [work for work in _behind if not work._is_done]
            if not _behind:
                return
            works = list(_behind)
        if any(work.is_completed() for work in works):
            began = time.monotonic()
        else:
            _pause(began)


def _pause(began: float) -> None:
    """A millisecond of asking again at once, which small messages need; then the core is for others."""
    if time.monotonic() - began < 1e-3:
        os.sched_yield()
    else:
        time.sleep(1e-4)


class _Future(torch.futures.Future):
    """DDP waits for it in C++, at the end of backward. Python that asks for its value has it waited for first.

    A hook that goes on from the value, as PowerSGD's does with further reductions, thus does so in its own thread, and
    in the same order on every rank. Called back by the thread behind, it starts them in any order, and hangs.
    """

    def __init__(self, work: _Work):
        super().__init__()
        self._work = work

    def complete(self) -> None:
        error = self._work._error
        self.set_result(self._work.outputs() if error is None else _Failure(error))

    def wait(self) -> Any:
        self._work.wait()
        return super().wait()  # the work is done a little before its future

    def value(self) -> Any:
        return self.wait()

    def then(self, callback: Callable[[Any], Any]) -> torch.futures.Future:
        self.wait()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[Any], None]) -> None:
        self.wait()
        super().add_done_callback(callback)


class _Failure:
    """In place of tensors, which DDP's C++ takes out of a result by pickling; set_exception crashes it (torch 2.13)."""

    def __init__(self, error: Exception):
        self._error = error

    def __reduce__(self) -> Any:
        raise self._error


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

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self._name

    @property
    def group_name(self) -> str:
        return self._name

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    def shutdown(self) -> None:
        if self in _standing:
            _standing.remove(self)
            with _turn:
                self._comm.Free()

    def barrier(self, opts: Any = None) -> _Work:
        return self._work("barrier", [_Part(self._comm.Ibarrier)])

    def broadcast(self, tensors: Tensors, opts: Any) -> _Work:
        start = partial(self._comm.Ibcast, root=opts.rootRank)
        return self._work("broadcast", [_moved(start, tensor) for tensor in tensors])

    def send(self, tensors: Tensors, dst: int, tag: int) -> _Work:
        parts = [_Part(partial(self._comm.Isend, _message(_wire(tensor)), dst, tag)) for tensor in tensors]
        return self._work("send", parts)

    def recv(self, tensors: Tensors, src: int, tag: int) -> _Work:
        start = partial(self._comm.Irecv, source=src, tag=tag)
        return self._work("recv", [_moved(start, tensor) for tensor in tensors])

    def recv_anysource(self, tensors: Tensors, tag: int) -> _Work:
        return self.recv(tensors, MPI.ANY_SOURCE, tag)

    def allreduce(self, tensors: Tensors, opts: Any) -> _Work:
        return self._work("all_reduce", [self._reduced(self._comm.Iallreduce, tensor, opts) for tensor in tensors])

    def reduce(self, tensors: Tensors, opts: Any) -> _Work:
        start = partial(self._comm.Ireduce, root=opts.rootRank)
        if self.rank() == opts.rootRank:
            return self._work("reduce", [self._reduced(start, tensor, opts) for tensor in tensors])
        sends = [_to_reduce(tensor, opts) for tensor in tensors]
        return self._work("reduce", [_Part(partial(start, message, None, op)) for _, message, op in sends])

    def _reduced(self, start: Callable[..., Any], tensor: torch.Tensor, opts: Any) -> _Part:
        wire, message, op = _to_reduce(tensor, opts)
        return _Part(partial(start, MPI.IN_PLACE, message, op), [tensor], partial(self._finish, tensor, wire, opts))

    def _finish(self, tensor: torch.Tensor, wire: torch.Tensor, opts: Any) -> None:
        if _op(opts) == "AVG":
            wire.div_(self.size())
        _write([tensor], wire)

    def reduce_scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> _Work:
        return self._work("reduce_scatter", [self._shared(o, i, opts) for o, i in zip(outputs, inputs, strict=True)])

    def _shared(self, output: torch.Tensor, inputs: Tensors, opts: Any) -> _Part:
        wire, message, op = _to_reduce(_join(inputs), opts)
        own, counts = wire.new_empty(output.numel()), [tensor.numel() for tensor in inputs]
        start = partial(self._comm.Ireduce_scatter, message, [_message(own)[0], message[1]], counts, op)
        return _Part(start, [output], partial(self._finish, output, own, opts))

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> _Work:
        rows = [i.reshape(self.size(), o.numel()).unbind() for o, i in zip(outputs, inputs, strict=True)]
        return self.reduce_scatter(outputs, rows, opts)

    def reduce_scatter_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> _Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def allgather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> _Work:
        pairs = zip(outputs, inputs, strict=True)
        return self._work("all_gather", [self._gathered(self._comm.Iallgather, o, i) for o, i in pairs])

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Work:
        return self.allgather([[output] for output in outputs], inputs)

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any = None) -> _Work:
        return self.allgather([[output]], [input])

    def gather(self, outputs: Sequence[Tensors], inputs: Tensors, opts: Any) -> _Work:
        start = partial(self._comm.Igather, root=opts.rootRank)
        if self.rank() == opts.rootRank:
            return self._work("gather", [self._gathered(start, o, i) for o, i in zip(outputs, inputs, strict=True)])
        return self._work("gather", [_Part(partial(start, _message(_wire(tensor)), None)) for tensor in inputs])

    def _gathered(self, start: Callable[..., Any], outputs: Tensors, tensor: torch.Tensor) -> _Part:
        wire = _wire(tensor)
        joined = wire.new_empty(self.size() * wire.numel())
        return _Part(partial(start, _message(wire), _message(joined)), outputs, partial(_write, outputs, joined))

    def scatter(self, outputs: Tensors, inputs: Sequence[Tensors], opts: Any) -> _Work:
        send = _message(_join(inputs[0])) if self.rank() == opts.rootRank else None
        return self._work("scatter", [_moved(partial(self._comm.Iscatter, send, root=opts.rootRank), *outputs)])

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> _Work:
        wire = _join(inputs)
        joined = wire.new_empty(sum(output.numel() for output in outputs))
        send, recv = _message(wire), _message(joined)
        send.insert(1, [tensor.numel() for tensor in inputs])
        recv.insert(1, [tensor.numel() for tensor in outputs])
        start = partial(self._comm.Ialltoallv, send, recv)
        return self._work("all_to_all", [_Part(start, outputs, partial(_write, outputs, joined))])

    def all_to_all_single(
        self, output: torch.Tensor, input: torch.Tensor, rows_out: list[int], rows_in: list[int], opts: Any = None
    ) -> _Work:
        """Rows to and from each rank; none given is as many for each."""
        outputs, inputs = (
            tensor.split(rows or [len(tensor) // self.size()] * self.size())
            for tensor, rows in ((output, rows_out), (input, rows_in))
        )
        return self.alltoall(outputs, inputs)

    def _work(self, name: str, parts: Sequence[_Part]) -> _Work:
        return _Work(name, parts, self._timeout)

    allreduce_coalesced = allreduce
    # what torch before 2.13 calls them
    _allgather_base, _reduce_scatter_base, alltoall_base = all_gather_single, reduce_scatter_single, all_to_all_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced


def _wire(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where MPI can read and write its memory, else a copy."""
    if tensor.device.type != "cpu":
        raise ConfigError(
            f"dist.backend=mpi: carries tensors on the CPU, and was given one on {tensor.device}; use nccl"
        )
    return tensor.detach().contiguous()


def _message(wire: torch.Tensor, kind: str | None = None) -> list[Any]:
    """(memory, MPI's type); the request holds the memory for as long as MPI uses it."""
    if wire.numel() >= 2**31:
        raise ConfigError(f"dist.backend=mpi: a tensor of {wire.numel()} elements; MPI counts to 2**31 - 1; use gloo")
    return [wire.view(-1).view(torch.uint8).numpy(), getattr(MPI, kind or _UNITS[wire.itemsize])]


def _moved(start: Callable[..., Any], tensor: torch.Tensor) -> _Part:
    wire = _wire(tensor)
    return _Part(partial(start, _message(wire)), [tensor], partial(_write, [tensor], wire))


def _join(tensors: Tensors) -> torch.Tensor:
    return torch.cat([_wire(tensor).view(-1) for tensor in tensors])


def _write(tensors: Tensors, wire: torch.Tensor) -> None:
    """Into the tensors what stands in `wire` one after the other, unless it is their memory."""
    if len(tensors) == 1 and tensors[0].data_ptr() == wire.data_ptr():
        return
    for tensor, part in zip(tensors, wire.view(-1).split([t.numel() for t in tensors]), strict=True):
        tensor.detach().copy_(part.view(tensor.shape))


def _op(opts: Any) -> str:
    return opts.reduceOp.op.name


def _to_reduce(tensor: torch.Tensor, opts: Any) -> tuple[torch.Tensor, list[Any], Any]:
    """(tensor that MPI reduces, its message, MPI's operation)."""
    name = _op(opts)
    wire = _wire(tensor).to(_WIDER.get(tensor.dtype, tensor.dtype))
    if name not in _OPS or wire.dtype not in _TYPES or (name == "AVG" and not wire.is_floating_point()):
        raise ValueError(f"MPI has no {name} of {tensor.dtype}")
    op = _OPS[name] if wire.dtype != torch.bool else _OF_BOOL.get(_OPS[name], _OPS[name])
    return wire, _message(wire, _TYPES[wire.dtype]), getattr(MPI, op)
