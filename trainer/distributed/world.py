"""Who am I: read once from the environment that a launcher such as torchrun, srun or mpirun sets."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from trainer.distributed.launchers import Launcher, find_launcher
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
    launcher: Launcher = field(default=Launcher("python", {}), compare=False)

    @property
    def device(self) -> torch.device:
        """Where batches go; the first of this rank's devices."""
        return self.devices[0]

    def with_devices(self, devices: tuple[torch.device, ...]) -> World:
        """This rank with the devices that its strategy found."""
        return replace(self, devices=devices)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> World:
        """From what the launcher says: torchrun's RANK, WORLD_SIZE and their kin, SLURM's or MPI's; else alone."""
        launcher = find_launcher(environment)
        return cls(*launcher.place(), launcher=launcher)

    def divide_threads(self) -> int:
        """Give this rank its part of the cores, or what OMP_NUM_THREADS says: torchrun sets that to 1 unasked."""
        if "OMP_NUM_THREADS" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
            return torch.get_num_threads()
        cores, given = usable_cores(), os.environ.get("SLURM_CPUS_PER_TASK", "")
        if self.launcher.name == "srun" and given.isdecimal():
            cores = int(given)
        elif self.launcher.name not in ("srun", "mpirun") or cores * self.local_world_size > (
            os.cpu_count() or 1
        ):
            cores //= self.local_world_size  # else each rank is bound to cores of its own
        torch.set_num_threads(max(1, cores))
        return torch.get_num_threads()


def usable_cores() -> int:
    """Those that this process may run on, and no more than its container's quota is worth."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def count_ranks(given: str) -> int:
    """`gpu`, `cpu` (cores), `auto` (GPUs where there are any, else cores) or a number."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if given == "gpu" and not gpus:
        raise ConfigError(
            "launch.nproc_per_node=gpu: torch sees no GPU here; give cpu, auto or a number"
        )
    return {"gpu": gpus, "cpu": usable_cores(), "auto": gpus or usable_cores()}.get(given) or int(
        given
    )
