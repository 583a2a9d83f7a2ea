"""The ranks of a job: process group, stop requests and heartbeat, opened together."""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from traceback import extract_tb
from typing import Any

import torch.distributed as dist

from trainer.base.errors import ConfigError, RunError, describe, place_of, visible
from trainer.base.process.streams import lasting_output
from trainer.base.process.tracebacks import Failure, set_failure, write_traceback
from trainer.core.config.schema import DistSettings
from trainer.core.distributed.group import Group, number_of, process_group
from trainer.core.distributed.signals import StopRequest, stop_requests
from trainer.core.distributed.watch.heartbeat import Heartbeat
from trainer.core.distributed.watch.watching import watched
from trainer.core.distributed.world import World

RANK_0_S = 0.3  # for rank 0 to fail as this rank did
ALIKE_S = 0.4  # for the other ranks

FORKS: list[int] = []  # grows in each forked process; os.getpid takes 5 us on some machines
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: FORKS.append(os.getpid()))


@dataclass(frozen=True)
class Ranks:
    """The process group, the stop request and the heartbeat of this rank."""

    group: Group
    stop: StopRequest
    heartbeat: Heartbeat
    generation: int = field(default_factory=lambda: len(FORKS))

    def end_child(self, error: BaseException | None = None) -> None:
        """Exit if the task has forked this process: its connections and files are the parent's.

        `error` is the exception that ends this process, if any.
        """
        if len(FORKS) != self.generation:
            what = f"process {os.getpid()}, which the task forked, continued as if it were the run"
            if error is not None:
                what = f"{what} and failed ({describe(error)}, {place_of(error)})"
            line = visible(f"error: {what}; end it with os._exit")
            print(line, file=sys.stderr, flush=True)
            os._exit(1)


def lone_rank() -> Ranks:
    """Return a rank that agrees with itself: no group is opened, no signal caught, no hang seen."""
    heartbeat = Heartbeat(memoryview(bytearray(mmap.PAGESIZE)))
    return Ranks(Group(World(), dist.Store()), StopRequest(), heartbeat)


@contextmanager
def open_ranks(config: DistSettings, world: World, facts: Mapping[str, Any]) -> Iterator[Ranks]:
    """Open the process group for the duration of the block, after all ranks compared `facts`.

    Stop requests are caught and hangs are detected meanwhile. Raises ConfigError if rendezvous
    fails, or if a fact differs between ranks.
    """
    with (
        lasting_output(),
        stop_requests() as stop,
        process_group(config, world, facts) as group,
        watched(config.hang_timeout_s, group) as heartbeat,
    ):
        ranks = Ranks(group, stop, heartbeat)
        try:
            yield ranks
        except BaseException as error:
            ranks.end_child(error)
            if not isinstance(error, (ConfigError, RunError, KeyboardInterrupt, SystemExit)):
                _note_failure(error, ranks)
            raise


def _note_failure(error: BaseException, ranks: Ranks) -> None:
    """Write all frames of a task's exception to the run directory, and agree on who shows it."""
    world = ranks.group.world
    if ranks.heartbeat.directory:
        write_traceback(error, Path(ranks.heartbeat.directory), world.rank)
    if world.world_size == 1 or world.launcher.name == "hand":  # each may have its own terminal
        return
    failure = Failure(True, lambda: 1)
    places = [f"{each.filename}:{each.lineno}" for each in extract_tb(error.__traceback__)]
    key = f"failure/{number_of(f'{type(error).__name__} {places}')}"
    store = dist.PrefixStore(key, ranks.group.store)
    claims: list[bool] = []

    def claim() -> None:
        with suppress(RuntimeError):  # the store has gone, with its rank
            claims.append(_is_first(store, world.rank))

    thread = threading.Thread(target=claim, daemon=True)  # a store may not answer
    thread.start()
    thread.join(2 * RANK_0_S)
    if claims:
        failure = Failure(claims[0], partial(_count_alike, store, world.world_size))
    set_failure(error, failure)


def _is_first(store: dist.Store, rank: int) -> bool:
    """Return True on one of the ranks that fail alike: rank 0, if it is one of them."""
    store.add("ranks", 1)
    if rank == 0:
        store.set("rank 0", "")
    end = time.monotonic() + RANK_0_S
    while rank and time.monotonic() < end:
        if store.check(["rank 0"]):
            return False
        time.sleep(0.02)
    return store.add("shown", 1) == 1


def _count_alike(store: dist.Store, size: int) -> int:
    """Return the number of ranks that fail alike, after a short wait for them."""
    end = time.monotonic() + ALIKE_S
    count = 1
    with suppress(RuntimeError):
        while count < size and time.monotonic() < end:
            time.sleep(0.02)
            count = store.add("ranks", 0)
    return count
