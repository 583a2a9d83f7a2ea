"""The process group: backend, the few collectives that Lockstep needs, and its shutdown."""

from __future__ import annotations

import gc
import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.base.codec import bytes_of
from trainer.base.errors import ConfigError, RunError, describe, message_of
from trainer.core.blame import is_of_a_group
from trainer.core.config.schema import DistSettings
from trainer.core.distributed import accelerator
from trainer.core.distributed.rendezvous import (
    ValueStore,
    choose_backend,
    collective_limit,
    meet,
    part,
)
from trainer.core.distributed.watch.phases import name_ranks, ranks_by_value
from trainer.core.distributed.watch.watcher import LOST
from trainer.core.distributed.world import World
from trainer.core.extensions import BACKENDS

_LOST_PEER = re.compile(
    r"Connection (?:closed|reset|refused)(?: by peer)?(?: \[[^]]+\]:\d+)?|Broken pipe"
    r"|Connection was likely closed|remote process exited|Timed out waiting \w+"
    r"|Application timeout|wait timeout"
)


CPU = torch.device("cpu")
SHARED_GPU = "NCCL_MULTI_RANK_GPU_ENABLE"
_ERROR_TYPES = {"config": ConfigError, "run": RunError}


class Group:
    """All ranks of one run. Collective: every rank must call every method, in the same order.

    Numbers are exchanged by collectives, which take time logarithmic in the number of ranks.
    Plain values, as JSON, go to rank 0 through the store: a message from each rank, and a reply.
    """

    def __init__(self, world: World, store: dist.Store):
        self.world = world
        self.store = store
        self._calls = 0

    def total(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum of a tensor over all ranks, the same on every rank.

        Rank 0 adds floating-point numbers in rank order. A ring all-reduce adds in an order that
        depends on the position in the tensor, so a resume would give different bits. Integers
        are all-reduced, since their sum does not depend on the order.
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

    def find_unequal(self, numbers: torch.Tensor, absent: int | None = None) -> torch.Tensor:
        """Return a bool tensor on the CPU: True where an integer differs between ranks.

        Where a rank gives `absent`, the smallest integer, it is not compared; where all ranks do,
        nothing differs.
        """
        if self.world.world_size == 1:
            return torch.zeros_like(numbers, dtype=torch.bool)
        return find_unequal(numbers, self._wire_device(), absent)

    def max(self, *values: float, group: Any = None) -> list[float]:
        """Return the maximum of each value over all ranks, by another group of them if given."""
        if self.world.world_size == 1:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self._wire_device())
        return most(self, tensor, group).tolist()

    def share_bytes(self, data: bytes | None, source: int = 0) -> bytes:
        """Return the bytes of rank `source` on every rank; those of other ranks are ignored."""
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

    def share_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return rank 0's tensor on every rank; the others give one of its shape and dtype."""
        if self.world.world_size == 1:
            return tensor
        sent = tensor.to(self._wire_device()).contiguous()
        dist.broadcast(bytes_of(sent), 0)
        return sent.to(tensor.device)

    def send_to_rank_0(self, tensor: torch.Tensor, source: int) -> torch.Tensor:
        """Return rank `source`'s tensor on rank 0, which gives one of its shape and dtype."""
        if source == 0:
            return tensor
        sent = tensor.to(self._wire_device()).contiguous()
        if self.world.rank == source:
            dist.send(bytes_of(sent), 0)
        elif self.world.rank == 0:
            dist.recv(bytes_of(sent), source)
        return sent.to(tensor.device)

    def collect(self, value: Any) -> list[Any]:
        """Return the values of all ranks in rank order on rank 0, an empty list elsewhere."""
        size = self.world.world_size
        if size == 1:
            return [json.loads(json.dumps(value))]
        self._calls += 1
        store = ValueStore(f"text/{self._calls}", self.store)
        store.put(value, str(self.world.rank))
        return [] if self.world.rank else store.take(*map(str, range(size)))

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order, on every rank."""
        return self.tell_all(self.collect(value))

    def gather_of(self, kind: str, value: Any) -> list[Any]:
        """Return the values of the ranks that passed the same `kind`, in rank order."""
        groups: dict[str, list[Any]] = {}
        for key, other in self.collect([_hashed(kind), value]):
            groups.setdefault(key, []).append(other)
        if self.world.world_size == 1:
            return groups[_hashed(kind)]
        store = ValueStore(f"kind/{self._calls}", self.store)
        for key, values in groups.items():
            store.put(values, key)
        return store.take(_hashed(kind))[0]

    def check_equal(self, facts: Mapping[str, Any]) -> None:
        """Raise ConfigError on every rank, naming the first fact that differs between ranks.

        Digests are compared first: through the store before the process group exists, later by
        a collective. The facts themselves are sent only if the digests differ.
        """
        if self.world.world_size == 1:
            return
        digest = number_of(facts)
        if dist.is_initialized():
            is_equal = not self.find_unequal(torch.tensor([digest])).any()
        else:
            is_equal = self.tell_all(len({*self.collect(digest)}) == 1)
        if not is_equal:
            name, ranks = find_odd_ranks(self, facts)
            differ = " and ".join(f"{value} on {name_ranks(who)}" for value, who in ranks)
            must = "must be the same; start all ranks with the same command"
            raise ConfigError(f"{name} is {differ}: {must}")

    def tell_all(self, finding: Any, source: int = 0) -> Any:
        """Return the `finding` of rank `source` on every rank, from JSON; others are ignored.

        It is sent through the store before the process group exists, where only rank 0 may be the
        source, later by a collective.
        """
        if self.world.world_size == 1 or dist.is_initialized():
            return json.loads(self.share_bytes(json.dumps(finding).encode(), source))
        self._calls += 1
        store = ValueStore("finding", self.store)
        key = str(self._calls)
        if self.world.rank == 0:
            store.put(finding, key)
        return store.take(key)[0]

    @contextmanager
    def agreed(self, doing: str, limit: timedelta | None = None) -> Iterator[None]:
        """Run a block that may fail on some ranks only; if it does, raise on all ranks.

        With a `limit`, ranks wait so long for the others, instead of dist.timeout_s.

        A rank that failed raises its own error. The other ranks raise a ConfigError or RunError
        with the message of the lowest rank that failed. For any other type of error they raise
        a RuntimeError that names this rank. A rank that failed with the same words as that one
        raises a RunError, so that they are printed once.
        """
        problem: Exception | None = None
        size = self.world.world_size
        has_limit = limit is not None and size > 1 and dist.get_backend() != "mpi"
        patient = dist.new_group(timeout=limit) if has_limit else None
        try:
            yield
        except Exception as error:
            problem = error
        (first,) = self.max(size - self.world.rank if problem is not None else 0, group=patient)
        if first:
            rank = size - int(first)
            own = _describe(problem)
            kind, line = self.tell_all(own, rank)
            if kind == "other" and size > 1:
                lines = self.gather(own[1])
                alike = [each for each, other in enumerate(lines) if other == line]
                if problem is not None and own[1] == line and self.world.rank != rank:
                    raise RunError(f"failed {doing}, as rank {rank}: {line}")
                add_note = getattr(problem, "add_note", None)  # from Python 3.11 on
                if self.world.rank == rank and len(alike) > 1 and add_note:
                    add_note(f"The same on {name_ranks(alike)}.")
            if problem is not None:
                raise problem
            if kind in _ERROR_TYPES:
                raise _ERROR_TYPES[kind](line)
            raise RuntimeError(f"rank {rank} failed {doing}: {line}")

    def all_arrive(self, meeting_point: str, limit_s: float) -> bool:
        """Return True if all ranks call this with the same `meeting_point` within the limit.

        Unlike a collective it may be called by some ranks only, while others wait in a collective.
        """
        size = self.world.world_size
        if size == 1:
            return True
        end = time.monotonic() + limit_s
        with suppress(RuntimeError):  # the store has gone, with its rank
            if self.store.add(f"arrived/{meeting_point}", 1) == size:
                self.store.set(f"arrived/{meeting_point}/all", "")
            while time.monotonic() < end:
                if self.store.check([f"arrived/{meeting_point}/all"]):
                    return True
                time.sleep(0.02)
        return False

    @contextmanager
    def peers_named(self) -> Iterator[None]:
        """Raise a one-line RunError for a backend error that means a lost or silent rank."""
        try:
            yield
        except RuntimeError as error:
            lost = _LOST_PEER.search(str(error))
            if lost is None or not is_of_a_group(error):
                raise
            line = f"{LOST} ({lost[0]})"
            raise RunError(f"{line}; read its error message, or its launcher's") from error

    def _wire_device(self) -> torch.device:
        return self.world.device if accelerator.carries(dist.get_backend()) else CPU


def _describe(problem: Exception | None) -> tuple[str, str]:
    """Return the kind of an error and its line; two empty strings for None."""
    for kind, error in _ERROR_TYPES.items():
        if isinstance(problem, error):
            return kind, message_of(problem)
    return ("other", describe(problem)) if problem else ("", "")


def number_of(value: Any) -> int:
    """Return 64 bits of the digest of a plain value's JSON, for a collective of integers."""
    return int(_hashed(json.dumps(value)), 16) - 2**63


