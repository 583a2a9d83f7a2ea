"""Watchers of a node's ranks, which detect hangs, and the flight recorder that they ask.

A thread of the rank answers the watcher: the main thread of a rank that waits is in a C call, where
Python runs no signal handler. The thread sleeps in a read of a pipe, and needs the GIL only to
answer. A rank that is stopped, or whose main thread keeps the GIL, does not answer.
"""

from __future__ import annotations

import faulthandler
import json
import math
import mmap
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.base.errors import ConfigError
from trainer.base.folders import PACKAGE
from trainer.core.distributed.group import Group
from trainer.core.distributed.signals import PARENT
from trainer.core.distributed.watch import watcher
from trainer.core.distributed.watch.heartbeat import Heartbeat
from trainer.core.distributed.watch.phases import (
    ANSWER_PATIENCE_S,
    ASK_BYTE,
    CollectiveCall,
    Mailbox,
    Phase,
)
from trainer.core.distributed.world import World

END_BYTE = b"."
MOST_COLLECTIVES = 1000  # of each recorder
_C10D: Any = getattr(torch._C, "_distributed_c10d", None)
# torch records by default. NCCL has a recorder of its own.
_RECORDERS: list[Callable[[], bytes]] = [
    getattr(_C10D, name)
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    if hasattr(_C10D, name)
]
_NAMES_OF_DTYPES = {
    **{"Float": "float32", "Double": "float64", "Half": "float16", "Byte": "uint8"},
    **{"Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64"},
}


@contextmanager
def answering(mailbox: Mailbox) -> Iterator[int | None]:
    """Answer the watcher during the block; yield the pipe that it writes to, None if there is none.

    The thread begins after the process group's, and ends with the block. A forked child inherits
    the pipe, but not the thread.
    """
    if not _RECORDERS or not dist.is_initialized() or dist.get_world_size() == 1:
        yield None
        return
    pipe, end = os.pipe()
    thread = threading.Thread(target=_answer, args=(pipe, mailbox), daemon=True)
    thread.start()
    try:
        yield pipe
    finally:
        os.write(end, END_BYTE)
        thread.join(ANSWER_PATIENCE_S)
        if not thread.is_alive():  # else torch waits for a device that hangs
            os.close(pipe)
            os.close(end)


def _answer(pipe: int, mailbox: Mailbox) -> None:
    """Answer until the end; with an empty text if this version of torch records something else."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread gets them
    while os.read(pipe, 1) == ASK_BYTE:
        text = ""
        with suppress(RuntimeError, ValueError, LookupError, TypeError, AttributeError):
            text = json.dumps(_read_recorders())
        mailbox.write(text)


def _read_recorders() -> dict[str, Any]:
    """Return the last collectives of each group."""
    groups: dict[tuple[str, str, str], dict[int, CollectiveCall]] = {}
    for read in _RECORDERS:
        for entry in json.loads(read()).get("entries", [])[-MOST_COLLECTIVES:]:
            backend, _, name = entry["profiling_name"].partition(":")
            is_done = entry["retired"] or entry["state"] == "completed"
            call = CollectiveCall(entry["collective_seq_id"], name, _shape(entry), is_done)
            if not entry["is_p2p"]:
                group, description = entry["process_group"]
                groups.setdefault((backend, group, description), {})[call.number] = call
    return {
        f"{backend}:{group}": _of_group(group, description, calls)
        for (backend, group, description), calls in groups.items()
    }


def _of_group(name: str, description: str, calls: dict[int, CollectiveCall]) -> list[Any]:
    """Return the arguments of collectives.History."""
    members: list[int] = []
    with suppress(RuntimeError, ValueError, LookupError):  # the group was destroyed
        members = dist.get_process_group_ranks(_C10D._resolve_process_group(name))
    return [members, description, [*calls.values()]]


def _shape(entry: dict[str, Any]) -> str:
    """Return the number and the dtype of the elements; "" if there are none."""
    kind = "input" if entry["input_dtypes"] else "output"
    element_count = sum(math.prod(sizes) for sizes in entry[f"{kind}_sizes"])
    dtypes = sorted(
        {_NAMES_OF_DTYPES.get(dtype, dtype.lower()) for dtype in entry[f"{kind}_dtypes"]}
    )
    return f"{element_count:,} {'/'.join(dtypes)}" if dtypes else ""


START = (
    "import sys; sys.path.append(sys.argv[1]);"
    "from trainer.core.distributed.watch.watcher import main; main()"
)


@contextmanager
def watched(timeout_s: float | None, group: Group) -> Iterator[Heartbeat]:
    """Detect hangs during the block: each node's first rank starts a watcher (Linux only)."""
    if timeout_s is None or not hasattr(os, "memfd_create"):
        yield Heartbeat(memoryview(bytearray(mmap.PAGESIZE)))
        return
    most, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if 0 <= most < watcher.MMAP_BYTES:  # it limits files in memory too
        raise ConfigError(f"""ulimit -f: a file may have at most {most:,} bytes,
            and a run needs {watcher.MMAP_BYTES:,} and room for its checkpoints; raise the limit""")
    memory = os.memfd_create("lockstep-heartbeat")
    os.ftruncate(memory, watcher.MMAP_BYTES)
    shared = memoryview(mmap.mmap(memory, watcher.MMAP_BYTES))
    heartbeat = Heartbeat(shared)
    heartbeat.enter(Phase.START)
    os.lseek(memory, watcher.MMAP_BYTES, os.SEEK_SET)
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
