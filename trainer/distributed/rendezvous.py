"""Rendezvous: the store of all ranks, and a roll call that ends in time and names missing ranks."""

from __future__ import annotations

import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.config.schema import Dist
from trainer.distributed.signals import check_start
from trainer.distributed.world import World
from trainer.errors import ConfigError, RunError

MIN_POLL_S = 0.001
MAX_POLL_S = 0.05
GRACE_S = 0.6  # the other ranks wait this much longer than rank 0, for its reply

num_meetings = 0  # that this process has begun; from the first on, its ranks fail together


def check_init(config: Dist, world: World) -> None:
    """Refuse settings that cannot bring the ranks together, beyond what one setting alone tells."""
    if config.init == "env" and world.world_size > 1:
        _ = world.launcher.master
    if config.path and not (folder := Path(config.path).absolute().parent).is_dir():
        raise ConfigError(f"dist.path={config.path}: {folder} is not a directory; make it")


def meet(config: Dist, world: World) -> dist.Store:
    """The store of all ranks once every one is there, with a prefix new to it.

    Raises ConfigError within `dist.timeout_s` and two seconds, naming ranks that are missing or
    there twice.
    """
    global num_meetings
    num_meetings += 1
    deadline = time.monotonic() + config.timeout_s
    place = _describe_place(config, world)
    failure = f"no group was found at {place} within dist.timeout_s={config.timeout_s:g}"
    try:
        store = _open_in_time(config, world, place, deadline, failure)
        name = _RollCall(store, world, place, deadline, failure).hold()
    except (ConfigError, RunError):
        raise
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"no group was found at {place}: rank 0 went away ({_first_line(error)}); its own"
            " message says why"
        ) from None
    store.set_timeout(timedelta(seconds=config.timeout_s))
    return dist.PrefixStore(f"lockstep/{name}", store)


def part(config: Dist, world: World) -> None:
    """Remove the file of `dist.init=file` after the last collective: torch 2.13 may leave it."""
    if config.init == "file" and world.world_size > 1:
        _file_of(config).unlink(missing_ok=True)


# The store ----------------------------------------------------------------------------------------


def _describe_place(config: Dist, world: World) -> str:
    """The address or file. Raises ConfigError for a file that an earlier run left."""
    if config.init != "file":
        return config.address or "{}:{}".format(*world.launcher.master)
    path = _file_of(config)
    if path.exists() and time.time() - path.stat().st_mtime > config.timeout_s:
        raise ConfigError(f"dist.path={config.path}: {path} was left by an earlier run; remove it")
    return f"{path} (if it is of an earlier run, remove it)"


def _file_of(config: Dist) -> Path:
    """Under torchrun each launch and restart has its own file."""
    names = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    launch = [os.environ[name] for name in names if name in os.environ]
    return Path(".".join([str(config.path), *launch])).absolute()


def _open_in_time(
    config: Dist, world: World, place: str, deadline: float, failure: str
) -> dist.Store:
    """Open the store in a thread: torch's client has no limit where a foreign process is mute."""
    results: list[dist.Store | Exception] = []

    def attempt() -> None:
        try:
            results.append(_open(config, world, deadline))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() < deadline + GRACE_S:
        thread.join(0.1)
        check_start()
    if not results:
        advice = "what listens there is not rank 0 of this run; choose another port"
        raise ConfigError(f"{failure}: {advice}")
    if isinstance(results[0], dist.Store):
        return results[0]
    reason = _first_line(results[0])
    if "EADDRINUSE" in reason or "address already in use" in reason.lower():
        advice = "the port is in use on rank 0's host; choose another, the same on every rank"
        raise ConfigError(f"{place}: {advice}")
    raise ConfigError(f"{failure}: {reason}; is rank 0 running, and is it this address?")


def _open(config: Dist, world: World, deadline: float) -> dist.Store:
    if config.init == "file":
        return dist.FileStore(str(_file_of(config)), world.world_size)
    if config.init == "env":  # torchrun has a store of its own, and rank 0 is a client too
        host, port = world.launcher.master
        is_server = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    else:  # not init_method=tcp://, which under torchrun makes every rank a client of that store
        host, _, digits = str(config.address).rpartition(":")
        host, port = host.strip("[]"), int(digits)
        is_server = world.rank == 0
    if not is_server:
        _wait_for_listener(host, port, deadline)
    return dist.TCPStore(
        host,
        port,
        world.world_size,
        is_server,
        timedelta(seconds=config.timeout_s),
        wait_for_workers=False,
        multi_tenant=True,
    )


def _wait_for_listener(host: str, port: int, deadline: float) -> None:
    """Wait by plain connections: torch's client retries beyond its limit and prints lines of C++."""
    while True:
        try:
            return socket.create_connection((host, port), timeout=1).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConnectionError(f"nobody answers there ({error.strerror or error})") from None
        time.sleep(0.05)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


# The roll call ------------------------------------------------------------------------------------

Hello = Mapping[str, Any]  # rank, size, host and pid of a process


