"""Tracebacks of a task's exceptions: its own frames for the user, all frames in a file of the run.

Of the 30 to 100 frames between `fit` and a line of the task, the user can change those of the task.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from trainer.base.errors import describe, shortened, visible
from trainer.base.python_code import owner_of_file

FULL_TRACEBACK = "LOCKSTEP_TRACEBACK"  # set to "full": all frames are shown
MOST_LINES_OF_A_TRACEBACK = 200
MOST_FRAMES = 20  # of the task's, as of a recursion
MOST_OF_A_MESSAGE = 30  # lines


_FILE, _FAILURE = "_lockstep_file", "_lockstep_failure"  # attributes of an exception


@dataclass(frozen=True)
class Failure:
    """An exception that other ranks may have: one shows it, and `count` waits for the others."""

    is_shown: bool
    count: Callable[[], int]


def write_traceback(error: BaseException, directory: Path, rank: int) -> None:
    """Write all frames to a file of the run directory, which `show` then names."""
    path = directory / (f"traceback-rank-{rank}.txt" if rank else "traceback.txt")
    with (
        suppress(OSError),
        open(path, "w", encoding="utf-8", errors="replace", opener=_open_plain) as file,
    ):
        file.write(format_traceback(error) + "\n")
        setattr(error, _FILE, path)


def _open_plain(name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def set_failure(error: BaseException, failure: Failure) -> None:
    """Note whether this rank shows an exception."""
    setattr(error, _FAILURE, failure)


def find_failure(error: BaseException) -> Failure | None:
    return getattr(error, _FAILURE, None)


def show(error: BaseException) -> str:
    """Return the frames of the task, the message, and the place of all frames."""
    if os.environ.get(FULL_TRACEBACK) == "full":
        return format_traceback(error)
    path = getattr(error, _FILE, None)
    advice = (
        "all frames: "
        f"{os.path.relpath(path) if path else f'start again with {FULL_TRACEBACK}=full'}"
    )
    return f"{_format_task_frames(error)}\n{visible(advice)}"


def describe_cause(error: BaseException) -> str:
    """Return `ValueError: message (file.py:12)`, with the last line of the task's own code."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if owner_of_file(frame.filename) == "user"]
    return f"{describe(error)} ({own[-1].filename}:{own[-1].lineno})" if own else describe(error)


def format_traceback(error: BaseException) -> str:
    """Return the traceback of an exception, safe for a terminal; long messages are shortened."""
    return _join(traceback.TracebackException.from_exception(error), MOST_LINES_OF_A_TRACEBACK)


def _format_task_frames(error: BaseException) -> str:
    exception = traceback.TracebackException.from_exception(error)
    num_lines = MOST_OF_A_MESSAGE
    for part in _walk(exception):
        part.stack[:] = _choose(part)
        num_lines += len("".join(part.stack.format()).splitlines())
    return _join(exception, num_lines)


def _walk(exception: traceback.TracebackException) -> Iterator[traceback.TracebackException]:
    """Yield an exception, its causes and the exceptions of a group."""
    yield exception
    below = [
        exception.__cause__,
        exception.__context__,
        *(getattr(exception, "exceptions", None) or ()),
    ]
    for part in below:
        if part is not None:
            yield from _walk(part)


def _choose(exception: traceback.TracebackException) -> list[traceback.FrameSummary]:
    """Return the frames of the task, and the one that raised the exception.

    Without any of the task these are frames of packages other than torch and this one, else the
    last three.
    """
    frames = [frame for frame in exception.stack if not frame.filename.startswith("<frozen ")]
    own = [frame for frame in frames if owner_of_file(frame.filename) == "user"]
    own = own or [f for f in frames if owner_of_file(f.filename) == "installed"] or frames[-3:]
    is_of_syntax = hasattr(exception, "offset")  # its message has the place
    if frames and own[-1] is not frames[-1] and not is_of_syntax:
        own.append(frames[-1])
    return (
        own if len(own) <= MOST_FRAMES else own[: MOST_FRAMES // 4] + own[-MOST_FRAMES * 3 // 4 :]
    )


def _join(exception: traceback.TracebackException, most: int) -> str:
    lines = "".join(exception.format()).splitlines()
    if sys.version_info < (3, 11):
        lines += getattr(exception, "__notes__", ())
    if len(lines) > most:
        half = most // 2
        left_out = f"[... {len(lines) - most:,} more lines ...]"
        lines = [*lines[:half], left_out, *lines[-half:]]
    return "\n".join(shortened(visible(line.expandtabs(4))) for line in lines)
