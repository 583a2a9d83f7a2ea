"""The ranks of a job while they are together: group, requests to stop, heartbeat."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from trainer.config.schema import Dist
from trainer.distributed.group import Group, process_group
from trainer.distributed.signals import StopRequest, stop_requests
from trainer.distributed.watch.heartbeat import Heartbeat, watched
from trainer.distributed.world import World
from trainer.errors import one_line, place_of


@dataclass(frozen=True)
class Ranks:
    """The things that a rank shares with all others."""

    group: Group
    stop: StopRequest
    heartbeat: Heartbeat
    pid: int = field(default_factory=os.getpid)

    def end_child(self, error: BaseException | None = None) -> None:
        """End this process if the task has forked it: connections and files are its parent's.

        `error` is what it ends with.
        """
        if os.getpid() != self.pid:
            what = f"process {os.getpid()}, which the task forked, went on as if it were the run"
            if error is not None:
                kind = type(error).__name__
                what = f"{what} and failed ({kind}: {one_line(error)}, {place_of(error)})"
            print(f"error: {what}; end it with os._exit", file=sys.stderr, flush=True)
            os._exit(1)


@contextmanager
def open_ranks(config: Dist, world: World, facts: Mapping[str, Any]) -> Iterator[Ranks]:
    """The ranks together while the block runs, after they compared `facts`.

    Raises ConfigError when they do not find each other, or are not alike.
    """
    with (
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
