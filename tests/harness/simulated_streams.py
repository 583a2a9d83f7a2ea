"""Streams and events of the simulated accelerator, and what is observed: launches, waits, races."""

from __future__ import annotations

import functools
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from harness import simulated_memory
from harness.simulated_memory import NAME, Block, block_of

_PLACES = ("/trainer/", "/tasks/", "/torch/optim/", "/tests/tasks/")


class _Current(threading.local):
    index = 0
    is_kept = False
    streams: dict[int, Stream] | None = None


current = _Current()
_host: dict[int, int] = {}  # what the host knows to be complete: a tick of each stream
_every: Any = weakref.WeakSet()


def _merge(into: dict[int, int], other: dict[int, int]) -> None:
    for key, value in other.items():
        into[key] = max(into.get(key, 0), value)


def index_of(device: Any = None) -> int:
    """Return the number of a device; the current one's without any."""
    if isinstance(device, int):
        return device if device >= 0 else current.index
    index = None if device is None else torch.device(device).index
    return current.index if index is None else index


class Stream:
    """A stream with a vector clock, and the copies to the host that are under way."""

    _next = 1

    def __init__(self, device: Any = None, priority: int = 0, number: int | None = None, **_: Any):
        self.device = torch.device(NAME, index_of(device))
        if number is None:
            number, Stream._next = Stream._next, Stream._next + 1
        self.stream_id = number
        self.clock: dict[int, int] = {}
        self.copies: list[Callable[[], Any]] = []
        self.freed: list[dict[int, int]] = []  # uses of its freed memory by other streams
        _every.add(self)

    @property
    def device_index(self) -> int:
        return self.device.index

    def tick(self) -> int:
        _merge(self.clock, _host)
        self.clock[self.stream_id] = self.clock.get(self.stream_id, 0) + 1
        return self.clock[self.stream_id]

    def finish(self) -> None:
        """The host has waited for this stream."""
        _merge(_host, self.clock)
        copies, self.copies = self.copies, []
        for copy in copies:
            copy()

    def wait_event(self, event: Event) -> None:
        _merge(self.clock, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        _merge(self.clock, stream.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        note_wait("Stream.synchronize")
        self.finish()

    def query(self) -> bool:
        self.finish()
        return True

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.stream_id == self.stream_id

    def __hash__(self) -> int:
        return self.stream_id


class Event:
    """A point of a stream: whoever waits for it has what the stream did before."""

    def __init__(self, enable_timing: bool = False, **_: Any):
        self._time, self.clock = 0.0, dict[int, int]()
        self._stream: Stream | None = None
        self._copies: list[Callable[[], Any]] = []

    def record(self, stream: Stream | None = None) -> None:
        self._stream = stream or current_stream()
        self._stream.tick()
        self._time, self.clock = time.perf_counter(), dict(self._stream.clock)
        self._copies = list(self._stream.copies)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def query(self) -> bool:
        """Return True once the host has waited for it, or for what came after it."""
        is_done = all(_host.get(stream, 0) >= time for stream, time in self.clock.items())
        if is_done:
            self._finish()
        return is_done

    def synchronize(self) -> None:
        note_wait("Event.synchronize")
        self._finish()

    def _finish(self) -> None:
        _merge(_host, self.clock)
        for copy in self._copies:
            copy()
        if self._stream is not None:
            done = self._copies
            self._stream.copies = [each for each in self._stream.copies if each not in done]
        self._copies = []

    def elapsed_time(self, other: Event) -> float:
        return 1e3 * (other._time - self._time)


def current_stream(device: Any = None) -> Stream:
    index = index_of(device)
    return (current.streams or {}).get(index) or _default(index)


def default_stream(device: Any = None) -> Stream:
    return _default(index_of(device))


@functools.cache
def _default(index: int) -> Stream:
    return Stream(number=-1 - index, device=index)


def set_stream(stream: Stream) -> None:
    current.streams = {**(current.streams or {}), stream.device.index: stream}
    current.index = stream.device.index


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    if stream is None:
        yield
        return
    kept, index = current_stream(stream.device), current.index
    set_stream(stream)
    try:
        yield
    finally:
        set_stream(kept)
        current.index = index


def synchronize(device: Any = None) -> None:
    note_wait("synchronize")
    for each in list(_every):
        each.finish()


class Record:
    """Launches by operation, and launches and waits by place (file:line), of one block."""

    def __init__(self) -> None:
        self.launches: Counter[str] = Counter()
        self.places: Counter[str] = Counter()
        self.waits: list[tuple[str, str]] = []  # (what the host waits for, place)

    def launch(self, name: str) -> None:
        self.launches[name] += 1
        self.places[_place_of_call()] += 1

    @property
    def count(self) -> int:
        return sum(self.launches.values())


record: Record | None = None
races: list[str] = []


@contextmanager
def observe() -> Iterator[Record]:
    """Record what this process does during the block, in all its threads."""
    global record
    kept, record = record, Record()
    try:
        yield record
    finally:
        record = kept


def note_wait(kind: str) -> None:
    if record is not None:
        record.waits.append((kind, _place_of_call()))


@contextmanager
def counted_as(name: str, launches: int) -> Iterator[None]:
    """Count the block as so many launches, whatever it launches."""
    global record
    kept, record = record, None
    try:
        yield
    finally:
        record = kept
        for _ in range(launches):
            note_launch(name)


def note_launch(name: str) -> None:
    if record is not None:
        record.launch(name)


def _place_of_call() -> str:
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if any(each in path for each in _PLACES) and "/harness/" not in path:
            return f"{path.rsplit('/', 2)[-2]}/{path.rsplit('/', 1)[-1]}:{frame.f_lineno}"
        frame = frame.f_back
    return "backward" if threading.current_thread() is not threading.main_thread() else "elsewhere"


def use(tensor: torch.Tensor, is_write: bool, name: str) -> None:
    """Note a use on the current stream; it is a race if it is not ordered after earlier ones."""
    block = block_of(tensor)
    how = "writes" if is_write else "reads"
    if block.held_by and (is_write or block.held_by.startswith("written")):
        races.append(f"{name} {how} memory that is still {block.held_by}, at {_place_of_call()}")
    here = current_stream(block.index)
    now = here.tick()
    for other, (when, was_written) in block.uses.items():
        is_ordered = other == here.stream_id or here.clock.get(other, 0) >= when
        if not is_ordered and (was_written or is_write):
            what = (
                f"{name} on stream {here.stream_id} {how} memory of stream {other} without a wait"
            )
            races.append(f"{what}, at {_place_of_call()}")
    if is_write:
        block.uses.clear()
    was_written = block.uses.get(here.stream_id, (0, False))[1]
    block.uses[here.stream_id] = (now, is_write or was_written)


def record_stream(tensor: torch.Tensor, stream: Stream) -> None:
    """Keep the memory, once the tensor is freed, until the stream has done what it was asked."""
    block_of(tensor).recorded.add(stream.stream_id)


def _note_freed(block: Block) -> None:
    others = {stream: when for stream, (when, _) in block.uses.items()}
    for stream in (block.home.stream_id, *block.recorded):
        others.pop(stream, None)
    if others:
        block.home.freed.append(others)


def _note_allocated(block: Block) -> None:
    """Note a race if the block may get memory that another stream still uses, as on CUDA.

    Freed memory goes back to the stream that allocated it, whose next block may be there.
    """
    block.home = here = current_stream(block.index)
    for uses in here.freed:
        for other, when in uses.items():
            if max(here.clock.get(other, 0), _host.get(other, 0)) < when:
                what = f"stream {here.stream_id} allocates memory that stream {other} still uses"
                races.append(f"{what}, at {_place_of_call()}")
    here.freed.clear()


simulated_memory.allocated = _note_allocated
simulated_memory.freed = _note_freed
