"""The barrier at the end of a run with a mirror: all ranks stay until rank 0 has copied everything.

A launcher ends all ranks soon after the first one has ended: torchrun's agent and multiprocessing
30 s after a failure. So no rank ends while rank 0 is copying the last checkpoint to a bucket.

The barrier uses the group's store and no collective, since after an error on one rank the others
are blocked in a collective with it, which only the end of its process ends. The failed rank then
waits until the thread of rank 0 reports that the bucket has all that was saved, and ends.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from trainer.core.distributed.group import Group
from trainer.core.distributed.watch.heartbeat import Heartbeat
from trainer.core.distributed.watch.phases import Phase

NOTICE_S = 2.0  # between two looks for a rank at the end, while there is none
BARRIER_POLL_S = 0.2
RELEASE_S = 5.0  # for rank 0 to come to the end by itself, once the bucket has all
# Without a sign of rank 0, whose thread gives one every BARRIER_POLL_S: its process has ended or is
# frozen. All ranks start again only after this: with 30 s here a restart took 34 s, without a
# mirror 3 s.
GONE_S = 10.0
# Keys of the store, and what rank 0 reports.
WAITS, STATE = "waits", "state"
COPYING, COPIED, CLOSING, CLOSED = "copying", "copied", "closing", "closed"


class ExitBarrier:
    """The barrier of one run. Without a mirror, or on one rank, nobody waits."""

    def __init__(
        self,
        group: Group,
        heartbeat: Heartbeat,
        limit_s: float | None,
        is_copied: Callable[[], bool],
    ):
        """Open the barrier, on all ranks. `limit_s` is how long rank 0 may copy, None without a
        mirror. `is_copied` returns, on rank 0, whether the bucket has all that was saved."""
        self._heartbeat = heartbeat
        self._rank = group.world.rank
        self._limit_s = limit_s or 0.0
        self._is_copied = is_copied
        self._is_here = threading.Event()
        self._is_over = threading.Event()
        self._signs = itertools.count()
        self._store: dist.Store | None = None
        self._thread = threading.Thread(target=self._follow, daemon=True, name="exit barrier")
        if limit_s is not None and group.world.world_size > 1:
            run = group.store.add(f"exits/{self._rank}", 1)  # 1 for the first one in this group
            self._store = dist.PrefixStore(f"exit/{run}", group.store)
            self._thread.start()

    def beat(self) -> None:
        """Record that this rank copies or waits for it, and is not hung."""
        self._heartbeat.enter(Phase.MIRROR)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Run the block, in which ranks write the rest and rank 0 copies it; then wait for rank 0.

        A checkpoint may still be written in the background, which takes as long as any other.
        """
        self._heartbeat.enter(Phase.SAVE)
        self._is_here.set()
        if self._store is None:
            yield
            return
        with suppress(RuntimeError):  # the store has gone, with its process
            self._store.set(WAITS, "")
        try:
            yield
        finally:
            self._is_over.set()
            self._thread.join(GONE_S)
            with suppress(RuntimeError):
                if self._rank == 0:
                    self._report(CLOSED)
                    time.sleep(2 * BARRIER_POLL_S)  # the store may end with this process
                else:
                    self._await_rank_0(self._store)

    def _await_rank_0(self, store: dist.Store) -> None:
        """Return once rank 0 has closed its mirror, or there is nothing more to wait for."""
        begun = seen = time.monotonic()
        last = word = ""
        while True:
            self.beat()
            clock = time.monotonic()
            if store.check([STATE]) and (state := store.get(STATE).decode()) != last:
                last = state
                seen = clock
                word = state.partition(" ")[2]
            if word == CLOSED or clock - seen > GONE_S:
                return
            if word == COPIED and clock - begun > RELEASE_S:
                return
            if word != CLOSING and clock - begun > self._limit_s + RELEASE_S:
                return
            time.sleep(BARRIER_POLL_S)

    def _report(self, word: str) -> None:
        if self._store is not None:
            self._store.set(STATE, f"{next(self._signs)} {word}")

    def _follow(self) -> None:
        """Once a rank waits, report the state of rank 0, and keep the watcher from a rank whose
        main thread is blocked in a collective with the one that waits."""
        if self._store is None:
            return
        with suppress(RuntimeError):
            while not self._store.check([WAITS]):
                if self._is_over.wait(NOTICE_S):
                    return
            end = time.monotonic() + self._limit_s + GONE_S
            while True:
                if self._rank == 0:
                    state = COPIED if self._is_copied() else COPYING
                    self._report(CLOSING if self._is_here.is_set() else state)
                if not self._is_here.is_set() and time.monotonic() < end:
                    self._heartbeat.refresh()
                if self._is_over.wait(BARRIER_POLL_S):
                    return
