"""Stop requests: the signal handler only sets a flag; the ranks agree on it at a step boundary."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from trainer.distributed.launchers import find_launcher
from trainer.errors import RunError

GRACE_S = 1.0  # torchrun sends Ctrl-C a second time at once; a person's second comes later
START_S = 3.0  # a rank asked to stop still waits this long for the others, which may be coming
# submitit has SLURM send SIGUSR2 before the time limit.
_BY_SUBMITIT = [signal.SIGUSR2] * ("SUBMITIT_EXECUTOR" in os.environ)
# A terminal that goes away; nohup has it ignored.
_BY_TERMINAL = [signal.SIGHUP] * (signal.getsignal(signal.SIGHUP) != signal.SIG_IGN)
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *_BY_SUBMITIT, *_BY_TERMINAL]
PARENT = os.getppid()  # read as early as possible, so that a launcher that dies later is noticed
REQUEUE = ("SIGUSR1", "SIGUSR2")


class StopRequest:
    """A request to stop: `name` of the signal, or None."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._since = 0.0

    def __bool__(self) -> bool:
        return self.name is not None

    @property
    def seconds(self) -> float:
        """Time since the request."""
        return time.monotonic() - self._since

    def receive(self, number: int, frame: object) -> None:
        if self.name is None:
            self.name = signal.Signals(number).name
            self._since = time.monotonic()
        elif self.seconds > GRACE_S:
            os._exit(1)  # the second request ends the process at once; what is published is valid


def leave_pid_1() -> None:
    """Continue in a child where this process is a container's first.

    The kernel lets no process of the container kill the first one, so a watcher could not end it.
    The first process passes signals on and ends as its child does.
    """
    if os.getpid() != 1 or (child := os.fork()) == 0:
        return
    for number in (*SIGNALS, signal.SIGUSR2):
        signal.signal(number, lambda number, frame: os.kill(child, number))
    pid = 0
    while pid != child:
        pid, status = os.wait()  # orphans come to the first process too
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


_early: list[StopRequest] = []


def catch_early() -> None:
    """Catch signals from here to the end of the process.

    A request during start-up stops the run at its first step; Ctrl-C, which a person sends, ends
    it there and then.
    """
    _early[:] = [StopRequest()]
    signal.signal(signal.SIGINT, _interrupt)
    for number in SIGNALS[1:]:
        signal.signal(number, _early[0].receive)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # launch=spawn holds them back until here


def _interrupt(number: int, frame: object) -> None:
    """End the process: KeyboardInterrupt in an import may be lost, or leave half a module."""
    if find_launcher().variables.get("RANK", "0") == "0":
        with suppress(OSError):
            os.write(2, b"interrupted; nothing was saved\n")
    os._exit(1)


def check_start(patience_s: float = START_S) -> None:
    """Raises RunError where a rank waits for the others in vain: no launcher, or asked to stop."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != PARENT:
        raise RunError("the launcher has ended before the ranks had met; nothing was begun")
    if _early and _early[0] and _early[0].seconds > patience_s:
        name = _early[0].name
        raise RunError(f"asked to stop ({name}) before the ranks had met; nothing was begun")


def let_go() -> bool:
    """Let SIGTERM end this process again: nothing is to be saved. True if it was asked to end."""
    if _early:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return bool(_early and _early[0])


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Catch SIGINT, SIGTERM and SIGUSR1 while the block runs, in the main thread only."""
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
