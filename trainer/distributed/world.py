"""Rank, world size and devices of this process, read once from the launcher's environment."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from trainer.distributed.launchers import Launcher, find_launcher
from trainer.errors import ConfigError

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True)
class World:
    """Position of a rank among all ranks, and its devices."""

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
        """Device of the batches: the first device of this rank."""
        return self.devices[0]

    def with_devices(self, devices: tuple[torch.device, ...]) -> World:
        """Return a copy with the devices that the strategy chose."""
        return replace(self, devices=devices)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> World:
        """Read the variables of torchrun, SLURM or MPI; without them, return a single rank."""
        launcher = find_launcher(environment)
        return cls(*launcher.place(), launcher=launcher)

    def divide_threads(self) -> int:
        """Set torch's number of threads to this rank's part of the cores, and return it.

        OMP_NUM_THREADS has priority, except under torchrun, which sets it to 1 by default.
        """
        if "OMP_NUM_THREADS" in os.environ and "TORCHELASTIC_RUN_ID" not in os.environ:
            return torch.get_num_threads()
        torch.set_num_threads(max(1, self.count_cores()))
        return torch.get_num_threads()

    def count_cores(self) -> int:
        """Return this rank's part of the cores; 0 if there are more ranks than cores."""
        cores = usable_cores()
        num_cpus = os.environ.get("SLURM_CPUS_PER_TASK", "")
        if self.launcher.name == "srun" and num_cpus.isdecimal():
            return int(num_cpus)
        may_bind = self.launcher.name in ("srun", "mpirun")  # bind each rank to its own cores
        is_bound = may_bind and cores * self.local_world_size <= (os.cpu_count() or 1)
        return cores if is_bound else cores // self.local_world_size


def usable_cores() -> int:
    """Return the number of cores that this process may use, limited by the container's quota."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def explain_unseen_gpu() -> str:
    """Return the reason why torch sees no GPU despite an NVIDIA driver; empty otherwise."""
    has_driver = NVIDIA_DRIVER.exists() or shutil.which("nvidia-smi") is not None
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not has_driver or shown in ("", "-1") or _count_gpus():
        return ""
    build = f"torch {torch.__version__}"
    if not torch.version.cuda:
        why = f"{build} is built without CUDA; install a CUDA build"
    elif shown is not None:
        why = f"CUDA_VISIBLE_DEVICES={shown} shows it none; unset it, or ask the scheduler for GPUs"
    else:
        needs = f"{build} needs a driver for CUDA {torch.version.cuda}"
        why = f"{needs}, and a container needs --gpus all; compare it with nvidia-smi"
    return f"an NVIDIA driver is installed, but torch sees no GPU: {why}"


def count_ranks(number: str) -> int:
    """Return the number of ranks for `launch.nproc_per_node`.

    `gpu` and `cpu` count GPUs and cores, `auto` counts GPUs if there are any, else cores. Raises
    ConfigError for `gpu` without a GPU.
    """
    gpus = _count_gpus()
    if number == "gpu" and not gpus:
        advice = "torch sees no GPU here; give cpu, auto or a number"
        raise ConfigError(f"launch.nproc_per_node=gpu: {advice}")
    counts = {"gpu": gpus, "cpu": usable_cores(), "auto": gpus or usable_cores()}
    return counts[number] if number in counts else int(number)


def _count_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
