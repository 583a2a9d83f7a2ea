"""A child process: its session, forwarded signals, log, last error line and end, also with us."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from trainer.base.python_code import owner_of_file

MOST_BYTES_OF_A_LOG = 1 << 18  # read from its end
_FRAME = re.compile(r'  File "([^"]+)", line (\d+), in (.+)')


def start(words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a command in a session of its own: what a terminal sends reaches its parent only."""
    return subprocess.Popen(words, start_new_session=True, **options)  # noqa: S603  # no shell


@contextmanager
def signals_passed_on(
    signal_numbers: Iterable[int], send: Callable[[int], object]
) -> Iterator[Sequence[int]]:
    """Call `send` with each of these signals that comes in the block; yield those so far."""
    received: list[int] = []

    def take(signal_number: int, frame: object) -> None:
        received.append(signal_number)
        send(signal_number)

    handlers = {
        signal_number: signal.signal(signal_number, take) for signal_number in signal_numbers
    }
    try:
        yield received
    finally:
        for signal_number, handler in handlers.items():
            signal.signal(signal_number, handler)


def end(
    process: subprocess.Popen[Any], grace_s: float | None = None, is_asked: bool = True
) -> None:
    """End a command that `start` has started, and wait for it.

    It `is_asked` by SIGTERM. With `grace_s`, what is left of its session after so many seconds is
    killed.
    """
    try:
        if is_asked and process.poll() is None:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait(grace_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        if grace_s is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_end(path: Path) -> str:
    """Return the end of a log, or "" if it is gone or no plain file."""
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - MOST_BYTES_OF_A_LOG))
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
            outside = [frame for frame in frames if owner_of_file(frame[1]) == "user"]
            path, line_number, function = (outside or frames)[-1].groups()
            return f"{line} ({path}:{line_number}, in {function})"
    return None


PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent dies, also by SIGKILL.

    The kernel does not for a parent that is dead already; give its process id to exit then too.
    """
    with suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


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
