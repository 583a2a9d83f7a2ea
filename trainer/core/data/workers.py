"""Data workers: their limits on a machine, their start and their end."""

from __future__ import annotations

import copy
import multiprocessing.util
import os
import re
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess
from typing import Any

import torch.multiprocessing

from trainer.base.errors import ConfigError, RunError, one_line
from trainer.base.process.child import end_with_parent
from trainer.base.process.streams import outlive_terminal
from trainer.core.distributed.signals import signal_to_stop
from trainer.core.distributed.watch.watcher import OF_A_JOB

FILES_OF_A_RANK = 64  # files that a rank opens, besides those open at the start
FILES_OF_A_WORKER = 10  # its pipes, and the tensors of two batches in flight
ENOUGH_FILES = 65_536  # for a global batch of many micro-batches: each tensor is a file
# The path of a socket has at most 107 bytes: unix(7).
MOST_OF_A_TMPDIR = 107 - len("/pymp-12345678/listener-12345678")
BEGIN_S = 5.0  # a forked worker begins within milliseconds
FORK_TRIES = 3
WORKER_POLL_S = 0.5  # between two looks whether the workers are alive, while their batch is awaited
MOST_WAIT_S = 20.0  # for a batch, after a request to stop
SHARED_MEMORY_FULL = (
    "shared memory (/dev/shm), which workers use to send batches, is full: enlarge it"
    " (docker run --shm-size=8g), or set a smaller data.micro_batch or data.workers=0"
)


def check_limits(workers: int) -> None:
    """Raise the soft limit on open files, to at most 65,536.

    Raises ConfigError if the hard limit is too low for `workers`, or if TMPDIR is too long for the
    sockets over which they send files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = ENOUGH_FILES if hard == resource.RLIM_INFINITY else min(hard, ENOUGH_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(ValueError, OSError):  # macOS has its own, lower limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        return
    need = FILES_OF_A_RANK + FILES_OF_A_WORKER * workers
    with suppress(OSError):
        need += len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    if need > most:
        raise ConfigError(f"""data.workers={workers}: needs about {need:,} open files,
            and ulimit -Hn allows {hard:,}; raise it, or set fewer workers""")
    folder = tempfile.gettempdir()
    finds_another = hasattr(multiprocessing.util, "_get_base_temp_dir")  # newer Pythons
    if len(os.fsencode(folder)) > MOST_OF_A_TMPDIR and not finds_another:
        raise ConfigError(f"""data.workers={workers}:
            workers create sockets in TMPDIR={folder}, which has {len(folder)} characters;
            must be at most {MOST_OF_A_TMPDIR}; set TMPDIR=/tmp""")


def wait_for_workers(answers: Iterator[Any], timeout_s: float) -> Iterator[Any]:
    """Yield the answers of a DataLoader whose own timeout is WORKER_POLL_S.

    When it ends, torch checks that its workers are alive: one that has exited with code 0 sends no
    signal that torch heeds. Raises torch's RuntimeError once `timeout_s` is exceeded, unless it
    is 0, and RunError if no batch comes after a request to stop: torchrun kills after 30 s.
    """
    while True:
        begun = time.monotonic()
        while True:
            try:
                answer = next(answers)
                break
            except StopIteration:
                return
            except RuntimeError as error:
                has_time = not timeout_s or time.monotonic() - begun < timeout_s
                if name := signal_to_stop(MOST_WAIT_S):
                    raise RunError(f"asked to stop ({name}) while workers read a batch") from None
                if not ("timed out" in str(error) and has_time):
                    raise
        yield answer


@contextmanager
def workers_named(
    name: str = "a data worker",
    timeout_s: float = 0.0,
    task_of: Callable[[int], str] = lambda pid: "",
) -> Iterator[None]:
    """Raise RunError, one line, when torch reports a lost data worker.

    torch may report it at any statement, because it raises in a signal handler. `task_of` returns
    what the process was doing.
    """
    try:
        yield
    except RuntimeError as error:
        message = one_line(error)
        is_lost = any(word in message for word in ("timed out", "exited unexpect", "is killed by"))
        if isinstance(error, RunError) or not ("DataLoader" in message and is_lost):
            raise
        why = message.split(". ")[0].rstrip(".")
        if pids := re.findall(r"pid\S* (\d+)", why):
            why += task_of(int(pids[0]))
        if "timed out" in message:
            why = f"data.timeout_s={timeout_s:g} is exceeded"
        if "Bus error" in message:
            raise RunError(f"""{name} died of a bus error: either {SHARED_MEMORY_FULL};
                or a memory-mapped file was truncated""") from None
        raise no_answer(name, why) from None


def no_answer(name: str, why: str) -> RunError:
    return RunError(f"{name} does not respond: {why}; check its dataset")


def prepare_worker(worker: int) -> None:
    """Initialise a data worker: only its rank ends it, and it prints no lost connection.

    torchrun, SLURM and systemd send signals to all processes of a job; a worker ignores them.
    A lost connection means that the rank or another worker has died, which the rank reports.
    """
    sys.excepthook = lambda kind, *rest: (
        None if issubclass(kind, ConnectionError) else sys.__excepthook__(kind, *rest)
    )
    for each in OF_A_JOB:
        signal.signal(each, signal.SIG_IGN)
    outlive_terminal()
    end_with_parent()  # else one that hangs in its dataset holds the sockets and the output


def context_of_workers() -> Any:
    """Return a multiprocessing context whose processes begin, and are killed by `terminate`.

    `terminate` is torch's last resort for a worker that hangs.
    """
    context: Any = copy.copy(multiprocessing.get_context())
    make: Any = _ForkedWorker if context.get_start_method() == "fork" else context.Process

    def process(*args: Any, **kwargs: Any) -> Any:
        worker = make(*args, **kwargs)
        worker.terminate = worker.kill
        return worker

    context.Process = process
    return context


class _ForkedWorker(ForkProcess):
    """A worker that is forked again if it does not begin.

    Before Python 3.12 a child deadlocks in fork if a thread of the rank, such as one of gloo's,
    enters Python at that moment (python/cpython#112275): in 3 of 220 short runs of two ranks with
    two workers.
    """

    _writer: Connection

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        """Fork. Raises RunError if the child does not begin, three times."""
        for _ in range(FORK_TRIES):
            child = process_obj._fork()
            if child is not None:
                return child
        raise RunError(f"""no data worker began within {BEGIN_S:g} s, {FORK_TRIES} times;
            set data.workers=0""")

    def _fork(self) -> Any:
        reader, self._writer = multiprocessing.Pipe(duplex=False)
        child = ForkProcess._Popen(self)
        self._writer.close()
        with reader:
            if reader.poll(BEGIN_S):
                return child
        child.kill()
        child.wait()
        return None

    def run(self) -> None:
        """Tell the rank by closing the only other end of its pipe, and work."""
        self._writer.close()
        super().run()