def _hashed(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def find_odd_ranks(
    group: Group, facts: Mapping[str, Any] | None
) -> tuple[str, list[tuple[str, list[int]]]]:
    """Return the first fact that differs between ranks, and the ranks by its value, as a string.

    Ranks with None are not compared. An empty name and list if nothing differs.
    """
    every = {rank: own for rank, own in enumerate(group.collect(facts)) if own is not None}
    first_difference: tuple[str, dict[str, list[int]]] = ("", {})
    for name in dict.fromkeys(name for own in every.values() for name in own):
        ranks = ranks_by_value({rank: str(own.get(name)) for rank, own in every.items()})
        if len(ranks) > 1:
            first_difference = (name, ranks)
            break
    return group.tell_all([first_difference[0], [*first_difference[1].items()]])


def most(group: Group, tensor: torch.Tensor, among: Any = None) -> torch.Tensor:
    """Return the maximum of each element over all ranks; the host does not wait for it.

    `among` is another group of them.
    """
    if group.world.world_size == 1:
        return tensor
    sent = tensor.to(group._wire_device(), copy=True)
    dist.all_reduce(sent, dist.ReduceOp.MAX, group=among)
    return sent.to(tensor.device)


def find_unequal(
    numbers: torch.Tensor, device: torch.device, absent: int | None = None
) -> torch.Tensor:
    """Return what `Group.find_unequal` does, by a collective on this device."""
    both = torch.stack([numbers, ~numbers])
    if absent is not None:
        both[1][numbers == absent] = absent
    both = both.to(device)
    dist.all_reduce(both, dist.ReduceOp.MAX)
    unequal = both[0] != ~both[1]  # the maximum differs from the minimum
    return (unequal if absent is None else unequal & (both[1] != absent)).cpu()


def find_sharing(group: Group) -> list[int]:
    """Return the ranks that share a device, which each of them may see as its only one.

    How many devices a rank sees says nothing: srun --gpu-bind and wrappers show each rank its own.
    """
    own = group.world.device
    devices = group.collect(f"{group.world.host} {accelerator.identity(own)}")
    ranks = ranks_by_value(dict(enumerate(devices))).values()
    return group.tell_all(sorted(rank for who in ranks if len(who) > 1 for rank in who))


def _of_own_devices(backend: str, config: DistSettings, group: Group) -> str:
    """Return gloo instead of the accelerator's backend if ranks share a device.

    Raises ConfigError if `dist.backend` asks for it, unless NCCL is told to allow it: 2.30 and
    newer run several ranks on a GPU, slowly, for trying layouts.
    """
    shared = find_sharing(group)
    is_let = config.backend == "nccl" and os.environ.get(SHARED_GPU) == "1"
    if not shared or is_let:
        return backend
    ranks = f"{name_ranks(shared)} share GPUs"
    if config.backend != "auto":
        problem = f"needs one GPU per rank, but {ranks}; use gloo"
        raise ConfigError(f"dist.backend={backend}: {problem}")
    if group.world.rank == 0:
        slow = f"gloo, which moves gradients through the host, instead of {backend}"
        line = f"warning: {ranks}: dist.backend=auto is {slow}; start one rank per GPU"
        print(line, file=sys.stderr, flush=True)
    return "gloo"


@contextmanager
def _quietly() -> Iterator[None]:
    """Hide a line that gloo of torch 2.10 prints to stdout, where verbs print JSON."""
    if not torch.__version__.startswith("2.10."):
        yield
        return
    sys.stdout.flush()
    stdout_copy = os.dup(1)
    with open(os.devnull, "wb") as null:
        os.dup2(null.fileno(), 1)
    try:
        yield
    finally:
        os.dup2(stdout_copy, 1)
        os.close(stdout_copy)


@contextmanager
def process_group(
    config: DistSettings, world: World, facts: Mapping[str, Any] | None = None
) -> Iterator[Group]:
    """Open the process group for the duration of the block, after all ranks compared `facts`.

    The ranks compare the backend too. The group is destroyed after the block. After an error with
    several ranks it is not, since that would wait for peers that are blocked in a collective.
    Raises ConfigError if rendezvous fails, or if a fact differs between ranks.
    """
    if dist.is_initialized():
        why = "a process group is open already"
        raise ConfigError(f"{why}: leave out init_process_group; the trainer calls it")
    backend = choose_backend(config, world)
    if config.path:  # the task may change the working directory before `part`
        config = replace(config, path=str(Path(config.path).absolute()))
    group = Group(world, dist.HashStore() if world.world_size == 1 else meet(config, world))
    with group.peers_named():
        group.check_equal({**(facts or {}), "the backend": backend})
    if accelerator.is_used(world.device):
        if world.world_size > 1 and accelerator.carries(backend):
            backend = _of_own_devices(backend, config, group)
        if torch.version.cuda and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
            # before the first allocation: fewer fragments when sizes change
            os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        torch.accelerator.set_device_index(world.device)
    # NCCL binds a group to one device: with several, DDP's buckets are on any of them
    is_bound = accelerator.carries(backend) and len(world.devices) == 1
    # One process needs no group. gloo fails on a machine without a network even for one rank.
    with suppress(RuntimeError) if world.world_size == 1 else nullcontext(), _quietly():
        dist.init_process_group(
            BACKENDS[backend].load().register() if backend in BACKENDS else backend,
            store=group.store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=collective_limit(config, backend)),
            device_id=world.device if is_bound else None,  # else barrier guesses it
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
    group.max(0.0)  # all arrive; with several devices a rank, dist.barrier() does not know which
    dist.destroy_process_group()
    part(config, world)
