"""A child process: its session, forwarded signals, log, last error line and end, also with us."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import Any

from trainer.core.errors import RunError

MOST_BYTES = 1 << 18  # of a log that are read from its end
FOLDER = "LOCKSTEP_FOLDER"  # set for the processes of a session, which end with it
GRACE_S = 5.0  # for its killed processes to be gone
_PACKAGE = str(Path(__file__).parents[2])
_FRAME = re.compile(r'  File "([^"]+)", line (\d+), in (.+)')


def start(words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a command in a session of its own: what a terminal sends reaches its parent only."""
    return subprocess.Popen(words, start_new_session=True, **options)  # noqa: S603  # no shell


def continue_in_session(prefix: str) -> Path:
    """Continue in a child process that leads a session; return a temporary folder, there only.

    This process waits for the child and exits as it does. At Ctrl-C, SIGTERM or SIGHUP it raises
    KeyboardInterrupt. In any case it first kills what is left of the session and removes the
    folder. It must be the only thread.

    An exception that a handler raises in the process that does the work is not enough: Python drops
    it in a weakref callback or `__del__`, and it may come between the start of a process and the
    line that notes it. Here the signals are blocked, so none is lost and none interrupts.
    """
    resource_tracker.ensure_running()  # outside of the session: it removes what killed ones leave
    candidates = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGTSTP)
    numbers = [each for each in candidates if signal.getsignal(each) != signal.SIG_IGN]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [*numbers, signal.SIGCHLD])
    signal.signal(signal.SIGCHLD, lambda number, frame: None)  # macOS drops it without a handler
    util.get_temp_dir()  # of multiprocessing's sockets, in both processes
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.setsid()
        end_with_parent(parent)
        for number in (*numbers, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        os.environ[FOLDER] = str(folder)
        return folder
    code = _wait_for_end(child, numbers)
    _kill(child, GRACE_S, f"{FOLDER}={folder}\0".encode())
    util._run_finalizers()  # type: ignore[attr-defined]  # removes the folder of the sockets
    shutil.rmtree(folder, ignore_errors=True)
    if code is None or -code in numbers:
        raise KeyboardInterrupt
    if code < 0:
        raise RunError(f"""{signal.Signals(-code).name} ended the process that does the work;
            see the kernel's log: SIGKILL often means that memory was full""")
    os._exit(code)


def _wait_for_end(child: int, numbers: Sequence[int]) -> int | None:
    """Return the exit code of a child, or None after a signal of `numbers`: it is then killed."""
    while True:
        number = signal.sigwait([*numbers, signal.SIGCHLD])
        if number == signal.SIGTSTP:  # Ctrl-Z
            for each in (signal.SIGSTOP, signal.SIGCONT):
                with suppress(ProcessLookupError, PermissionError):  # it has ended
                    os.killpg(child, each)
                if each == signal.SIGSTOP:
                    os.kill(os.getpid(), each)  # until the shell sends SIGCONT
        elif number != signal.SIGCHLD:
            os.kill(child, signal.SIGKILL)  # also before it has its session
            os.waitpid(child, 0)
            return None
        elif (ended := os.waitpid(child, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(ended[1])


@contextmanager
def signals_passed_on(
    numbers: Iterable[int], send: Callable[[int], object]
) -> Iterator[Sequence[int]]:
    """Call `send` with each of these signals that comes in the block; yield those so far."""
    received: list[int] = []

    def take(number: int, frame: object) -> None:
        received.append(number)
        send(number)

    handlers = {number: signal.signal(number, take) for number in numbers}
    try:
        yield received
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def end(
    process: subprocess.Popen[Any],
    grace_s: float | None = None,
    mark: bytes = b"",
    is_asked: bool = True,
) -> None:
    """End a command that `start` has started, and wait for it.

    It `is_asked` by SIGTERM. With `grace_s`, what is left of its session after so many seconds is
    killed, and each process whose environment contains `mark`: torchrun's ranks have sessions of
    their own.
    """
    try:
        if is_asked and process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(grace_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if grace_s is not None:
            _kill(process.pid, grace_s, mark)
        process.wait()


def _kill(session: int, grace_s: float, mark: bytes) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(session, signal.SIGKILL)
    end = time.monotonic() + grace_s
    # without a mark there is nothing to look for: the empty one is in every environment
    while mark and (left := _find_processes(mark)) and time.monotonic() < end:
        for each in left:
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        time.sleep(0.01)


def _find_processes(mark: bytes) -> list[int]:
    """Return the processes whose environment contains a mark; none where there is no /proc."""
    found = []
    for place in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if mark in place.read_bytes():
                found.append(int(place.parent.name))
    return found


def read_end(path: Path) -> str:
    """Return the end of a log, or "" if it is gone or no plain file."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def last_words(stderr: str) -> str:
    """Return the error line of failed ranks, else the first exception and where it was raised."""
    lines = stderr.splitlines()
    errors = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    if errors and not errors[0].startswith("another rank "):
        return errors[0]
    return _find_exception(lines) or (errors or lines[-1:] or ["failed"])[0]


def _find_exception(lines: Sequence[str]) -> str | None:
    """Return the first exception, with its last frame outside this package and libraries."""
    frames: list[re.Match[str]] | None = None
    for line in lines:
        if line.startswith("Traceback "):
            frames = []
            continue
        if frames is None:
            continue
        frame = _FRAME.match(line)
        if frame:
            frames.append(frame)
        elif frames and not line.startswith(" "):
            outside = [frame for frame in frames if not _is_library(frame[1])]
            path, number, function = (outside or frames)[-1].groups()
            return f"{line} ({path}:{number}, in {function})"
    return None


def _is_library(path: str) -> bool:
    return path.startswith((_PACKAGE, "<")) or "/site-packages/" in path


PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies, also by SIGKILL.

    The kernel does not for a parent that is dead already; give its process id to exit then too.
    """
    with suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def end_as_by_interrupt() -> None:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, so that the processes started here end."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)


@contextmanager
def interrupted_by_sigterm() -> Iterator[None]:
    """Raise KeyboardInterrupt at SIGTERM, as torchrun sends it after Ctrl-C; not in a thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
