"""A process of a node that fetches shards before its ranks need them."""

from __future__ import annotations

import heapq
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from trainer import World
from trainer.core.api import EpochSampler, ShardShuffle, context_of_workers, prepare_worker
from trainer.shards.cache import ShardCache
from trainer.shards.download import DOWNLOADS


@dataclass(frozen=True)
class NodePart:
    """The part of a run that a node reads: rows (start, end) of its global batches."""

    seed: int
    global_batch: int
    rows: tuple[int, int]


class Fetcher:
    """Starts the process at the first `begin`, and tells it how far the run is.

    It is a process, since data workers are forked while it runs: a thread in the middle of a
    name lookup or of TLS would leave them with a lock that nobody opens.
    """

    def __init__(self, *parts: Any):
        """`parts`: those of an `Ahead`, which lives in the process."""
        self._parts = parts
        self._writer: Any = None
        self._process: Any = None

    def _start(self) -> None:
        context = context_of_workers()
        reader, self._writer = context.Pipe(duplex=False)
        os.set_blocking(self._writer.fileno(), False)  # if it is stopped, the run is not
        parts = (*self._parts, reader, self._writer)
        self._process = context.Process(target=_main, args=parts, daemon=True)
        self._process.start()
        reader.close()

    def begin(self, step: int, until: int) -> None:
        """Fetch for the steps of the run from its 0-based `step` to the one before `until`."""
        if self._process is None:
            self._start()
        self._send((step, until))

    def advance(self, step: int) -> None:
        """Say that the run begins its 0-based `step`."""
        self._send(step)

    def _send(self, message: Any) -> None:
        with suppress(OSError):  # it was killed: the readers fetch what they need
            self._writer.send(message)

    def close(self) -> None:
        if self._process is not None:
            self._writer.close()
            self._process.terminate()
            self._process.join()
            self._process.close()
            self._process = None


def open_fetcher(
    cache: ShardCache, ahead_bytes: int, sampler: EpochSampler, world: World
) -> Fetcher | None:
    """Return the fetcher of this node, on the first of its ranks; None on the others.

    Shards that are here already, and an order of the user's own, need none.
    """
    sampling = sampler.sampling
    if world.local_rank or cache.is_in_place or not isinstance(sampling, ShardShuffle):
        return None
    batch = sampler.plan.global_batch
    rows = sampler.rows_of_node(world.num_nodes, world.node_rank)
    return Fetcher(sampling, cache, ahead_bytes, NodePart(sampler.seed, batch, rows))


def _main(sampling: Any, cache: Any, most: int, part: NodePart, reader: Any, writer: Any) -> None:
    writer.close()
    prepare_worker(0)
    ahead = Ahead(sampling, cache, most, part)
    for _ in range(DOWNLOADS):
        threading.Thread(target=ahead.work, daemon=True).start()
    with suppress(EOFError, OSError):
        while True:
            message = reader.recv()
            if isinstance(message, int):
                ahead.advance(message)
            else:
                ahead.begin(*message)


@dataclass
class Ahead:
    """The shards that are fetched or being fetched, and those after them."""

    sampling: ShardShuffle
    cache: ShardCache
    most_bytes: int
    part: NodePart
    step: int = 0  # counted from the first of the run, as all steps here
    wanted: Iterator[tuple[int, int, list[int]]] = field(default_factory=lambda: iter(()))
    next: list[tuple[int, int, int]] = field(default_factory=list)  # (step, end, shard)
    held: list[tuple[int, int]] = field(default_factory=list)  # heap of (end, bytes)
    held_bytes: int = 0
    changed: threading.Condition = field(default_factory=threading.Condition)

    def __post_init__(self) -> None:
        self.uses = lru_cache(2**16)(self._uses)

    @property
    def steps_per_epoch(self) -> int:
        return self.sampling.size // self.part.global_batch

    def _uses(self, epoch: int, shard: int) -> list[tuple[int, int]]:
        order = self.sampling.order(self.part.seed, epoch, self.part.global_batch)
        return order.uses(shard, self.part.rows)

    def begin(self, step: int, until: int) -> None:
        with self.changed:
            self.step = step
            self.wanted = self._needs(*divmod(step, self.steps_per_epoch), until)
            self.next.clear()
            self.held.clear()
            self.held_bytes = 0
            self.changed.notify_all()

    def _needs(self, epoch: int, step: int, until: int) -> Iterator[tuple[int, int, list[int]]]:
        """Yield (step, end, shards) of what is needed from now to the end of the run."""
        while (begin := epoch * self.steps_per_epoch) < until:
            order = self.sampling.order(self.part.seed, epoch, self.part.global_batch)
            for need in order.needs(self.part.rows, step):
                if begin + need.step < until:
                    yield begin + need.step, begin + need.end, need.shards
            epoch, step = epoch + 1, 0

    def advance(self, step: int) -> None:
        with self.changed:
            self.step = step
            while self.held and self.held[0][0] <= self.step:
                self.held_bytes -= heapq.heappop(self.held)[1]
            self.changed.notify_all()

    def take(self) -> int:
        """Wait until there is room for another shard, and return it."""
        with self.changed:
            while True:
                if not self.next and (need := next(self.wanted, None)):
                    step, end, shards = need
                    self.next = [(step, end, shard) for shard in shards]
                if self.next:
                    step, end, shard = self.next[0]
                    size = self.cache.size(shard)
                    if step <= self.step or self.held_bytes + size <= self.most_bytes:
                        self.next.pop(0)
                        heapq.heappush(self.held, (end, size))
                        self.held_bytes += size
                        return shard
                self.changed.wait()

    def work(self) -> None:
        while True:
            shard = self.take()
            with suppress(Exception):  # the rank that needs the shard says so
                self.cache.fetch(shard, self.next_use)

    def next_use(self, shard: int) -> float:
        """Return the step at which this node next needs a shard, or the present one."""
        epoch, step = divmod(self.step, self.steps_per_epoch)
        for begin, end in self.uses(epoch, shard):
            if end > step:
                return max(self.step, epoch * self.steps_per_epoch + begin)
        later = self.uses(epoch + 1, shard)
        return (epoch + 1) * self.steps_per_epoch + later[0][0] if later else float("inf")
