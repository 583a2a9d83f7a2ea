"""The rendezvous of ranks, and the backend of their process group, by settings and devices.

In the startup exchange every rank writes a hello to the store and waits for rank 0's reply.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from trainer.base.errors import ConfigError, RunError
from trainer.core.config.schema import DistSettings
from trainer.core.distributed import accelerator
from trainer.core.distributed.signals import check_start
from trainer.core.distributed.watch.phases import PATIENCE, name_ranks
from trainer.core.distributed.world import World

LATER_S = 60.0  # than the watcher


def choose_backend(config: DistSettings, world: World) -> str:
    """Resolve `auto`: the accelerator's own backend, such as nccl, if there is one, else gloo.

    Ranks that share a device need gloo instead, which `process_group` finds out. Raises ConfigError
    if the configured backend cannot work here.
    """
    gpus = accelerator.count()
    problem = ""
    if config.backend == "mpi" and world.launcher.name not in ("mpirun", "srun"):
        problem = "needs mpirun or srun; use mpirun -n <ranks> python -m trainer, or gloo"
    elif config.backend == "mpi" and gpus:
        hidden = "hide the GPUs with CUDA_VISIBLE_DEVICES= (empty)"
        problem = f"carries CPU tensors only, and torch sees {gpus} GPUs; use auto, or {hidden}"
    elif config.backend == "nccl" and accelerator.kind() != "cuda":
        problem = "needs CUDA, but torch sees no GPU here; use dist.backend=auto or gloo"
    if problem:
        raise ConfigError(f"dist.backend={config.backend}: {problem}")
    if config.backend != "auto":
        return config.backend
    return accelerator.own_backend() if gpus else "gloo"


def collective_limit(config: DistSettings, backend: str) -> float:
    """Return the seconds after which a collective fails.

    NCCL then ends the process with SIGABRT, so there the watcher, which says why, must be first.
    """
    if not accelerator.carries(backend):
        return config.timeout_s
    return max(config.timeout_s, PATIENCE * (config.hang_timeout_s or 0.0)) + LATER_S


GUEST = "LOCKSTEP_GUEST"  # set in a process that meets others at the store of a run, by its name
MAX_POLL_S = 0.05  # of a file
STOP_LOOK_S = 0.25  # how often a waiting rank checks for a stop request
FOREVER = timedelta(days=30)
FIRST_ENTRY = b"\x09\0\0\0refcount/"  # how every file of a FileStore begins (torch 2.13)
REPLY_GRACE_S = 0.6  # the other ranks wait this much longer than rank 0 for its reply

num_meetings = 0  # started by this process; after the first, all ranks fail at the same time


def check_init(config: DistSettings, world: World) -> None:
    """Raise ConfigError for settings, each valid alone, with which the ranks cannot connect."""
    if config.init == "env" and world.world_size > 1:
        _ = world.launcher.master
    if config.path and not (folder := Path(config.path).absolute().parent).is_dir():
        raise ConfigError(f"dist.path={config.path}: {folder} is not a directory; make it")


def meet(config: DistSettings, world: World) -> dist.Store:
    """Connect all ranks and return their store, with a new prefix.

    Raises ConfigError within `dist.timeout_s` plus two seconds, naming ranks that are missing or
    were started twice.
    """
    global num_meetings
    num_meetings += 1
    location = _describe_place(config, world)
    try:
        return _Meeting(config, world, location).hold()
    except RunError:
        raise
    except (RuntimeError, OSError) as error:
        lost = f"rank 0 exited ({_first_line(error)}); read its error message"
        raise ConfigError(f"rendezvous at {location} failed: {lost}") from None


def part(config: DistSettings, world: World) -> None:
    """Remove the file of `dist.init=file` after the last collective: torch 2.13 may keep it."""
    if config.init == "file" and world.world_size > 1:
        _file_of(config).unlink(missing_ok=True)


# The store ----------------------------------------------------------------------------------------


def _describe_place(config: DistSettings, world: World) -> str:
    """Return the address or the file of the store."""
    if config.init != "file":
        return config.address or "{}:{}".format(*world.launcher.master)
    return str(_file_of(config))


class ValueStore(dist.PrefixStore):
    """Plain values under a prefix of a store, as JSON. Many take one message, if it can do that."""

    def put(self, value: Any, *keys: str) -> None:
        """Set all keys to one value."""
        text = json.dumps(value)
        if len(keys) > 1 and not _is_file(self):
            self.multi_set([*keys], [text] * len(keys))  # type: ignore[attr-defined]
            return
        for key in keys:
            self.set(key, text)

    def take(self, *keys: str) -> list[Any]:
        """Return the values of the keys once they are set."""
        has_one_message = len(keys) > 1 and not _is_file(self)
        texts = self.multi_get([*keys]) if has_one_message else map(self.get, keys)
        return [*map(json.loads, texts)]


def _is_file(store: dist.Store) -> bool:
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.FileStore)


def _file_of(config: DistSettings) -> Path:
    """Return the store's file; under torchrun each launch and restart has its own."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    launch = [os.environ[name] for name in names if name in os.environ]
    return Path(".".join([str(config.path), *launch])).absolute()


