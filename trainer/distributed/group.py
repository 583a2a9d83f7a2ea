"""The process group: store, backend, the few collectives Lockstep needs, and an orderly end."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.config.schema import Dist
from trainer.distributed import mpi
from trainer.distributed.rendezvous import meet, part, read_keys
from trainer.distributed.watch.watcher import name_ranks
from trainer.distributed.world import World
from trainer.errors import ConfigError, RunError

_LOST = re.compile(
    r"Connection (?:closed|reset|refused)(?: by peer)?(?: \[[^]]+\]:\d+)?|Broken pipe"
    r"|Connection was likely closed|remote process exited|Timed out waiting \w+"
    r"|Application timeout|wait timeout"
)


_KINDS = {"config": ConfigError, "run": RunError}


class Group:
    """All ranks of one run. Every rank calls every method, equally often and in the same order.

    Numbers go by collectives, which take the logarithm of the number of ranks. Texts go to rank 0
    by the store: one message of each rank, and one back.
    """

    def __init__(self, world: World, store: dist.Store):
        self.world = world
        self.store = store
        self._calls = 0

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, alike on every rank.

        Rank 0 adds floating numbers in rank order: a ring all-reduce adds in an order that depends
        on the position in the tensor, so a resume would have other bits. Whole numbers have one
        sum in any order.
        """
        if self.world.world_size == 1:
            return tensor
        home = tensor.device
        total = tensor.to(self._wire_device(), copy=True).contiguous()
        if not total.is_floating_point():
            dist.all_reduce(total)
            return total.to(home)
        is_root = self.world.rank == 0
        parts = [torch.empty_like(total) for _ in range(self.world.world_size)] if is_root else None
        dist.gather(total, parts)
        if parts is not None:
            total.zero_()
            for part in parts:
                total += part
        dist.broadcast(total, 0)
        return total.to(home)

    def find_unequal(self, numbers: torch.Tensor) -> torch.Tensor:
        """Where whole numbers are not the same on all ranks, as bools on the CPU."""
        if self.world.world_size == 1:
            return torch.zeros_like(numbers, dtype=torch.bool)
        both = torch.stack([numbers, ~numbers]).to(self._wire_device())
        dist.all_reduce(both, dist.ReduceOp.MAX)
        return (both[0] != ~both[1]).cpu()  # the largest, and the smallest

    def max(self, *values: float) -> list[float]:
        """The largest of each value over all ranks."""
        if self.world.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self._wire_device())
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        return tensor.tolist()

    def share_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """The bytes of rank `source`, on every rank; the other ranks' are ignored."""
        if self.world.world_size == 1:
            return data or b""
        own = (data or b"") if self.world.rank == source else b""
        device = self._wire_device()
        size = torch.tensor([len(own)], device=device)
        dist.broadcast(size, source)
        buffer = torch.empty(int(size), dtype=torch.uint8, device=device)
        if own:
            buffer.copy_(torch.frombuffer(bytearray(own), dtype=torch.uint8))
        dist.broadcast(buffer, source)
        return buffer.cpu().numpy().tobytes()

    def share_text(self, text: str, source: int = 0) -> str:
        """The text of rank `source`, on every rank; the other ranks' are ignored."""
        return self.share_bytes(text.encode(), source).decode()

    def collect_text(self, text: str) -> list[str]:
        """On rank 0 the text of every rank, in rank order; elsewhere nothing."""
        size = self.world.world_size
        if size == 1:
            return [text]
        self._calls += 1
        store = dist.PrefixStore(f"text/{self._calls}", self.store)
        store.set(str(self.world.rank), text)
        if self.world.rank:
            return []
        keys = list(map(str, range(size)))
        return [value.decode() for value in read_keys(store, keys)]

    def gather_text(self, text: str) -> list[str]:
        """The text of every rank, in rank order."""
        return self.tell_all(self.collect_text(text))

    def gather_text_of(self, kind: str, text: str) -> list[str]:
        """The texts of the ranks that call it with this rank's `kind`, in rank order."""
        if self.world.world_size == 1:
            return [text]
        alike: dict[str, list[str]] = {}
        for line in self.collect_text(json.dumps([_hashed(kind), text])):
            key, other = json.loads(line)
            alike.setdefault(key, []).append(other)
        store = dist.PrefixStore(f"kind/{self._calls}", self.store)
        for key, texts in alike.items():
            store.set(key, json.dumps(texts))
        return json.loads(store.get(_hashed(kind)))

    def check_equal(self, facts: Mapping[str, Any]) -> None:
        """Raises ConfigError on every rank, naming the first fact in which the ranks differ.

        Before the group is made the digests meet in the store, then by a collective; whole texts
        travel only where they differ.
        """
        if self.world.world_size == 1:
            return
        text = json.dumps(facts)
        digest = _hashed(text)
        if dist.is_initialized():
            number = torch.tensor([int(digest, 16) - 2**63])
            is_equal = not self.find_unequal(number).any()
        else:
            is_equal = self.tell_all(len({*self.collect_text(digest)}) == 1)
        if not is_equal:
            raise ConfigError(self.tell_all(_find_difference(self.collect_text(text))))

    def tell_all(self, finding: Any) -> Any:
        """Rank 0's finding on every rank: by a collective, before there are any by the store."""
        if self.world.world_size == 1 or dist.is_initialized():
            return json.loads(self.share_text(json.dumps(finding)))
        self._calls += 1
        key = f"finding/{self._calls}"
        if self.world.rank == 0:
            self.store.set(key, json.dumps(finding))
        return json.loads(self.store.get(key))

    @contextmanager
    def agreed(self, doing: str) -> Iterator[None]:
        """Run a block that may fail on some ranks only: then all ranks raise.

        A rank that failed raises its own error; the others raise a ConfigError or RunError with
        the line of the lowest such rank, or, for another kind of error, a RuntimeError naming it.
        """
        problem: Exception | None = None
        try:
            yield
        except Exception as error:
            problem = error
        size = self.world.world_size
        (first,) = self.max(size - self.world.rank if problem is not None else 0)
        if first:
            rank = size - int(first)
            kind, line = self.share_text(_describe(problem), rank).split(" ", 1)
            if problem is not None:
                raise problem
            if kind in _KINDS:
                raise _KINDS[kind](line)
            raise RuntimeError(f"rank {rank} failed {doing}: {line}")

    @contextmanager
    def peers_named(self) -> Iterator[None]:
        """Raises RunError, one line, for the backend's error that a rank is gone or silent."""
        try:
            yield
        except RuntimeError as error:
            lost = _LOST.search(str(error))
            if lost is None or not (isinstance(error, dist.DistError) or "gloo/" in str(error)):
                raise
            line = f"another rank has ended or does not answer ({lost[0]})"
            raise RunError(f"{line}; its own message, or its launcher's, says why") from error

    def _wire_device(self) -> torch.device:
        return self.world.device if dist.get_backend() == "nccl" else torch.device("cpu")


