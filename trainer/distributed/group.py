"""The process group: store, backend, the few collectives Lockstep needs, and an orderly end."""

from __future__ import annotations

import gc
import json
import os
import re
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from trainer.config.schema import Dist
from trainer.distributed import mpi
from trainer.distributed.rendezvous import meet, part
from trainer.distributed.world import World
from trainer.errors import ConfigError, RunError

_LOST = re.compile(
    r"Connection (?:closed|reset|refused)(?: by peer)?(?: \[[^]]+\]:\d+)?|Broken pipe|Connection was likely closed"
    r"|remote process exited|Timed out waiting \w+|Application timeout|wait timeout"
)


class Group:
    """All ranks of one run. Every method is called by every rank, equally often and in the same order."""

    def __init__(self, world: World, store: dist.Store):
        self.world, self.store = world, store
        self._calls = 0

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """The tensor (one shape everywhere) of every rank, in rank order.

        What is summed from it has the same bits wherever it stands in the tensor; a ring all-reduce adds in an order
        that depends on the position.
        """
        if self.world.world_size == 1:
            return [tensor]
        tensor = tensor.to(self._wire_device()).contiguous()
        parts = [torch.empty_like(tensor) for _ in range(self.world.world_size)]
        dist.all_gather(parts, tensor)
        return parts

    def max(self, *values: float) -> list[float]:
        """The largest of each value over all ranks."""
        if self.world.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self._wire_device())
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def share_bytes(self, data: bytes | None) -> bytes:
        """Rank 0's bytes, on every rank; what the others pass is ignored."""
        if self.world.world_size == 1:
            return data or b""
        data = data if self.world.rank == 0 else None
        device = self._wire_device()
        size = torch.tensor([len(data or b"")], device=device)
        dist.broadcast(size, 0)
        buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
        if data:
            buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        dist.broadcast(buffer, 0)
        return buffer.cpu().numpy().tobytes()

    def share_text(self, text: str) -> str:
        """Rank 0's text, on every rank; what the others pass is ignored."""
        return self.share_bytes(text.encode()).decode()

    def share_number(self, number: int) -> int:
        return int(self.share_text(str(number)))

    def gather_text(self, text: str) -> list[str]:
        """The text of every rank, in rank order."""
        self._calls += 1
        prefix = f"text/{self._calls}"
        self.store.set(f"{prefix}/{self.world.rank}", text)
        return [
            self.store.get(f"{prefix}/{rank}").decode() for rank in range(self.world.world_size)
        ]

    def check_equal(self, facts: Mapping[str, Any]) -> None:
        """Raises ConfigError, alike on every rank, naming the first fact in which the ranks differ."""
        told = self.gather_text(json.dumps(facts))
        other = next((line for line in told if line != told[0]), None)
        if other is None:
            return
        ours, theirs = json.loads(told[0]), json.loads(other)
        name = next(n for n in {**ours, **theirs} if ours.get(n) != theirs.get(n))
        values = [str(json.loads(line).get(name)) for line in told]
        ranks = {value: [str(r) for r, v in enumerate(values) if v == value] for value in values}
        differ = " and ".join(
            f"{v} on rank{'s' * (len(r) > 1)} {', '.join(r)}" for v, r in ranks.items()
        )
        raise ConfigError(
            f"{name} is {differ}: must be the same; start all ranks with the same command"
        )

    @contextmanager
    def agreed(self, doing: str) -> Iterator[None]:
        """Run a block that may fail on some ranks only: then all ranks raise.

        Where it failed, the error itself; elsewhere a ConfigError or RunError with the line of the lowest rank's, or,
        for another kind of error, a RuntimeError naming that rank.
        """
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            problem = error
        if self.max(float(problem is not None))[0]:
            lines = self.gather_text(_describe(problem))
            if problem is not None:
                raise problem
            rank = next(r for r, line in enumerate(lines) if line)
            kind, line = lines[rank].split(" ", 1)
            if kind == "other":
                raise RuntimeError(f"rank {rank} failed {doing}: {line}")
            raise ConfigError(line) if kind == "config" else RunError(line)

    @contextmanager
    def peers_named(self) -> Iterator[None]:
        """Raises RunError, one line, where the backend's own error says that another rank is gone or silent."""
        try:
            yield
        except RuntimeError as error:
            found = _LOST.search(str(error))
            if found is None or not (isinstance(error, dist.DistError) or "gloo/" in str(error)):
                raise
            advice = "its own message, or its launcher's, says why"
            raise RunError(
                f"another rank has ended or does not answer ({found[0]}); {advice}"
            ) from error

    def _wire_device(self) -> torch.device:
        return self.world.device if dist.get_backend() == "nccl" else torch.device("cpu")