def _is_store(path: Path) -> bool:
    """Return True if a FileStore can use the file: it reads lengths and hangs on wrong ones."""
    if not path.exists():
        return True
    with path.open("rb") as file:
        return FIRST_ENTRY.startswith(file.read(len(FIRST_ENTRY)))


def _open(
    config: DistSettings, world: World, deadline: float, may_serve: bool = True
) -> dist.Store:
    if config.init == "file":
        path = _file_of(config)
        if not _is_store(path):
            raise ConfigError(f"dist.path={path}: must be a new file or FileStore; choose another")
        return dist.FileStore(str(path), world.world_size)
    if config.init == "env":  # torchrun's agent can own the store; then rank 0 is a client too
        host, port = world.launcher.master
        is_server = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    else:  # not init_method=tcp://: under torchrun it makes every rank a client of torchrun's store
        host, _, digits = str(config.address).rpartition(":")
        host = host.strip("[]")
        port = int(digits)
        is_server = world.rank == 0
    is_server = is_server and may_serve and GUEST not in os.environ
    while not is_server:  # torch's client retries beyond its limit and prints 20 lines of C++
        try:
            socket.create_connection((host, port), timeout=1).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConnectionError(f"no answer ({error.strerror or error})") from None
        time.sleep(0.05)
    timeout = timedelta(seconds=config.timeout_s)
    return dist.TCPStore(
        host, port, None, is_server, timeout, wait_for_workers=False, multi_tenant=True
    )


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# The startup exchange -----------------------------------------------------------------------------


