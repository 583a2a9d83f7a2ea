"""The process group: store, backend, the few collectives Lockstep needs, and an orderly end."""

from __future__ import annotations

import gc
import itertools
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.config import Dist
from trainer.distributed.world import World
from trainer.errors import ConfigError, RunError


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
        return [self.store.get(f"{prefix}/{rank}").decode() for rank in range(self.world.world_size)]

    def check_equal(self, facts: Mapping[str, Any]) -> None:
        """Raises ConfigError, alike on every rank, naming the first fact in which the ranks differ."""
        told = self.gather_text(json.dumps(facts))
        for rank, other in enumerate(told):
            if other == told[0]:
                continue
            ours, theirs = json.loads(told[0]), json.loads(other)
            name = next(n for n in {**ours, **theirs} if ours.get(n) != theirs.get(n))
            differ = f"{ours.get(name)} on rank 0 and {theirs.get(name)} on rank {rank}"
            raise ConfigError(f"{name} is {differ}: must be the same; start all ranks with the same command")

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
    if config.backend == "mpi":
        raise ConfigError("dist.backend=mpi: torch's wheels are built without MPI; use dist.backend=gloo")
    if config.backend == "nccl" and not gpus:
        raise ConfigError("dist.backend=nccl: needs CUDA, and torch sees no GPU here; use dist.backend=auto or gloo")
    if config.backend == "nccl" and gpus < world.local_world_size:
        raise ConfigError(
            f"dist.backend=nccl: needs a GPU per rank, and {world.local_world_size} local ranks share {gpus}; use gloo"
        )
    if config.backend != "auto":
        return config.backend
    return "nccl" if gpus >= world.local_world_size and dist.is_nccl_available() else "gloo"


def check_init(config: Dist, world: World) -> None:
    """Refuse what cannot bring the ranks together: settings of another init method, an address that is none."""
    if config.init == "env" and world.world_size > 1:
        _check_master(world)
    for name, method in (("address", "tcp"), ("path", "file")):
        value = getattr(config, name)
        if config.init == method and not value:
            raise ConfigError(
                f"dist.{name} is missing: dist.init={method} needs it on every rank; see conf/dist/auto.yaml"
            )
        if config.init != method and value:
            raise ConfigError(f"dist.{name}={value}: is for dist.init={method}, and dist.init is {config.init}")
    host, _, port = (config.address or "localhost:1").rpartition(":")
    if not host or not _is_port(port):
        raise ConfigError(f"dist.address={config.address}: must be <host>:<port>, port from 1 to 65535")
    if config.path and not Path(config.path).absolute().parent.is_dir():
        raise ConfigError(f"dist.path={config.path}: {Path(config.path).absolute().parent} is not a directory; make it")


def _check_master(world: World) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not os.environ.get(name):
            raise ConfigError(
                f"{name} is not set, but WORLD_SIZE={world.world_size}: start with torchrun, or set it to rank 0's"
            )
    port = os.environ["MASTER_PORT"]
    if not _is_port(port):
        raise ConfigError(f"MASTER_PORT={port}: must be a port from 1 to 65535, and the same on every rank")


def _is_port(text: str) -> bool:
    return text.isdecimal() and 0 < int(text) < 65536


@contextmanager
def process_group(config: Dist, world: World) -> Iterator[Group]:
    """The group of all ranks while the block runs.

    On an error a group of several is left standing: destroying it would wait for peers that sit in a collective.
    Raises ConfigError when the ranks do not find each other.
    """
    backend = choose_backend(config, world)
    timeout = timedelta(seconds=config.timeout_s)
    if world.world_size == 1:
        store: dist.Store = dist.HashStore()
    else:
        store = dist.PrefixStore(_generation(), _rendezvous(config, world, timeout))
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    own = world.device if backend == "nccl" else None  # else the last barrier would have to guess it
    dist.init_process_group(
        backend, store=store, rank=world.rank, world_size=world.world_size, timeout=timeout, device_id=own
    )
    try:
        yield Group(world, store)
    except BaseException:
        if world.world_size == 1:
            dist.destroy_process_group()
        raise
    gc.collect()  # a DDP wrapper that outlives its group hangs the exit (9 of 40 runs, torch 2.13 gloo)
    dist.barrier()
    dist.destroy_process_group()


_formed = itertools.count()


def _generation() -> str:
    """A prefix of its own for each restart, and for each group of a process.

    torchrun keeps port and store, so the addresses of ranks or groups that are gone would be found.
    """
    return f"lockstep/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_formed)}"


def _rendezvous(config: Dist, world: World, timeout: timedelta) -> dist.Store:
    place, make = {"env": _by_environment, "tcp": _by_address, "file": _by_file}[config.init](config, world, timeout)
    try:
        store = make()
        store.set_timeout(timeout)
        return store
    except (ValueError, RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"no group was found at {place} within dist.timeout_s={config.timeout_s:g}: {reason}"
        ) from None


def _by_address(config: Dist, world: World, timeout: timedelta) -> tuple[str, Callable[[], dist.Store]]:
    host, _, port = str(config.address).rpartition(":")
    # Not through init_method=tcp://: under torchrun that makes every rank a client of the agent's store.
    return f"{host}:{port}", partial(dist.TCPStore, host, int(port), world.world_size, world.rank == 0, timeout)


def _by_file(config: Dist, world: World, timeout: timedelta) -> tuple[str, Callable[[], dist.Store]]:
    """Under torchrun each launch and restart has a file of its own; by hand a file that was left over is refused."""
    launch = [os.environ[n] for n in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT") if n in os.environ]
    path = Path(".".join([str(config.path), *launch])).absolute()
    if path.exists() and time.time() - path.stat().st_mtime > config.timeout_s:
        raise ConfigError(f"dist.path={config.path}: {path} was left by an earlier run; remove it")
    return f"{path} (if it is of an earlier run, remove it)", partial(dist.FileStore, str(path), world.world_size)


def _by_environment(config: Dist, world: World, timeout: timedelta) -> tuple[str, Callable[[], dist.Store]]:
    def meet() -> dist.Store:
        return next(iter(dist.rendezvous("env://", world.rank, world.world_size, timeout=timeout)))[0]

    return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}", meet
