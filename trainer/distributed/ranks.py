"""The ranks of a job: process group, stop requests and heartbeat, opened together."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trainer.config.schema import DistSettings
from trainer.distributed.group import Group, process_group
from trainer.distributed.signals import StopRequest, stop_requests
from trainer.distributed.watch.heartbeat import Heartbeat, watched
from trainer.distributed.world import World
from trainer.errors import describe, place_of, visible
from trainer.process.streams import lasting_output

_forks: list[int] = []  # grows in each forked process; os.getpid takes 5 us on some machines
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _forks.append(os.getpid()))


@dataclass(frozen=True)
class Ranks:
    """The process group, the stop request and the heartbeat of this rank."""

    group: Group
    stop: StopRequest
    heartbeat: Heartbeat
    generation: int = field(default_factory=lambda: len(_forks))

    def end_child(self, error: BaseException | None = None) -> None:
        """Exit if the task has forked this process: its connections and files are the parent's.

        `error` is the exception that ends this process, if any.
        """
        if len(_forks) != self.generation:
            what = f"process {os.getpid()}, which the task forked, continued as if it were the run"
            if error is not None:
                what = f"{what} and failed ({describe(error)}, {place_of(error)})"
            line = visible(f"error: {what}; end it with os._exit")
            print(line, file=sys.stderr, flush=True)
            os._exit(1)


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
            raise
