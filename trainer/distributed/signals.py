"""A request to stop: the handler sets a flag and does nothing else; the ranks agree on it at a step boundary."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from trainer.distributed.launchers import find_launcher
from trainer.errors import RunError

# torchrun passes Ctrl-C on as a second signal at once; only a later one is a person's second.
GRACE_S = 1.0
START_S = 3.0  # so long a rank that was asked to stop waits for the others still: they may be about to come
# SIGUSR2 is what submitit has SLURM send before the time limit.
SIGNALS = [
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGUSR1,
    *[signal.SIGUSR2] * ("SUBMITIT_EXECUTOR" in os.environ),
]
PARENT = os.getppid()  # as early as can be: a launcher that dies later is missed
REQUEUE = ("SIGUSR1", "SIGUSR2")


class StopRequest:
    """What this rank was asked: `name` of the signal, or None."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._since = 0.0

    def __bool__(self) -> bool:
        return self.name is not None

    @property
    def seconds(self) -> float:
        """Since it was asked."""
        return time.monotonic() - self._since

    def receive(self, number: int, frame: object) -> None:
        if self.name is None:
            self.name, self._since = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._since > GRACE_S:
            os._exit(1)  # asked twice: at once. What is published stays valid


def leave_pid_1() -> None:
    """Go on in a child where this process is a container's first: the kernel kills no such process from within, so a
    watcher could not end it. The first one passes signals on and ends as its child does."""
    if os.getpid() != 1 or (child := os.fork()) == 0:
        return
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: os.kill(child, number))
    status: int | None = None
    while status is None:
        found, ended = os.wait()  # orphans come to the first process too
        status = ended if found == child else None
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


_early: list[StopRequest] = []


def catch_early() -> None:
    """Catch signals from here to the end of the process: what asks during start-up stops the first step; Ctrl-C, by
    somebody who watches, ends it there and then."""
    _early[:] = [StopRequest()]
    signal.signal(signal.SIGINT, _interrupt)
    for number in SIGNALS[1:]:
        signal.signal(number, _early[0].receive)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # launch=spawn holds them back until here


def _interrupt(number: int, frame: object) -> None:
    """KeyboardInterrupt would be lost in an import, or leave half a module behind for a later error to be about."""
    if find_launcher().variables.get("RANK", "0") == "0":
        os.write(2, b"interrupted; nothing was saved\n")
    os._exit(1)


def check_start(patience_s: float = START_S) -> None:
    """For a rank that waits for the others to come: raises RunError where that has no point any more."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != PARENT:
        raise RunError("the launcher has ended before the ranks had met; nothing was begun")
    if _early and _early[0] and _early[0].seconds > patience_s:
        raise RunError(
            f"asked to stop ({_early[0].name}) before the ranks had met; nothing was begun"
        )


def let_go() -> bool:
    """Let SIGTERM end this process again: there is nothing to save. True where it was asked to end already."""
    if _early:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return bool(_early and _early[0])


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Catch SIGINT, SIGTERM and SIGUSR1 while the block runs (in the main thread; elsewhere Python cannot)."""
    request = _early[0] if _early else StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.receive) for number in SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items() if not _early else ():
            signal.signal(number, handler)