class _RollCall:
    """Every rank says hello under a number of its own and waits for rank 0's reply to that number.

    A store may outlive the processes that used it, as torchrun's does over restarts. So rank 0 has
    every hello said again that came before its own: a process that is gone does not do so.
    """

    def __init__(
        self, store: dist.Store, world: World, place: str, deadline: float, failure: str
    ) -> None:
        self._store = dist.PrefixStore(f"roll-call/{num_meetings}", store)
        self._world = world
        self._place = place
        self._deadline = deadline
        self._failure = failure
        # Under torchrun a rank may be started again, and a file may be an earlier run's.
        self._is_for_us = (
            isinstance(store, dist.TCPStore) and "TORCHELASTIC_RUN_ID" not in os.environ
        )
        self._hello: Hello = {
            "rank": world.rank,
            "size": world.world_size,
            "host": world.host,
            "pid": world.pid,
        }

    def hold(self) -> str:
        """The name of the group, new each time. Raises ConfigError with rank 0's finding."""
        return self._lead() if self._world.rank == 0 else self._follow()

    def _lead(self) -> str:
        first = self._say_hello()
        for number in range(1, first):
            self._reply(number, again=True)
        hellos = {first: self._hello}
        for number in itertools.count(first + 1):
            members = self._members(hellos)
            if len(members) == self._world.world_size:
                break
            hello = self._wait_for(f"hello/{number}", self._deadline)
            if hello is not None:
                hellos[number] = hello
            problem = self._find_problem(hellos) if hello is not None else self._missing(members)
            if problem:
                for number in hellos:
                    self._reply(number, problem=problem)
                time.sleep(GRACE_S / 2)  # the store may end with this process before it is read
                raise ConfigError(problem)
        name = secrets.token_hex(8)
        for number, hello in hellos.items():
            if members.get(hello["rank"]) is hello:
                self._reply(number, name=name)
        if self._is_for_us:
            self._reply(max(hellos) + 1, members=list(members.values()))  # for one that is late
        return name

    def _follow(self) -> str:
        while True:
            number = self._say_hello()
            reply = self._wait_for(f"reply/{number}", self._deadline + GRACE_S)
            if reply is None:
                raise ConfigError(f"{self._failure}: rank 0 did not come")
            if "problem" in reply:
                raise ConfigError(reply["problem"])
            if "members" in reply:
                self._reply(number + 1, **reply)  # for the next that is late
                raise ConfigError(self._left_out(reply["members"]))
            if "name" in reply:
                return reply["name"]

    def _say_hello(self) -> int:
        number = self._store.add("hellos", 1)
        self._store.set(f"hello/{number}", json.dumps(self._hello))
        return number

    def _reply(self, number: int, **reply: Any) -> None:
        self._store.set(f"reply/{number}", json.dumps(reply))

    def _wait_for(self, key: str, deadline: float) -> Any:
        """The value of a key once it is set; None at the deadline.

        By polling, ever more slowly: a blocking wait holds Python's signal handlers back, and its
        timeout prints lines of C++.
        """
        began = time.monotonic()
        while (now := time.monotonic()) < deadline:
            check_start()
            if self._store.check([key]):
                return json.loads(self._store.get(key))
            time.sleep(min(max((now - began) / 10, MIN_POLL_S), MAX_POLL_S))
        return None

    def _members(self, hellos: Mapping[int, Hello]) -> dict[int, Hello]:
        """The newest hello of each rank, and this one."""
        size = self._world.world_size
        newest = {hello["rank"]: hello for hello in hellos.values() if hello["size"] == size}
        return {**newest, 0: self._hello}

    def _find_problem(self, hellos: Mapping[int, Hello]) -> str:
        """The problem with the newest hello; empty where an older one may be of an earlier run."""
        *before, hello = hellos.values()
        if not self._is_for_us:
            return ""
        size = self._world.world_size
        if hello["size"] != size:
            other = f"{hello['size']} on rank {hello['rank']} ({_who(hello)})"
            return f"WORLD_SIZE is {size} on rank 0 and {other}: must be the same"
        twin = next((h for h in before if h["rank"] == hello["rank"]), None)
        if twin is None:
            return ""
        ranks = {h["rank"] for h in before}
        missing = ", ".join(str(rank) for rank in range(size) if rank not in ranks) or "none"
        who = f"as {_who(twin)} and {_who(hello)}"
        return f"rank {hello['rank']} was started twice, {who}; missing: {missing}"

    def _missing(self, members: Mapping[int, Hello]) -> str:
        missing = [str(rank) for rank in range(self._world.world_size) if rank not in members]
        ranks = f"rank{'s' * (len(missing) > 1)} {', '.join(missing)}"
        here = "; ".join(f"rank {r} is {_who(h)}" for r, h in sorted(members.items())[:8])
        return f"{self._failure}: {ranks} did not come; {here}"

    def _left_out(self, members: Sequence[Hello]) -> str:
        """The problem of a process that comes when the group stands."""
        rank = self._world.rank
        for hello in members:
            if hello["rank"] == rank:
                taken = f"rank {rank} is taken by {_who(hello)}"
                return f"{self._place}: {taken}; give each process a RANK of its own"
        own = f"this one came with WORLD_SIZE={self._world.world_size}"
        return f"{self._place}: the group there has {len(members)} ranks, and {own}"


def _who(hello: Hello) -> str:
    return f"process {hello['pid']} on {hello['host']}"
