"""Rank, world size and devices of this process, read once from the launcher's environment."""

from __future__ import annotations

import os
import resource
import shutil
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.base.codec import bytes_of, decode, encode
from trainer.base.errors import ConfigError
from trainer.base.process import torch_flags
from trainer.base.process.table import usable_cores
from trainer.core.distributed import accelerator, threads
from trainer.core.distributed.launchers import Launcher, find_launcher

NVIDIA_DRIVER = Path("/proc/driver/nvidia/version")
torch_flags.resolve_vector_functions()  # every task imports this module before it computes


def unnoticed(group: str) -> None:
    """Do nothing while this rank waits in a group."""


@dataclass(frozen=True)
class RankGroup:
    """Ranks along the axis `name` of the mesh, by their numbers in the world, and this one's.

    A collective waits for at most `timeout` (None: torch's default).
    """

    ranks: tuple[int, ...]
    rank: int
    opened: Any = field(default=None, repr=False, compare=False)
    name: str = ""
    # called with the name while this rank waits
    notice: Callable[[str], None] = field(default=unnoticed, repr=False, compare=False)
    timeout: timedelta | None = None

    @contextmanager
    def waiting(self) -> Iterator[Any]:
        """Yield torch's process group for a collective, in which this rank may wait for others."""
        self.notice(self.name)
        try:
            yield self.group
        finally:
            self.notice("")

    def all_reduce(self, tensor: torch.Tensor, op: Any = dist.ReduceOp.SUM) -> None:
        """Replace a tensor by its sum over the ranks, or by what `op` makes of it."""
        with self.waiting() as group:
            dist.all_reduce(tensor, op, group=group)

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of all ranks, in their order; all have the same size."""
        tensors = [torch.empty_like(tensor) for _ in self.ranks]
        with self.waiting() as group:
            dist.all_gather(tensors, tensor, group=group)
        return tensors

    def all_gather_into(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Write the parts of the ranks, contiguous and of one size, one after the other."""
        with self.waiting() as group:
            # as bytes: gloo refuses bfloat16 here, and NCCL int16
            gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
            gather(bytes_of(whole), bytes_of(part), group=group)  # torch 2.13 renamed it

    def reduce_scatter(self, part: torch.Tensor, whole: torch.Tensor) -> None:
        """Write this rank's part of the sum over the ranks; all are contiguous and of one size."""
        with self.waiting() as group:
            scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
            scatter(part, whole, group=group)

    def gather(self, value: Any) -> list[Any]:
        """Return the values of the ranks, which JSON can hold, in the order of the ranks."""
        is_there = accelerator.carries(dist.get_backend(self.group))
        data = encode(value).to(accelerator.kind() if is_there else "cpu")
        sizes = list(map(int, self.all_gather(torch.tensor([len(data)], device=data.device))))
        padded = data.new_zeros(max(sizes))
        padded[: len(data)] = data
        parts = zip(self.all_gather(padded), sizes, strict=True)
        return [decode(part[:size]) for part, size in parts]

    def open(self, ranks: tuple[int, ...], name: str = "", is_separate: bool = False) -> RankGroup:
        """Open the group of other ranks that include this one, with this group's timeout.

        If it `is_separate`, it is another group than the world's also if it has all its ranks.

        Every rank of the world must open equally many groups in the same order: torch 2.13 makes a
        group's name from its ranks and the number of groups before it.
        """
        rank = ranks.index(self.ranks[self.rank])
        group = replace(self, ranks=ranks, rank=rank, opened=None, name=name)
        is_known = len(ranks) == 1 or (len(ranks) == dist.get_world_size() and not is_separate)
        return group if is_known else replace(group, opened=group._new())

    @property
    def size(self) -> int:
        return len(self.ranks)

    @property
    def group(self) -> dist.ProcessGroup:
        """torch's process group, for functions of torch.distributed; also for a single rank."""
        is_world = self.opened is None and self.size == dist.get_world_size() > 1
        if is_world:  # not kept: it must not outlive its threads
            assert dist.group.WORLD is not None
            return dist.group.WORLD
        return self.opened or self._alone

    @cached_property
    def _alone(self) -> dist.ProcessGroup:
        return self._new()

    def _new(self) -> dist.ProcessGroup:
        words: Any = {"use_local_synchronization": True, "group_desc": self.name or None}
        process_group = dist.new_group(list(self.ranks), timeout=self.timeout, **words)
        assert isinstance(process_group, dist.ProcessGroup)
        return process_group


@dataclass(frozen=True)
class World:
    """Position of a rank among all ranks, and its devices.

    While `fit` or `evaluate` runs, `groups` has a `RankGroup` for each axis of the mesh, and "data"
    for replicate and shard together.
    """

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
    groups: Mapping[str, RankGroup] = field(default_factory=dict, compare=False, repr=False)

    @property
    def device(self) -> torch.device:
        """Device of the batches: the first device of this rank."""
        return self.devices[0]

    def with_devices(self, devices: tuple[torch.device, ...]) -> World:
        """Return a copy with the devices that the strategy chose."""
        return replace(self, devices=devices)

    def peak_bytes(self) -> list[int]:
        """Return the most memory used so far: tensors and what torch reserved on devices.

        On a CPU it is one number, of the whole process.
        """
        if not accelerator.is_used(self.device):
            return [resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024]  # in kB on Linux
        memory = torch.accelerator.memory
        peaks = (memory.max_memory_allocated, memory.max_memory_reserved)
        return [sum(map(peak, self.devices)) for peak in peaks]

    @property
    def started(self) -> str:
        """The end of a sentence, such as "2 ranks were started"."""
        return (
            "1 rank was started"
            if self.world_size == 1
            else f"{self.world_size} ranks were started"
        )

    def with_groups(self, groups: Mapping[str, RankGroup]) -> World:
        """Return a copy with the groups of the mesh."""
        return replace(self, groups=groups)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> World:
        """Read the variables of torchrun, SLURM or MPI; without them, return a single rank."""
        launcher = find_launcher(environment)
        return cls(*launcher.place(), launcher=launcher)

    def divide_threads(self) -> int:
        """Set torch's number of threads to this rank's part of the cores, and return it.

        OMP_NUM_THREADS has priority if the user set it: torchrun sets it to 1 by default.
        """
        if threads.is_chosen():
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


def explain_unseen_gpu() -> str:
    """Return the reason why torch sees no GPU despite an NVIDIA driver; empty otherwise."""
    has_driver = NVIDIA_DRIVER.exists() or shutil.which("nvidia-smi") is not None
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not has_driver or shown in ("", "-1") or accelerator.count():
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


def count_ranks(nproc_per_node: str) -> int:
    """Return the number of ranks for `launch.nproc_per_node`.

    `gpu` and `cpu` count GPUs and cores, `auto` counts GPUs if there are any, else cores. Raises
    ConfigError for `gpu` without a GPU.
    """
    gpus = accelerator.count()
    if nproc_per_node == "gpu" and not gpus:
        raise ConfigError("""launch.nproc_per_node=gpu: torch sees no GPU here;
            give cpu, auto or a number""")
    counts = {"gpu": gpus, "cpu": usable_cores(), "auto": gpus or usable_cores()}
    return counts[nproc_per_node] if nproc_per_node in counts else int(nproc_per_node)
