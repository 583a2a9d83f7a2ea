"""The ranks of a job while they are together: group, requests to stop, heartbeat."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from trainer.config.schema import Dist
from trainer.distributed.group import Group, process_group
from trainer.distributed.signals import StopRequest, stop_requests
from trainer.distributed.watch.heartbeat import Heartbeat, watched
from trainer.distributed.world import World


@dataclass(frozen=True)
class Ranks:
    """The things that a rank shares with all others."""

    group: Group
    stop: StopRequest
    heartbeat: Heartbeat


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
        yield Ranks(group, stop, heartbeat)