class _Hello(NamedTuple):
    """A rank's message at startup."""

    rank: int
    size: int
    host: str
    pid: int

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class _Meeting:
    """The startup exchange: each rank writes a hello under a new number and waits for the reply.

    A store may outlive the processes that used it, as torchrun's does over restarts. So rank 0
    asks for every hello before its own to be repeated: a process that exited does not repeat it.
    """

    def __init__(self, config: DistSettings, world: World, location: str):
        self._config = config
        self._world = world
        self._place = location
        self._failure = f"no rendezvous at {location} within dist.timeout_s={config.timeout_s:g}"
        self._deadline = time.monotonic() + config.timeout_s
        self._own = _Hello(world.rank, world.world_size, world.host, world.pid)
        self._base = self._open_in_time()
        self._prefix = f"roll-call/{os.environ.get(GUEST, '')}{num_meetings}"
        self._store = ValueStore(self._prefix, self._base)
        # Under torchrun a rank may be restarted, and a file may be an earlier run's.
        is_agents = "TORCHELASTIC_RUN_ID" in os.environ
        self._is_fresh = isinstance(self._base, dist.TCPStore) and not is_agents

    def hold(self) -> dist.Store:
        """Return the store under the group's name. Raises ConfigError with rank 0's message."""
        name = self._follow() if self._own.rank else self._lead()
        self._base.set_timeout(timedelta(seconds=self._config.timeout_s))
        return dist.PrefixStore(f"lockstep/{name}", self._base)

    def _open_in_time(self) -> dist.Store:
        """Open the store in a thread: torch's client waits without limit for a foreign process."""
        results: list[dist.Store | Exception] = []

        def attempt() -> None:
            try:
                results.append(_open(self._config, self._world, self._deadline))
            except Exception as error:
                results.append(error)

        thread = threading.Thread(target=attempt, daemon=True)
        thread.start()
        while thread.is_alive() and time.monotonic() < self._deadline + REPLY_GRACE_S:
            thread.join(0.1)
            check_start()
        if not results:
            advice = "the process that listens there is not rank 0 of this run; choose another port"
            raise ConfigError(f"{self._failure}: {advice}")
        if isinstance(results[0], dist.Store):
            return results[0]
        if isinstance(results[0], ConfigError):
            raise results[0]
        reason = _first_line(results[0])
        if "EADDRINUSE" in reason or "address already in use" in reason.lower():
            advice = "the port is in use on rank 0's host; choose another, the same on every rank"
            raise ConfigError(f"{self._place}: {advice}")
        raise ConfigError(f"{self._failure}: {reason}; start rank 0, or correct its address")

    def _lead(self) -> str:
        first = self._say_hello()
        self._reply(range(1, first), repeat=True)
        hellos = {first: self._own}
        try:
            members = self._collect(first, hellos)
        except ConfigError as error:
            self._reply(hellos, problem=str(error))
            time.sleep(REPLY_GRACE_S / 2)  # the store may end with this process before it is read
            raise
        name = secrets.token_hex(8)
        taken = [n for n, hello in hellos.items() if members.get(hello.rank) is hello]
        self._reply(taken, name=name)
        if self._is_fresh:  # the next hello is too late
            self._reply([max(hellos) + 1], members=members)
        return name

    def _collect(self, hello_number: int, hellos: dict[int, _Hello]) -> dict[int, _Hello]:
        """Read hellos after `hello_number` until all ranks are there; return each rank's newest."""
        members = {0: self._own}
        while len(members) < self._own.size:
            values = self._read_hellos(hello_number + 1)
            if not values:
                here = "; ".join(f"rank {rank} is {members[rank]}" for rank in sorted(members)[:8])
                missing = name_ranks(self._missing(members))
                raise ConfigError(f"{self._failure}: {missing} did not connect; {here}")
            for value in values:
                hello_number += 1
                hello = hellos[hello_number] = _Hello(*value)
                if self._is_fresh:
                    self._check(hello, members)
                if hello.rank and hello.size == self._own.size:
                    members[hello.rank] = hello
        return members

    def _read_hellos(self, first: int) -> list[Any]:
        """Return all hellos from a number on, or wait for the next; empty at the deadline."""
        last = self._store.add("hellos", 0)
        keys = [f"hello/{hello_number}" for hello_number in range(first, last + 1)]
        if len(keys) > 1 and self._store.check(keys):
            return self._store.take(*keys)
        value = self._wait_for(f"hello/{first}", self._deadline)
        return [] if value is None else [value]

    def _check(self, hello: _Hello, members: Mapping[int, _Hello]) -> None:
        size = self._own.size
        if hello.size != size:
            other = f"{hello.size} on rank {hello.rank} ({hello})"
            raise ConfigError(f"WORLD_SIZE is {size} on rank 0 and {other}: must be the same")
        if hello.rank in members:
            twice = f"rank {hello.rank} was started twice, as {members[hello.rank]} and {hello}"
            missing = self._missing(members)
            others = f"missing: {name_ranks(missing) if missing else 'none'}"
            raise ConfigError(f"{twice}; {others}; give each process its own RANK")

    def _missing(self, members: Mapping[int, _Hello]) -> list[int]:
        return [rank for rank in range(self._own.size) if rank not in members]

    def _follow(self) -> str:
        while True:
            hello_number = self._say_hello()
            reply = self._wait_for(f"reply/{hello_number}", self._deadline + REPLY_GRACE_S)
            if reply is None:
                raise ConfigError(f"{self._failure}: rank 0 did not connect; start it")
            if "problem" in reply:
                raise ConfigError(reply["problem"])
            if "members" in reply:
                self._reply([hello_number + 1], **reply)  # for the next late rank
                raise ConfigError(f"{self._place}: {self._explain_late(reply['members'])}")
            if "name" in reply:
                return reply["name"]

    def _explain_late(self, members: Mapping[str, list[Any]]) -> str:
        rank, size, *_ = self._own
        if who := members.get(str(rank)):
            return f"rank {rank} is taken by {_Hello(*who)}; give each process its own RANK"
        return f"the group has {len(members)} ranks, but this process has WORLD_SIZE={size}"

    def _say_hello(self) -> int:
        hello_number = self._store.add("hellos", 1)
        self._store.put(self._own, f"hello/{hello_number}")
        return hello_number

    def _reply(self, hello_numbers: Iterable[int], **reply: Any) -> None:
        self._store.put(reply, *[f"reply/{hello_number}" for hello_number in hello_numbers])

    def _wait_for(self, key: str, deadline: float) -> Any:
        """Return the value of a key once it is set; None at the deadline.

        A thread waits, since the wait delays Python's signal handlers and its timeout prints
        lines of C++. Polling would keep rank 0 from its own work, from 256 ranks on.
        """
        if not self._store.check([key]):
            errors: list[Exception] = []
            thread = threading.Thread(target=self._block, args=(key, errors), daemon=True)
            thread.start()
            while thread.is_alive():
                thread.join(min(STOP_LOOK_S, max(0.0, deadline - time.monotonic())))
                check_start()
                if time.monotonic() >= deadline:
                    if self._unblock(key):
                        thread.join(REPLY_GRACE_S)
                    return None
            if errors:
                raise errors[0]
        return self._store.take(key)[0]

    def _block(self, key: str, errors: list[Exception]) -> None:
        try:
            if isinstance(self._base, dist.TCPStore):
                self._store.wait([key], FOREVER)
            else:
                self._poll(key)
        except Exception as error:
            errors.append(error)

    def _poll(self, key: str) -> None:
        """Poll a FileStore: its own wait reads the file all the time and holds its lock."""
        while time.monotonic() < self._deadline + REPLY_GRACE_S and not self._store.check([key]):
            time.sleep(MAX_POLL_S)

    def _unblock(self, key: str) -> bool:
        """Set a key through a second connection, as the waiting thread uses the first."""
        is_blocked = isinstance(self._base, dist.TCPStore)
        if is_blocked:
            with suppress(OSError, RuntimeError):
                base = _open(self._config, self._world, time.monotonic(), may_serve=False)
                dist.PrefixStore(self._prefix, base).set(key, "null")
        return is_blocked
