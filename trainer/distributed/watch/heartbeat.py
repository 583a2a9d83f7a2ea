"""A rank's heartbeat: its step, its phase and since when, in shared memory. Imports no torch.

The watcher (watcher.py) that reads it is a process and not a thread: a thread is stopped together
with its process, and waits for a GIL that a hung C call never releases.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from trainer.distributed.signals import PARENT
from trainer.distributed.watch import watcher
from trainer.distributed.watch.watcher import Phase

# The signal for a stack: SIGUSR1 asks to stop, and SIGUSR2 is the task's.
DUMP = signal.SIGRTMIN + 7 if hasattr(signal, "SIGRTMIN") else None


class Heartbeat:
    """Written by the rank, in some 0.2 us a call; without a watcher nobody reads it."""

    def __init__(self, page: Any, path: Any = None):
        self._page = page
        self._path = path
        self._began = 0.0

    def enter(self, phase: Phase) -> None:
        """Note that a phase begins."""
        page = self._page
        page[watcher.PHASE] = phase
        page[watcher.SINCE] = time.monotonic()

    def begin_step(self, step: int) -> None:
        """Note that a step begins, with its data."""
        self._began = time.monotonic()
        page = self._page
        page[watcher.STEP] = step
        page[watcher.PHASE] = Phase.DATA
        page[watcher.SINCE] = self._began

    def reduce_begun(self, *_: Any) -> None:
        """Note that this rank's gradients are there, and that it waits for the other ranks'."""
        now = time.monotonic()
        page = self._page
        page[watcher.PHASE] = Phase.REDUCE
        page[watcher.SINCE] = now
        page[watcher.BUSY] = now - self._began

    def end_step(self) -> None:
        """Note that the step is done."""
        page = self._page
        page[watcher.TOTAL] += page[watcher.BUSY]
        page[watcher.STEPS] += 1
        page[watcher.STEP] += 1

    def set_directory(self, directory: str) -> None:
        """Note where the watcher writes exit.json."""
        if self._path is not None:
            data = directory.encode()[: watcher.MAX_PATH - 1] + b"\0"
            self._path[: len(data)] = data


class Gathering(Protocol):
    world: Any

    def gather_text(self, text: str) -> list[str]: ...


@contextmanager
def watched(timeout_s: float | None, group: Gathering) -> Iterator[Heartbeat]:
    """Watch the ranks while the block runs: each node's first rank starts a watcher (Linux only)."""
    if timeout_s is None or DUMP is None or not hasattr(os, "memfd_create"):
        yield Heartbeat([0.0] * watcher.FIELDS)
        return
    page = os.memfd_create("lockstep-heartbeat")
    stack = os.memfd_create("lockstep-stack")
    os.ftruncate(page, mmap.PAGESIZE)
    view = memoryview(mmap.mmap(page, mmap.PAGESIZE))
    heartbeat = Heartbeat(view[: watcher.FIELDS * 8].cast("d"), view[watcher.FIELDS * 8 :])
    heartbeat.enter(Phase.START)
    faulthandler.register(DUMP, file=stack)
    process: subprocess.Popen[bytes] | None = None
    try:
        ranks = _gather_ranks(group, page, stack)
        local = [facts for facts in ranks if facts["node"] == _node(group.world)]
        if local[0]["rank"] == group.world.rank:
            settings = {
                "ranks": local,
                "is_only_node": local == ranks,
                "host": group.world.host,
                "timeout_s": timeout_s,
                "dump": int(DUMP),
                "parent": os.getpid(),
            }
            process = _start(settings)
        yield heartbeat
    finally:
        if process is not None:
            with suppress(OSError):
                process.communicate(b"\n")
        faulthandler.unregister(DUMP)
        os.close(page)
        os.close(stack)


def _gather_ranks(group: Gathering, page: int, stack: int) -> list[dict[str, Any]]:
    """The facts that a watcher needs of each rank."""
    facts = {
        "rank": group.world.rank,
        "node": _node(group.world),
        "pid": os.getpid(),
        "page": page,
        "stack": stack,
        "launcher": PARENT if "TORCHELASTIC_RUN_ID" in os.environ else None,
    }
    return [json.loads(line) for line in group.gather_text(json.dumps(facts))]


def _node(world: Any) -> str:
    """Name the place where a process id has one meaning.

    node_rank alone is a guess when ranks are started by hand, and containers number their own
    processes.
    """
    parts = [str(world.node_rank), world.host]
    with suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts += [str(Path("/proc/self/ns", kind).readlink()) for kind in ("pid", "net")]
    return " ".join(parts)


def _start(settings: dict[str, Any]) -> subprocess.Popen[bytes]:
    """Start a watcher by its file (`-m` loads the package); -S -E make it 15 ms instead of 60."""
    words = [sys.executable, "-S", "-E", watcher.__file__]
    process = subprocess.Popen(words, stdin=subprocess.PIPE)  # noqa: S603
    assert process.stdin is not None
    process.stdin.write(json.dumps(settings).encode() + b"\n")
    process.stdin.flush()
    return process
