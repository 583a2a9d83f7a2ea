"""A child process that does the work in a session of its own, all of which ends with it."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Collection, Sequence
from contextlib import suppress
from multiprocessing import resource_tracker, util
from pathlib import Path

from trainer.base.errors import RunError
from trainer.base.process.child import end_with_parent
from trainer.prove.end_view import kill_all, kill_left

FOLDER = "LOCKSTEP_FOLDER"  # set for the processes of a session, which end with it
PR_SET_CHILD_SUBREAPER = 36  # prctl(2)


def end_as_by_interrupt() -> None:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, so that the processes started here end."""
    for signal_number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signal_number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(signal_number, signal.default_int_handler)


def continue_in_session(prefix: str) -> Path:
    """Continue in a child process that leads a session; return a temporary folder, there only.

    This process waits for the child and exits as it does. At Ctrl-C, SIGTERM or SIGHUP it raises
    KeyboardInterrupt. In any case it first kills what is left of the session, and what came from
    it, and removes the folder. It must be the only thread.

    An exception that a handler raises in the process that does the work is not enough: Python drops
    it in a weakref callback or `__del__`, and it may come between the start of a process and the
    line that notes it. Here the signals are blocked, so none is lost and none interrupts.
    """
    resource_tracker.ensure_running()  # outside of the session: it removes what killed ones leave
    candidates = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)
    signal_numbers = [each for each in candidates if signal.getsignal(each) != signal.SIG_IGN]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [*signal_numbers, signal.SIGCHLD])
    # macOS drops it without a handler
    signal.signal(signal.SIGCHLD, lambda signal_number, frame: None)
    util.get_temp_dir()  # of multiprocessing's sockets, in both processes
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    others = _list_children()
    _adopt_orphans()
    child = os.fork()
    if child == 0:
        os.setsid()
        end_with_parent(parent)
        for signal_number in (*signal_numbers, signal.SIGCHLD):
            signal.signal(signal_number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.environ[FOLDER] = str(folder)
        return folder
    code = _wait_for_end(child, signal_numbers)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child, signal.SIGKILL)
    kill_left((), [f"{FOLDER}={folder}\0".encode()])
    kill_all(lambda: _reap_and_list(others))
    util._run_finalizers()  # type: ignore[attr-defined]  # removes the folder of the sockets
    shutil.rmtree(folder, ignore_errors=True)
    if code is None or -code in signal_numbers:
        raise KeyboardInterrupt
    if code < 0:
        raise RunError(f"""{signal.Signals(-code).name} ended the process that does the work;
            see the kernel's log: SIGKILL often means that memory was full""")
    os._exit(code)


def _wait_for_end(child: int, signal_numbers: Sequence[int]) -> int | None:
    """Return the exit code of a child; None after one of `signal_numbers`: it is then killed."""
    while True:
        signal_number = signal.sigwait([*signal_numbers, signal.SIGCHLD])
        if signal_number == signal.SIGTSTP:  # Ctrl-Z
            for each in (signal.SIGSTOP, signal.SIGCONT):
                with suppress(ProcessLookupError, PermissionError):  # it has ended
                    os.killpg(child, each)
                if each == signal.SIGSTOP:
                    os.kill(os.getpid(), each)  # until the shell sends SIGCONT
        elif signal_number != signal.SIGCHLD:
            os.kill(child, signal.SIGKILL)  # also before it has its session
            os.waitpid(child, 0)
            return None
        elif (ended := os.waitpid(child, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(ended[1])


def _adopt_orphans() -> None:
    """Have the kernel make this process the parent of descendants whose own parent dies."""
    with suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _list_children() -> list[int]:
    with suppress(OSError):
        return [*map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())]
    return []


def _reap_and_list(others: Collection[int]) -> list[int]:
    """Reap the children that have ended; return those that live, but `others`.

    Orphans become children one after another. A search by environment alone misses a process
    between its fork and its exec.
    """
    living = []
    for each in {*_list_children()} - {*others}:
        with suppress(ChildProcessError):
            if os.waitpid(each, os.WNOHANG) == (0, 0):
                living.append(each)
    return living
