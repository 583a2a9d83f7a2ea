"""Stop requests: the signal handler only sets a flag; the ranks agree on it at a step boundary."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from trainer.base.errors import ConfigError, RunError
from trainer.core.distributed.launchers import find_launcher

REPEAT_GRACE_S = 1.0  # a person's second Ctrl-C comes later
START_S = 3.0  # how long a rank that was asked to stop still waits for the others
# submitit has SLURM send SIGUSR2 before the time limit.
_BY_SUBMITIT = [signal.SIGUSR2] if "SUBMITIT_EXECUTOR" in os.environ else []
# Sent when the terminal is closed; nohup ignores it.
_BY_TERMINAL = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN else []
SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, *_BY_SUBMITIT, *_BY_TERMINAL]
PARENT = os.getppid()  # read as early as possible, so that a launcher that dies later is noticed
INTERRUPTED = "interrupted; nothing was saved"
CODE_OF_INTERRUPT = 128 + signal.SIGINT  # as a shell shows it
REQUEUE = ("SIGUSR1", "SIGUSR2")


class StopRequest:
    """A request to stop; `name` is the signal's name, None before a request."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._since = 0.0
        # torchrun repeats a Ctrl-C of the terminal; on a busy machine over a second later.
        self._expected = "TORCHELASTIC_RUN_ID" in os.environ

    def __bool__(self) -> bool:
        return self.name is not None

    @property
    def seconds(self) -> float:
        """Seconds since the request."""
        return time.monotonic() - self._since

    def receive(self, signal_number: int, frame: object) -> None:
        if self.name is None:
            self.name = signal.Signals(signal_number).name
            self._since = time.monotonic()
        elif self.seconds > REPEAT_GRACE_S and not self._expected:
            os._exit(1)  # a second request exits at once; published checkpoints stay valid
        else:
            self._expected = False


def leave_pid_1() -> None:
    """Continue in a child process if this process is PID 1, the first one of a container.

    The kernel does not let the container's processes kill PID 1, so a watcher could not end it.
    PID 1 passes signals on to the child and exits as the child does.
    """
    if os.getpid() != 1 or (child := os.fork()) == 0:
        return
    for signal_number in (*SIGNALS, signal.SIGUSR2):
        signal.signal(signal_number, lambda signal_number, frame: os.kill(child, signal_number))
    pid = 0
    while pid != child:
        pid, status = os.wait()  # orphans become children of PID 1 too
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


_early: list[StopRequest] = []
_caught: list[StopRequest] = []  # by `stop_requests`, the innermost last


def catch_early() -> None:
    """Catch signals from here to the end of the process.

    A request during startup stops the run at its first step. Ctrl-C, which a person sends, ends
    the process at once.
    """
    _early[:] = [StopRequest()]
    signal.signal(signal.SIGINT, interrupt)
    for signal_number in SIGNALS[1:]:
        signal.signal(signal_number, _early[0].receive)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # launch=spawn blocks them until here


def interrupt(signal_number: int, frame: object) -> None:
    """Exit at once: KeyboardInterrupt in an import may be lost, or leave half a module."""
    with suppress(OSError, ConfigError):
        if find_launcher().variables.get("RANK", "0") == "0":
            os.write(2, f"{INTERRUPTED}\n".encode())
    os._exit(CODE_OF_INTERRUPT)


def check_start(patience_s: float = START_S) -> None:
    """Raise RunError if waiting for the others is useless: launcher lost, or asked to stop."""
    if "TORCHELASTIC_RUN_ID" in os.environ and os.getppid() != PARENT:
        raise RunError("the launcher exited before all ranks connected; nothing was started")
    if _early and _early[0] and _early[0].seconds > patience_s:
        raise RunError(f"""asked to stop ({_early[0].name}) before all ranks connected;
            nothing was started""")


def signal_to_stop(patience_s: float) -> str:
    """Return the signal that asked this process to stop `patience_s` ago or earlier, else "".

    One that announces the end of a job's time is left to the next step boundary.
    """
    for request in (*_early, *_caught):
        if request and request.name not in REQUEUE and request.seconds > patience_s:
            return request.name or ""
    return ""


def let_go(is_failure: bool = True) -> bool:
    """Let SIGTERM end the process, as nothing is left to save. Return True if asked to stop.

    Without `is_failure` the exit code is then 0.
    """
    if _early:
        end = signal.SIG_DFL if is_failure else (lambda signal_number, frame: os._exit(0))
        signal.signal(signal.SIGTERM, end)
    return bool(_early and _early[0])


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Catch the stop signals (SIGNALS) for the duration of the block, in the main thread only."""
    request = _early[0] if _early else StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {
        signal_number: signal.signal(signal_number, request.receive) for signal_number in SIGNALS
    }
    _caught.append(request)
    try:
        yield request
    finally:
        _caught.remove(request)
        for signal_number, handler in before.items() if not _early else ():
            signal.signal(signal_number, handler)
