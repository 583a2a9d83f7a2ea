"""Waiting for servers and for other processes: it has an end, is announced, and can be stopped."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path

from trainer.data.shards.errors import ServerError
from trainer.distributed.signals import signal_to_stop

PATIENCE_S = 3.0  # after a request to stop: what takes less time ends in order
ANNOUNCE_S = 3.0  # a wait that takes longer is announced
POLL_S = 0.5
MOST_POLL_S = 0.1  # between two tries to lock a file
STUCK_S = 600.0  # without progress: a download's eight tries take less
STUCK_IF_STOPPED_S = 60.0
_announced: set[str] = set()
_open_wait: ContextVar[Wait | None] = ContextVar("open_wait", default=None)  # of a thread


class Wait:
    """A wait, open in its thread for the duration of a block.

    `what` says what is waited for, such as "downloading a from b".
    """

    def __init__(self, what: str):
        self.what = what
        self._begun = time.monotonic()

    def __enter__(self) -> Wait:
        _open_wait.set(self)
        return self

    def __exit__(self, *error: object) -> None:
        _open_wait.set(None)

    def check(self) -> None:
        """Announce a long wait, the first of its kind. Raises ServerError if asked to stop."""
        if name := signal_to_stop(PATIENCE_S):
            raise ServerError(f"asked to stop ({name}) while {self.what}")
        is_worker = multiprocessing.current_process().daemon  # of data: its rank announces
        if not is_worker and time.monotonic() - self._begun > ANNOUNCE_S:
            announce(self.what.partition(" ")[0], f"{self.what} ...")

    def pause(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while (rest := end - time.monotonic()) > 0:
            self.check()
            time.sleep(min(rest, POLL_S))
        self.check()


def check_wait(what: str) -> None:
    """Check the open wait of this thread, or a new one. Raises ServerError if asked to stop."""
    (_open_wait.get() or Wait(what)).check()


def announce(kind: str, line: str) -> None:
    """Print a line once in this process, on the first rank of a node."""
    if kind not in _announced and os.environ.get("LOCAL_RANK", "0") == "0":
        print(line, file=sys.stderr, flush=True)
    _announced.add(kind)


def lock(file: int, place: str, progress: Callable[[], int] = lambda: 0) -> None:
    """Lock a file. Raises ServerError if its holder is stuck: `progress()` does not change."""
    delay = 0.001
    seen = -1
    since = time.monotonic()
    while True:
        with suppress(BlockingIOError):
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        check_wait(f"waiting for the lock of {place}")
        if (now := progress()) != seen:
            seen = now
            since = time.monotonic()
        seconds = time.monotonic() - since
        if seconds > ANNOUNCE_S:
            name, is_stopped = _holder(file)
            announce(place, f"waiting for {name}, which has locked {place} ...")
            if seconds > (STUCK_IF_STOPPED_S if is_stopped else STUCK_S):
                why = f"{name} has locked it for {seconds:.0f} s without progress"
                raise ServerError(f"{place}: {why}; end it, or give another cache= folder")
        time.sleep(delay)
        delay = min(2 * delay, MOST_POLL_S)


def _holder(file: int) -> tuple[str, bool]:
    """Return who has locked a file, as far as it is known, and whether it is stopped."""
    status = os.fstat(file)
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    with suppress(OSError, ValueError, IndexError):  # only Linux has it
        for line in Path("/proc/locks").read_text().splitlines():
            _, kind, _, _, pid, place, *_ = line.split()
            if (kind, place) == ("FLOCK", f"{device}:{status.st_ino}") and int(pid) > 0:
                state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
                is_stopped = state in "Tt"
                return f"process {pid}{' (stopped)' * is_stopped}", is_stopped
    return "another process", False
