"""This process's place: rank, world size and devices, read once from the launcher's environment."""

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
        """The device of the batches: the first of this rank's devices."""
        return self.devices[0]

    def with_devices(self, devices: tuple[torch.device, ...]) -> World:
        """This rank with the devices that its strategy found."""
        return replace(self, devices=devices)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> World:
        """Read torchrun's RANK, WORLD_SIZE and so on, or SLURM's or MPI's; without them, alone."""
        launcher = find_launcher(environment)
        return cls(*launcher.place(), launcher=launcher)

    def divide_threads(self) -> int:
        """Set this rank's part of the cores as torch's number of threads.

        OMP_NUM_THREADS wins, except under torchrun, which sets it to 1 unasked.
        """
        if "OMP_NUM_THREADS" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
            return torch.get_num_threads()
        cores = usable_cores()
        num_cpus = os.environ.get("SLURM_CPUS_PER_TASK", "")
        may_bind = self.launcher.name in ("srun", "mpirun")  # each rank to its own cores
        if self.launcher.name == "srun" and num_cpus.isdecimal():
            cores = int(num_cpus)
        elif not may_bind or cores * self.local_world_size > (os.cpu_count() or 1):
            cores //= self.local_world_size
        torch.set_num_threads(max(1, cores))
        return torch.get_num_threads()


def usable_cores() -> int:
    """The cores that this process may run on, at most its container's quota."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def count_ranks(number: str) -> int:
    """`gpu`, `cpu` (cores), `auto` (GPUs where there are any, else cores) or a number."""
    gpus = _count_gpus()
    if number == "gpu" and not gpus:
        advice = "torch sees no GPU here; give cpu, auto or a number"
        raise ConfigError(f"launch.nproc_per_node=gpu: {advice}")
    counts = {"gpu": gpus, "cpu": usable_cores(), "auto": gpus or usable_cores()}
    return counts[number] if number in counts else int(number)


def _count_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