def _describe(problem: Exception | None) -> str:
    """`<kind> <line>`; empty without a problem."""
    for kind, error in _KINDS.items():
        if isinstance(problem, error):
            return f"{kind} {problem}"
    return f"other {''.join(traceback.format_exception_only(problem)).strip()}" if problem else ""


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _find_difference(lines: list[str]) -> str:
    """The first fact in which the ranks' facts differ; empty off rank 0, which has no lines."""
    each = [json.loads(line) for line in lines]
    for name in {name: None for other in each for name in other}:
        ranks: dict[str, list[int]] = {}
        for rank, other in enumerate(each):
            ranks.setdefault(str(other.get(name)), []).append(rank)
        if len(ranks) > 1:
            differ = " and ".join(f"{v} on {name_ranks(r)}" for v, r in ranks.items())
            return f"{name} is {differ}: must be the same; start all ranks with the same command"
    return ""


def choose_backend(config: Dist, world: World) -> str:
    """Resolve `auto`: nccl where every local rank has a GPU of its own, else gloo.

    Raises ConfigError for nccl where it cannot work.
    """
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    # srun shows each rank its own GPUs
    needed = 1 if "SLURM_GPUS_PER_TASK" in os.environ else world.local_world_size
    problem = ""
    if config.backend == "mpi" and world.launcher.name not in ("mpirun", "srun"):
        problem = "start with mpirun -n <ranks> python -m trainer, or use dist.backend=gloo"
    elif config.backend == "nccl" and not gpus:
        problem = "needs CUDA, and torch sees no GPU here; use dist.backend=auto or gloo"
    elif config.backend == "nccl" and 1 < gpus < needed:  # one: each rank may see its own alone
        ranks = f"{world.local_world_size} local ranks share {gpus}"
        problem = f"needs a GPU per rank, and {ranks}; use gloo"
    if problem:
        raise ConfigError(f"dist.backend={config.backend}: {problem}")
    if config.backend != "auto":
        return config.backend
    return "nccl" if gpus >= needed and dist.is_nccl_available() else "gloo"


def _check_own_gpu(group: Group) -> None:
    """Raises ConfigError where ranks share a GPU, which each may see as its only one."""
    uuid = torch.cuda.get_device_properties(group.world.device).uuid
    gpus = group.collect_text(f"{group.world.host} {uuid}")
    counts = Counter(gpus)
    shared = group.tell_all([rank for rank, gpu in enumerate(gpus) if counts[gpu] > 1])
    if shared:
        problem = f"needs a GPU per rank, and {name_ranks(shared)} share theirs; use gloo"
        raise ConfigError(f"dist.backend=nccl: {problem}")


@contextmanager
def _quietly() -> Iterator[None]:
    """Hide a line that gloo of torch 2.10 prints: JSON of a verb goes to stdout too."""
    if not torch.__version__.startswith("2.10."):
        yield
        return
    sys.stdout.flush()
    kept = os.dup(1)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextmanager
def process_group(
    config: Dist, world: World, facts: Mapping[str, Any] | None = None
) -> Iterator[Group]:
    """The group of all ranks while the block runs; they compare `facts` and the backend first.

    After an error a group of several is not destroyed: that would wait for peers that are in a
    collective. Raises ConfigError when the ranks do not find each other, or differ.
    """
    backend = choose_backend(config, world)
    if config.path:  # the task may change the working directory before the end
        config = replace(config, path=str(Path(config.path).absolute()))
    group = Group(world, dist.HashStore() if world.world_size == 1 else meet(config, world))
    with group.peers_named():
        group.check_equal({**(facts or {}), "the backend": backend})
    if backend == "nccl":
        _check_own_gpu(group)
    if world.device.type == "cuda":
        torch.cuda.set_device(world.device)
    # One process needs no group: gloo fails on a machine without a network, even to itself.
    with suppress(RuntimeError) if world.world_size == 1 else nullcontext(), _quietly():
        dist.init_process_group(
            mpi.register() if backend == "mpi" else backend,
            store=group.store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=config.timeout_s),
            device_id=world.device if backend == "nccl" else None,  # the barrier would guess it
        )
    try:
        yield group
    except BaseException:
        if world.world_size == 1 and dist.is_initialized():
            dist.destroy_process_group()
        raise
    if not dist.is_initialized():
        return
    gc.collect()  # a DDP wrapper that outlives its group hangs the exit (9 of 40 runs, torch 2.13)
    dist.barrier()
    dist.destroy_process_group()
    part(config, world)
