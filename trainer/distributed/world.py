"""Who am I: read once from the environment that a launcher such as torchrun sets."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch

from trainer.config import Strategy
from trainer.errors import ConfigError


@dataclass(frozen=True)
class World:
    """One rank's place among all ranks, and the device it computes on."""

    rank: int = 0
    local_rank: int = 0
    node_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    num_nodes: int = 1
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    devices: tuple[torch.device, ...] = (torch.device("cpu"),)

    @property
    def device(self) -> torch.device:
        """Where batches go; the first of this rank's devices."""
        return self.devices[0]

    def with_devices(self, config: Strategy) -> World:
        """This rank with the devices that `strategy.device_ids` or `strategy.devices_per_rank` give it."""
        count, each = torch.cuda.device_count() if torch.cuda.is_available() else 0, config.devices_per_rank
        if not count:
            return replace(self, devices=(torch.device("cpu"),) * each)
        if config.name == "dp":
            numbers = config.device_ids or list(range(count))
        elif each == 1:
            numbers = [self.local_rank % count]  # ranks may share a GPU
        else:
            numbers = list(range(self.local_rank * each, (self.local_rank + 1) * each))
        if max(numbers) >= count or min(numbers) < 0:
            key = f"device_ids={config.device_ids}" if config.device_ids else f"devices_per_rank={each}"
            raise ConfigError(f"strategy.{key}: rank {self.rank} has no GPU {max(numbers)}; torch sees {count}")
        return replace(self, devices=tuple(torch.device("cuda", number) for number in numbers))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> World:
        """From RANK and WORLD_SIZE and, where set, their LOCAL_ and GROUP_ kin; without them, one rank alone.

        Raises ConfigError for a variable that is missing beside another, no whole number, or out of range.
        """
        if "RANK" not in environment and "WORLD_SIZE" not in environment:
            return cls()
        world_size = _whole(environment, "WORLD_SIZE", 1, None)
        rank = _whole(environment, "RANK", 0, world_size - 1)
        local_world_size = _whole(environment, "LOCAL_WORLD_SIZE", 1, world_size, default=world_size)
        local_rank = _whole(environment, "LOCAL_RANK", 0, local_world_size - 1, default=rank % local_world_size)
        num_nodes = _whole(environment, "GROUP_WORLD_SIZE", 1, None, default=-(-world_size // local_world_size))
        node_rank = _whole(environment, "GROUP_RANK", 0, num_nodes - 1, default=rank // local_world_size)
        return cls(rank, local_rank, node_rank, world_size, local_world_size, num_nodes)

    def divide_threads(self) -> int:
        """Give this rank its part of the cores, or what OMP_NUM_THREADS says: torchrun sets that to 1 unasked."""
        if "OMP_NUM_THREADS" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
            return torch.get_num_threads()
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        torch.set_num_threads(max(1, cores // self.local_world_size))
        return torch.get_num_threads()


def _whole(environment: Mapping[str, str], name: str, low: int, high: int | None, default: int | None = None) -> int:
    given = environment.get(name)
    if given is None:
        if default is None:
            raise ConfigError(
                f"{name} is not set, though its kin is: torchrun sets RANK and WORLD_SIZE together; by hand, set both"
            )
        return default
    if not given.isdecimal() or int(given) < low or (high is not None and int(given) > high):
        raise ConfigError(
            f"{name}={given}: must be a whole number of at least {low}"
            + ("" if high is None else f" and at most {high}")
        )
    return int(given)
