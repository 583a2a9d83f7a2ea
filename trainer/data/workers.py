"""Data workers: what they need of the machine, how they are started, and how they end."""

from __future__ import annotations

import copy
import multiprocessing.util
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.multiprocessing

from trainer.distributed.watch.watcher import OF_A_JOB
from trainer.errors import ConfigError, RunError, one_line

FILES = 64  # open files of a rank beside those that it has at the start
FILES_OF_A_WORKER = 10  # its pipes, and the tensors of two batches on their way
ENOUGH_FILES = 65_536  # for a global batch of many micro-batches, each tensor a file
MOST_OF_A_TMPDIR = 107 - len("/pymp-12345678/listener-12345678")  # of a socket's path: unix(7)
SHARED = (
    "shared memory (/dev/shm), through which workers hand over batches, is full: make it larger"
    " (docker run --shm-size=8g), or give a smaller data.micro_batch or data.workers=0"
)


def check_limits(workers: int) -> None:
    """Raise the soft limit on open files.

    Raises ConfigError where the hard one is too low for `workers`, or TMPDIR too long for the
    sockets by which they hand over files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):  # macOS has a lower limit of its own
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        return
    need = FILES + FILES_OF_A_WORKER * workers
    with suppress(OSError):
        need += len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    if need > most:
        why = f"needs some {need:,} open files, and ulimit -Hn allows {hard:,}"
        raise ConfigError(f"data.workers={workers}: {why}; raise it, or give fewer workers")
    folder = tempfile.gettempdir()
    finds_another = hasattr(multiprocessing.util, "_get_base_temp_dir")  # newer Pythons
    if len(os.fsencode(folder)) > MOST_OF_A_TMPDIR and not finds_another:
        why = f"workers make sockets in TMPDIR={folder}, which has {len(folder)} characters"
        advice = f"{MOST_OF_A_TMPDIR} are allowed: set TMPDIR=/tmp"
        raise ConfigError(f"data.workers={workers}: {why}; {advice}")


@contextmanager
def workers_named(name: str = "a data worker", timeout_s: float = 0.0) -> Iterator[None]:
    """Raises RunError, one line, where torch reports a lost data worker.

    torch may report it at any statement: it raises in a signal handler.
    """
    try:
        yield
    except RuntimeError as error:
        said = one_line(error)
        is_lost = any(word in said for word in ("timed out", "exited unexpect", "is killed by"))
        if isinstance(error, RunError) or not ("DataLoader" in said and is_lost):
            raise
        why = said.split(". ")[0].rstrip(".")
        if "timed out" in said:
            why = f"data.timeout_s={timeout_s:g} is over"
        if "Bus error" in said:
            file = "a memory-mapped file was cut short"
            raise RunError(f"{name} has ended by a bus error: either {SHARED}; or {file}") from None
        raise no_answer(name, why) from None


def no_answer(name: str, why: str) -> RunError:
    return RunError(f"{name} does not answer: {why}; look at its dataset")


def prepare_worker(number: int) -> None:
    """Have a data worker end when its rank says so, and silently.

    torchrun, SLURM and systemd send signals to all processes of a job; a worker ignores them.
    A lost connection means that the rank or another worker has died, which the rank reports.
    """
    sys.excepthook = lambda kind, *rest: (
        None if issubclass(kind, ConnectionError) else sys.__excepthook__(kind, *rest)
    )
    for each in OF_A_JOB:
        signal.signal(each, signal.SIG_IGN)


def context_that_kills() -> Any:
    """Start processes that `terminate` kills: torch's last resort for a worker that hangs."""
    context: Any = copy.copy(multiprocessing.get_context())
    make = context.Process

    def process(*args: Any, **kwargs: Any) -> Any:
        worker = make(*args, **kwargs)
        worker.terminate = worker.kill
        return worker

    context.Process = process
    return context