def _describe(problem: Exception | None) -> str:
    if problem is None:
        return ""
    if isinstance(problem, (ConfigError, RunError)):
        return f"{'config' if isinstance(problem, ConfigError) else 'run'} {problem}"
    return f"other {''.join(traceback.format_exception_only(problem)).strip()}"


def choose_backend(config: Dist, world: World) -> str:
    """`auto` becomes nccl where every local rank has a GPU of its own, else gloo.

    Raises ConfigError for nccl where it cannot work.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if config.backend == "mpi" and world.launcher.name not in ("mpirun", "srun"):
        raise ConfigError(
            "dist.backend=mpi: start with mpirun -n <ranks> python -m trainer, or use dist.backend=gloo"
        )
    if config.backend == "nccl" and not gpus:
        raise ConfigError(
            "dist.backend=nccl: needs CUDA, and torch sees no GPU here; use dist.backend=auto or gloo"
        )
    shared = (
        1 if "SLURM_GPUS_PER_TASK" in os.environ else world.local_world_size
    )  # srun shows each rank its own
    if config.backend == "nccl" and 1 < gpus < shared:  # one: each rank may see its own alone
        raise ConfigError(
            f"dist.backend=nccl: needs a GPU per rank, and {world.local_world_size} local ranks share {gpus}; use gloo"
        )
    if config.backend != "auto":
        return config.backend
    return "nccl" if gpus >= shared and dist.is_nccl_available() else "gloo"


def _check_own_gpu(group: Group) -> None:
    """Raises ConfigError where ranks share one: each may see a single GPU, and that may be another's too."""
    told = group.gather_text(
        f"{group.world.host} {torch.cuda.get_device_properties(group.world.device).uuid}"
    )
    shared = [rank for rank, gpu in enumerate(told) if told.count(gpu) > 1]
    if shared:
        raise ConfigError(
            f"dist.backend=nccl: needs a GPU per rank, and ranks {shared} share theirs; use gloo"
        )


@contextmanager
def process_group(
    config: Dist, world: World, facts: Mapping[str, Any] | None = None
) -> Iterator[Group]:
    """The group of all ranks while the block runs; before it is made, the ranks compare `facts` and the backend.

    On an error a group of several is left standing: destroying it would wait for peers that sit in a collective.
    Raises ConfigError when the ranks do not find each other, or are not alike.
    """
    backend = choose_backend(config, world)
    timeout = timedelta(seconds=config.timeout_s)
    store = dist.HashStore() if world.world_size == 1 else meet(config, world)
    group = Group(world, store)
    group.check_equal({**(facts or {}), "the backend": backend})
    if backend == "nccl":
        _check_own_gpu(group)
    if backend == "mpi":
        backend = mpi.register()
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    own = (
        world.device if backend == "nccl" else None
    )  # else the last barrier would have to guess it
    dist.init_process_group(
        backend,
        store=store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timeout,
        device_id=own,
    )
    try:
        yield group
    except BaseException:
        if world.world_size == 1:
            dist.destroy_process_group()
        raise
    gc.collect()  # a DDP wrapper that outlives its group hangs the exit (9 of 40 runs, torch 2.13 gloo)
    dist.barrier()
    dist.destroy_process_group()
    part(config, world)
