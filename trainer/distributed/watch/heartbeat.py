"""What a rank tells its watcher: a page of shared memory with the step, the phase and since when. Without torch.

The watcher (watcher.py) is a process and not a thread: a thread stands still with its process, and waits for a GIL
that is never given back.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import mmap
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any, Protocol

from trainer.distributed.signals import PARENT
from trainer.distributed.watch import watcher

DUMP = (
    signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None
)  # SIGUSR1 asks to stop, SIGUSR2 is the task's


class Phase(IntEnum):
    """What a rank is at; the names are in watcher.PHASES."""

    START, BUILD, DATA, COMPUTE, REDUCE, UPDATE, LOG, EVALUATE, SAVE, END = range(10)


class Pulse:
    """Written by the rank, at some 0.2 us a call; read by nobody where there is no watcher."""

    def __init__(self, page: Any, text: Any = None):
        self._page, self._text, self._began = page, text, 0.0

    def at(self, phase: Phase) -> None:
        page = self._page
        page[watcher.PHASE] = phase
        page[watcher.SINCE] = time.monotonic()

    def begin(self, step: int) -> None:
        """A step begins: its first phase is the data."""
        self._began = now = time.monotonic()
        page = self._page
        page[watcher.STEP] = step
        page[watcher.PHASE] = Phase.DATA
        page[watcher.SINCE] = now

    def reduce(self, *_: Any) -> None:
        """This rank's gradients are there: what follows is waiting for the others'."""
        now = time.monotonic()
        page = self._page
        page[watcher.PHASE] = Phase.REDUCE
        page[watcher.SINCE] = now
        page[watcher.BUSY] = now - self._began

    def end(self) -> None:
        """The step is done."""
        page = self._page
        page[watcher.TOTAL] += page[watcher.BUSY]
        page[watcher.STEPS] += 1
        page[watcher.STEP] += 1

    def tell(self, directory: str) -> None:
        """Where exit.json lies, for a watcher that has to write it."""
        if self._text is not None:
            data = directory.encode()[: watcher.TEXT - 1] + b"\0"
            self._text[: len(data)] = data


class Gathering(Protocol):
    world: Any

    def gather_text(self, text: str) -> list[str]: ...


@contextmanager
def watched(timeout_s: float | None, group: Gathering) -> Iterator[Pulse]:
    """A watcher per node while the block runs, started by its first rank. Linux only; elsewhere nobody watches."""
    if timeout_s is None or DUMP is None or not hasattr(os, "memfd_create"):
        yield Pulse([0.0] * watcher.FIELDS)
        return
    page, stack = os.memfd_create("lockstep-pulse"), os.memfd_create("lockstep-stack")
    os.ftruncate(page, mmap.PAGESIZE)
    memory = mmap.mmap(page, mmap.PAGESIZE)
    view = memoryview(memory)
    pulse = Pulse(view[: watcher.FIELDS * 8].cast("d"), view[watcher.FIELDS * 8 :])
    pulse.at(Phase.START)
    faulthandler.register(DUMP, file=stack)
    world = group.world
    facts = {
        "rank": world.rank,
        "place": _place(world),
        "pid": os.getpid(),
        "page": page,
        "stack": stack,
    }
    facts["launcher"] = PARENT if "TORCHELASTIC_RUN_ID" in os.environ else None
    server = _server() if world.rank == 0 and world.world_size > 1 else None
    if server is not None:
        facts |= {
            "address": (_own_address(world), server.getsockname()[1]),
            "token": secrets.token_hex(16),
        }
    process: subprocess.Popen[bytes] | None = None
    try:
        found = [json.loads(line) for line in group.gather_text(json.dumps(facts))]
        local = [other for other in found if other["place"] == facts["place"]]
        if local[0]["rank"] == world.rank:
            is_one = len(local) == len(found)
            server = None if is_one else server
            hub = {
                "address": None if is_one else found[0]["address"],
                "token": found[0].get("token", ""),
            }
            process = _start(
                {**hub, "ranks": local, "timeout_s": timeout_s, "host": world.host}, server
            )
        yield pulse
    finally:
        if process is not None:
            with contextlib.suppress(OSError):
                process.communicate(b"\n")
        with contextlib.suppress(ValueError, BufferError):
            faulthandler.unregister(DUMP)
        os.close(page)
        os.close(stack)


def _start(settings: dict[str, Any], server: socket.socket | None) -> subprocess.Popen[bytes]:
    more = {
        "dump": int(DUMP or 0),
        "parent": os.getpid(),
        "server": server.fileno() if server else None,
    }
    # By its file: `-m` would load what the package loads. -S -E: no site-packages, 15 ms instead of 60.
    words = [sys.executable, "-S", "-E", watcher.__file__]
    pass_fds = [server.fileno()] if server else []
    process = subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=pass_fds)  # noqa: S603
    assert process.stdin is not None
    process.stdin.write(
        json.dumps({**settings, **more}).encode() + b"\n"
    )  # an argument everyone may read
    process.stdin.flush()
    if server is not None:
        server.close()
    return process


def _place(world: Any) -> str:
    """Where a process id means the same: node_rank is a guess by hand, and a container has ids of its own."""
    found = [str(world.node_rank), world.host]
    with contextlib.suppress(OSError):
        found += [Path("/proc/sys/kernel/random/boot_id").read_text().strip()]
        found += [str(Path("/proc/self/ns", kind).readlink()) for kind in ("pid", "net")]
    return " ".join(found)


def _server() -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _own_address(world: Any) -> str:
    """Where the other nodes reach this one: the address on the way to the master, or the master's if that is here."""
    master = world.launcher.variables.get("MASTER_ADDR") or world.host
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((master, 9))
        if not (own := probe.getsockname()[0]).startswith("127."):
            return own
    return master
