"""A rank's heartbeat: its step, its phase and the start of the phase, in shared memory.

The watcher (watcher.py) that reads it is a separate process. A thread would be stopped together
with its process, and would wait for the GIL, which a hung C call never releases.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer.config import PACKAGE
from trainer.distributed.group import Group
from trainer.distributed.signals import PARENT
from trainer.distributed.watch import watcher
from trainer.distributed.watch.collectives import Mailbox
from trainer.distributed.watch.flight_recorder import answering
from trainer.distributed.watch.phases import GROUPS, Phase
from trainer.distributed.world import World
from trainer.errors import ConfigError

START = (
    "import sys; sys.path.append(sys.argv[1]);"
    "from trainer.distributed.watch.watcher import main; main()"
)


class Heartbeat:
    """This rank's progress, written in about 0.2 us a call; without a watcher nothing reads it."""

    def __init__(self, memory: memoryview):
        self._page = memory[: watcher.FIELDS * 8].cast("d")
        self._path = memory[watcher.FIELDS * 8 :][: watcher.MAX_PATH]
        self._place = memory[watcher.FIELDS * 8 + watcher.MAX_PATH : mmap.PAGESIZE]
        self.directory = ""
        self._began = 0.0
        self._waited_s = 0.0

    def enter(self, phase: Phase) -> None:
        """Record the start of a phase."""
        page = self._page
        now = time.monotonic()
        if page[watcher.PHASE] == Phase.DATA:
            self._waited_s += now - page[watcher.SINCE]
        page[watcher.PHASE] = phase
        page[watcher.SINCE] = now

    def take_wait(self) -> float:
        """Return the seconds of waiting for data since the last call."""
        waited_s = self._waited_s
        self._waited_s = 0.0
        return waited_s

    def begin_step(self, step: int) -> None:
        """Record the start of a step; its first phase is loading the data."""
        self._began = time.monotonic()
        page = self._page
        page[watcher.PHASE] = Phase.DATA
        page[watcher.SINCE] = self._began
        page[watcher.STEP] = step

    def reduce_begun(self, *_: Any) -> None:
        """Record that this rank's gradients are ready and that it waits for the other ranks."""
        self.enter(Phase.REDUCE)
        page = self._page
        page[watcher.BUSY] = page[watcher.SINCE] - self._began

    def end_step(self) -> None:
        """Record the end of a step."""
        page = self._page
        page[watcher.TOTAL] += page[watcher.BUSY]
        page[watcher.STEPS] += 1
        page[watcher.STEP] += 1

    def wait_in(self, group: str) -> None:
        """Record that this rank waits for the others of a group of the mesh; "": no longer."""
        self._page[watcher.GROUP] = GROUPS.index(group)

    def set_place(self, place: str) -> None:
        """Record the coordinates of this rank in the mesh."""
        data = f"{place}; ".encode()[: len(self._place) - 1] + b"\0" if place else b"\0"
        self._place[: len(data)] = data

    def set_directory(self, directory: str) -> None:
        """Record the run directory, where the watcher writes exit.json."""
        self.directory = directory
        data = directory.encode()[: watcher.MAX_PATH - 1] + b"\0"
        self._path[: len(data)] = data


@contextmanager
def watched(timeout_s: float | None, group: Group) -> Iterator[Heartbeat]:
    """Detect hangs during the block: each node's first rank starts a watcher (Linux only)."""
    if timeout_s is None or not hasattr(os, "memfd_create"):
        yield Heartbeat(memoryview(bytearray(mmap.PAGESIZE)))
        return
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= most < watcher.SIZE:  # it limits files in memory too
        limited = f"a file may have at most {most:,} bytes, and a run needs {watcher.SIZE:,}"
        raise ConfigError(f"ulimit -f: {limited} and room for its checkpoints; raise the limit")
    memory = os.memfd_create("lockstep-heartbeat")
    os.ftruncate(memory, watcher.SIZE)
    shared = memoryview(mmap.mmap(memory, watcher.SIZE))
    heartbeat = Heartbeat(shared)
    heartbeat.enter(Phase.START)
    os.lseek(memory, watcher.SIZE, os.SEEK_SET)
    faulthandler.register(watcher.DUMP, file=memory, all_threads=False)  # others may be running
    process: subprocess.Popen[bytes] | None = None
    with answering(Mailbox(shared[mmap.PAGESIZE :])) as pipe:
        try:
            local = group.gather_of(_node(group.world), _facts(group.world.rank, memory, pipe))
            if local[0]["rank"] == group.world.rank:
                is_only_node = len(local) == group.world.world_size
                settings = {"ranks": local, "is_only_node": is_only_node, "timeout_s": timeout_s}
                process = _start_watcher(settings, memory)
            yield heartbeat
        finally:
            heartbeat.enter(Phase.LEFT)
            if process is not None:
                with suppress(OSError):
                    process.communicate(b"\n")
            faulthandler.unregister(watcher.DUMP)
            os.close(memory)


def _facts(rank: int, memory: int, pipe: int | None) -> dict[str, Any]:
    """Return what the watcher needs of this rank; `memory` and `pipe` are descriptors."""
    return {
        "rank": rank,
        "pid": os.getpid(),
        "memory": memory,
        "pipe": pipe,
        "launcher": PARENT if "TORCHELASTIC_RUN_ID" in os.environ else None,
    }


def _node(world: World) -> str:
    """Name the host and namespaces in which a process id is unique.

    node_rank alone is a guess if the ranks were started by hand (environment variables), and
    containers number their own processes.
    """
    parts = [str(world.node_rank), world.host]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts += [str(Path("/proc/self/ns", kind).readlink()) for kind in ("pid", "net")]
    return " ".join(parts)


def _start_watcher(settings: dict[str, Any], memory: int) -> subprocess.Popen[bytes]:
    """Run the watcher without site-packages: -S saves 40 ms, and -I keeps the task's folder out."""
    words = [sys.executable, "-S", "-I", "-c", START, str(PACKAGE.parent)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, pass_fds=[memory])  # noqa: S603
    assert process.stdin is not None
    process.stdin.write(json.dumps(settings).encode() + b"\n")
    process.stdin.flush()
    return process
