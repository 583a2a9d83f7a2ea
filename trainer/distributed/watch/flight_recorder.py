"""This rank's last collectives, from torch's flight recorder, whenever the watcher asks for them.

A thread answers: the main thread of a rank that waits is in a C call, where Python runs no signal
handler. The thread sleeps in a read of a pipe, and needs the GIL only to answer. A rank that is
stopped, or whose main thread keeps the GIL, does not answer.
"""

from __future__ import annotations

import json
import math
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist

from trainer.distributed.watch.collectives import ASK, PATIENCE_S, CollectiveCall, Mailbox

END = b"."
MOST = 1000  # collectives of each recorder
_C10D: Any = getattr(torch._C, "_distributed_c10d", None)
# torch records by default. NCCL has a recorder of its own.
_RECORDERS: list[Callable[[], bytes]] = [
    getattr(_C10D, name)
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json")
    if hasattr(_C10D, name)
]
_DTYPES = {
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
        os.write(end, END)
        thread.join(PATIENCE_S)
        if not thread.is_alive():  # else torch waits for a device that hangs
            os.close(pipe)
            os.close(end)


def _answer(pipe: int, mailbox: Mailbox) -> None:
    """Answer until the end; with an empty text if this version of torch records something else."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the main thread gets them
    while os.read(pipe, 1) == ASK:
        text = ""
        with suppress(RuntimeError, ValueError, LookupError, TypeError, AttributeError):
            text = json.dumps(_read_recorders())
        mailbox.write(text)


def _read_recorders() -> dict[str, Any]:
    """Return the last collectives of each group."""
    groups: dict[tuple[str, str, str], dict[int, CollectiveCall]] = {}
    for read in _RECORDERS:
        for entry in json.loads(read()).get("entries", [])[-MOST:]:
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
    number = sum(math.prod(sizes) for sizes in entry[f"{kind}_sizes"])
    dtypes = sorted({_DTYPES.get(dtype, dtype.lower()) for dtype in entry[f"{kind}_dtypes"]})
    return f"{number:,} {'/'.join(dtypes)}" if dtypes else ""
