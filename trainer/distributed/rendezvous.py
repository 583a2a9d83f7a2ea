"""How the ranks find each other: a store, and a roll call over it that ends in time and names who is missing."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from trainer.config.schema import Dist
from trainer.distributed.signals import check_start
from trainer.distributed.world import World
from trainer.errors import ConfigError, RunError

POLL_S = 0.003
ANSWER_S = 10.0  # of the store itself
GRACE_S = 0.6  # the others wait so much longer than rank 0, for its verdict


def check_init(config: Dist, world: World) -> None:
    """Refuse what cannot bring the ranks together, beyond what the configuration alone can tell."""
    if config.init == "env" and world.world_size > 1:
        _ = world.launcher.master
    if config.path and not Path(config.path).absolute().parent.is_dir():
        raise ConfigError(
            f"dist.path={config.path}: {Path(config.path).absolute().parent} is not a directory; make it"
        )


has_begun = False  # from here on all ranks fail together, if one does


def meet(config: Dist, world: World) -> dist.Store:
    """The store of all ranks once every one is there, with a prefix that no other group or attempt has had.

    Raises ConfigError within `dist.timeout_s` and two seconds, naming ranks that are missing or there twice.
    """
    global has_begun
    has_begun, deadline = True, time.monotonic() + config.timeout_s
    place, make = {"env": _by_environment, "tcp": _by_address, "file": _by_file}[config.init](
        config, world
    )
    missing = f"no group was found at {place} within dist.timeout_s={config.timeout_s:g}"
    try:
        store = _made(place, make, deadline, missing)
        prefix = _RollCall(store, world, place, missing, deadline).hold()
    except (ConfigError, RunError):  # a file stays: others may still read rank 0's verdict in it
        raise
    except (RuntimeError, OSError) as error:
        raise ConfigError(
            f"no group was found at {place}: rank 0 went away ({_first_line(error)}); its own message says why"
        ) from None
    store.set_timeout(timedelta(seconds=config.timeout_s))
    return dist.PrefixStore(f"lockstep/{prefix}", store)


def part(config: Dist, world: World) -> None:
    """After the group's last collective, on every rank: torch's own removal of the file misses some (torch 2.13)."""
    if config.init == "file" and world.world_size > 1:
        _file_of(config).unlink(missing_ok=True)


# The store ------------------------------------------------------------------------------------------------------------


def _made(place: str, make: Callable[[], dist.Store], deadline: float, missing: str) -> dist.Store:
    """Made in a thread: torch's client waits without limit on a foreign process that accepts and says nothing."""
    found: list[dist.Store | Exception] = []

    def attempt() -> None:
        try:
            found.append(make())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=attempt, daemon=True)
    thread.start()
    while thread.is_alive() and time.monotonic() < deadline + GRACE_S:
        thread.join(0.1)
        check_start()
    if not found:
        raise ConfigError(
            f"{missing}: what listens there is not rank 0 of this run; choose another port"
        )
    if isinstance(found[0], Exception):
        reason = _first_line(found[0])
        if "EADDRINUSE" in reason or "address already in use" in reason.lower():
            raise ConfigError(
                f"{place}: the port is in use on rank 0's host; choose another, the same on every rank"
            )
        raise ConfigError(f"{missing}: {reason}; is rank 0 running, and is it this address?")
    return found[0]


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _tcp_store(host: str, port: int, world: World, is_server: bool, config: Dist) -> dist.Store:
    timeout = timedelta(seconds=config.timeout_s)
    size, deadline = world.world_size, time.monotonic() + config.timeout_s
    while (
        not is_server
    ):  # torch's client retries beyond its limit where nobody listens, and prints 20 lines of C++
        try:
            socket.create_connection((host, port), timeout=1).close()
            break
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConnectionError(f"nobody answers there ({error.strerror or error})") from None
            time.sleep(0.05)
    return dist.TCPStore(
        host, port, size, is_server, timeout, wait_for_workers=False, multi_tenant=True
    )


def _by_environment(config: Dist, world: World) -> tuple[str, Callable[[], dist.Store]]:
    """torchrun keeps a store of its own, to which rank 0 is a client too."""
    host, port = world.launcher.master
    is_server = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    return f"{host}:{port}", partial(_tcp_store, host, port, world, is_server, config)


def _by_address(config: Dist, world: World) -> tuple[str, Callable[[], dist.Store]]:
    host, _, port = str(config.address).rpartition(":")
    # Not through init_method=tcp://: under torchrun that makes every rank a client of the agent's store.
    return f"{host}:{port}", partial(
        _tcp_store, host.strip("[]"), int(port), world, world.rank == 0, config
    )


def _file_of(config: Dist) -> Path:
    launch = [
        os.environ[n]
        for n in ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
        if n in os.environ
    ]
    return Path(".".join([str(config.path), *launch])).absolute()


def _by_file(config: Dist, world: World) -> tuple[str, Callable[[], dist.Store]]:
    """Under torchrun each launch and restart has a file of its own; by hand a file that was left over is refused."""
    path = _file_of(config)
    if path.exists() and time.time() - path.stat().st_mtime > config.timeout_s:
        raise ConfigError(f"dist.path={config.path}: {path} was left by an earlier run; remove it")
    return f"{path} (if it is of an earlier run, remove it)", partial(
        dist.FileStore, str(path), world.world_size
    )


# The roll call --------------------------------------------------------------------------------------------------------

_groups = itertools.count()


class _RollCall:
    """Every rank says hello; rank 0 proposes who makes the group, those answer, and only then does it stand.

    A store may outlive the processes that used it (torchrun's does), so what lies in it proves nothing: the hello of
    a process that is gone does not answer a proposal.
    """

    def __init__(self, store: dist.Store, world: World, place: str, missing: str, deadline: float):
        self.store = dist.PrefixStore(f"roll-call/{next(_groups)}", store)
        self.store.set_timeout(timedelta(seconds=ANSWER_S))  # no key is waited for here
        self.world, self.place, self.missing, self.deadline = world, place, missing, deadline
        self.is_own_store = (
            isinstance(store, dist.TCPStore) and "TORCHELASTIC_RUN_ID" not in os.environ
        )
        self.nonce = secrets.token_hex(8)
        self.number = self.store.add("hellos", 1)
        facts = {"rank": world.rank, "size": world.world_size, "host": world.host, "pid": world.pid}
        self.store.set(f"hello/{self.number}", json.dumps({**facts, "nonce": self.nonce}))

    def hold(self) -> str:
        """The name of the group, another each time. Raises ConfigError with what rank 0 found."""
        return self._lead() if self.world.rank == 0 else self._follow()

    def _lead(self) -> str:
        hellos: dict[int, dict[str, Any]] = {}
        name = ""
        while time.monotonic() < self.deadline:
            check_start()
            self._read(hellos)
            if self.is_own_store and (problem := self._wrong(hellos)):
                self._refuse(
                    problem, len(hellos)
                )  # nobody is gone from a store that we have just made
            members = self._members(hellos)
            if len(members) == self.world.world_size:
                nonces = [members[rank]["nonce"] for rank in range(self.world.world_size)]
                name = hashlib.sha256("/".join(nonces).encode()).hexdigest()[:16]
                self.store.set("proposal", json.dumps({"name": name, "members": members}))
                if all(self._has_answered(name, rank) for rank in range(1, self.world.world_size)):
                    self.store.set(f"go/{name}", "")
                    return name
            time.sleep(POLL_S)
        self._refuse(self._missing(hellos, name), len(hellos))
        raise AssertionError("unreachable")

    def _follow(self) -> str:
        while time.monotonic() < self.deadline + GRACE_S:
            check_start()
            if (verdict := self._get("verdict")) and verdict["hellos"] >= self.number:
                raise ConfigError(verdict["problem"])
            if proposal := self._get("proposal"):
                name, members = proposal["name"], proposal["members"]
                member = members.get(str(self.world.rank), {})
                if member.get("nonce") == self.nonce:
                    self.store.set(f"answer/{name}/{self.world.rank}", "")
                    if self.store.check([f"go/{name}"]):
                        return name
                elif self.is_own_store and self.store.check([f"go/{name}"]):
                    raise ConfigError(self._left_out(member, len(members)))
            time.sleep(POLL_S)
        raise ConfigError(f"{self.missing}: rank 0 did not come")

    def _left_out(self, member: Mapping[str, Any], size: int) -> str:
        if member:
            taken = f"rank {self.world.rank} is taken by {_who(member)}"
            return f"{self.place}: {taken}; give each process a RANK of its own"
        return f"{self.place}: the group there has {size} ranks, and this one came with WORLD_SIZE={self.world.world_size}"

    def _read(self, hellos: dict[int, dict[str, Any]]) -> None:
        for number in range(1, self.store.add("hellos", 0) + 1):
            if number not in hellos and (hello := self._get(f"hello/{number}")):
                hellos[number] = hello

    def _members(self, hellos: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """The newest hello of each rank, and our own."""
        newest = {
            h["rank"]: h for _, h in sorted(hellos.items()) if h["size"] == self.world.world_size
        }
        return {**newest, 0: hellos[self.number]} if self.number in hellos else {}

    def _has_answered(self, name: str, rank: int) -> bool:
        return self.store.check([f"answer/{name}/{rank}"])

    def _wrong(self, hellos: Mapping[int, dict[str, Any]]) -> str:
        seen: dict[int, dict[str, Any]] = {}
        for _, hello in sorted(hellos.items()):
            if hello["size"] != self.world.world_size:
                other = f"{hello['size']} on rank {hello['rank']} ({_who(hello)})"
                return (
                    f"WORLD_SIZE is {self.world.world_size} on rank 0 and {other}: must be the same"
                )
            if (before := seen.setdefault(hello["rank"], hello)) is not hello:
                return (
                    f"rank {hello['rank']} was started twice, as {_who(before)} and {_who(hello)}; missing: "
                    + (
                        ", ".join(str(r) for r in range(self.world.world_size) if r not in seen)
                        or "none"
                    )
                )
        return ""

    def _missing(self, hellos: Mapping[int, dict[str, Any]], name: str) -> str:
        members = self._members(hellos)
        ranks = range(self.world.world_size)
        missing = [str(rank) for rank in ranks if rank not in members]
        silent = [
            f"{r} ({_who(members[r])})"
            for r in ranks
            if r and r in members and not self._has_answered(name, r)
        ]
        word = "rank" if len(missing or silent) == 1 else "ranks"
        told = (
            f"{word} {', '.join(missing)} did not come"
            if missing
            else f"{word} {', '.join(silent)} do not answer"
        )
        here = "; ".join(f"rank {r} is {_who(h)}" for r, h in sorted(members.items())[:8])
        return f"{self.missing}: {told}; {here}"

    def _refuse(self, problem: str, hellos: int) -> None:
        self.store.set("verdict", json.dumps({"problem": problem, "hellos": hellos}))
        time.sleep(GRACE_S / 2)  # the store may end with us, and the others are to read it
        raise ConfigError(problem)

    def _get(self, key: str) -> Any:
        return json.loads(self.store.get(key)) if self.store.check([key]) else None


def _who(hello: Mapping[str, Any]) -> str:
    return f"process {hello['pid']} on {hello['host']}"
