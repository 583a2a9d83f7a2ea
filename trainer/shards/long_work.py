"""Long work on data of others: it ends when asked to stop, shows how far it is, and has limits.

`watched` is for loops of this process. `run_apart` is for what no check can reach: a chat template
without an end, a compiled library, a file of 500 bytes that unpacks to gigabytes.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

from trainer.base.errors import (
    ConfigError,
    RunError,
    ServerError,
    describe_with_place,
    message_of,
    visible,
)
from trainer.base.process.child import end_with_parent
from trainer.core.api import signal_to_stop

PROGRESS_S = 2.0  # until the first line, then twice as long each time
MOST_BETWEEN_S = 60.0
WORK_POLL_S = 0.05
IDLE_S = 60.0  # without progress
MOST_MEMORY = 2**32  # bytes that a process apart may need more than this one
ERRORS_RAISED_AGAIN = (ServerError, RunError, ConfigError)  # as they are
PAGE = 4096  # bytes of the memory in which a process apart notes its progress
Item = TypeVar("Item")
Tell = Callable[[str], None]


class WorkProgress:
    """Progress of long work; `what` says what it does, such as "reading chat.jsonl"."""

    def __init__(self, what: str, unit: str):
        self.what = what
        self._unit = unit
        self._wait_s = PROGRESS_S
        self._shown = time.monotonic()

    def check(self, units_done: int) -> None:
        """Show `units_done`, if the last line is long ago. Raises RunError if asked to stop."""
        if name := signal_to_stop(0.0):
            raise RunError(f"asked to stop ({name}) while {self.what}; nothing was saved")
        if time.monotonic() - self._shown < self._wait_s:
            return
        self._shown = time.monotonic()
        self._wait_s = min(2 * self._wait_s, MOST_BETWEEN_S)
        if os.environ.get("LOCAL_RANK", "0") == "0":
            line = f"{self.what}: {units_done:,} {self._unit} so far ..."
            print(visible(line), file=sys.stderr, flush=True)


def watched(items: Iterable[Item], what: str, unit: str) -> Iterator[Item]:
    """Yield items; raise RunError between two of them if asked to stop, and show progress."""
    progress = WorkProgress(what, unit)
    for units_done, item in enumerate(items):
        progress.check(units_done)
        yield item


def run_apart(
    work: Callable[[Tell], Any],
    what: str,
    unit: str,
    setting: str,
    advice: str = "mend it",
) -> Any:
    """Return the plain values that `work(tell)` returns, computed in a process that is forked.

    `work` calls `tell(location)` for each unit, such as a row. The process is ended when this one
    is asked to stop, after IDLE_S without a call, and if it needs more than MOST_MEMORY; the last
    two raise ConfigError, which begins with `setting`, names the location and ends with `advice`.
    Its errors of one line are raised here. Without Linux the work is done in this process.
    """
    if sys.platform != "linux":
        progress, numbers = WorkProgress(what, unit), count(1)
        return work(lambda location: progress.check(next(numbers)))
    sys.stdout.flush()
    sys.stderr.flush()
    parent = os.getpid()
    notes = mmap.mmap(-1, PAGE)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads (3.12)
        pid = os.fork()
    if not pid:
        os.close(reader)
        _be_apart(work, parent, notes, writer)
    os.close(writer)
    status = 0
    try:
        answer, limit = _wait_for(pid, reader, notes, WorkProgress(what, unit))
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(reader)
        location = _read_notes(notes)[1]
        notes.close()
    if limit:
        raise ConfigError(f"""{setting}: {what} takes more than {limit} at {location};
            remove what is there, or {advice}""")
    if not answer:
        name = signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else "an exit"
        raise ConfigError(f"""{setting}: {name} ended the process that was {what}, at {location};
            see the kernel's log, and what is there""")
    return _take(json.loads(answer), what)


def _be_apart(work: Callable[[Tell], Any], parent: int, notes: mmap.mmap, writer: int) -> None:
    """Do the work, write the answer and exit."""
    numbers = count(1)

    def tell(location: str) -> None:
        text = location.encode(errors="replace")[: PAGE - 16]
        notes[:16] = next(numbers).to_bytes(8, "little") + len(text).to_bytes(8, "little")
        notes[16 : 16 + len(text)] = text

    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        end_with_parent(parent)
        try:
            answer = {"result": work(tell)}
        except ERRORS_RAISED_AGAIN as error:
            kind = next(kind for kind in ERRORS_RAISED_AGAIN if isinstance(error, kind))
            answer = {"error": [kind.__name__, message_of(error)]}
        except Exception as error:
            answer = {"error": [describe_with_place(error), traceback.format_exc()]}
        data = json.dumps(answer).encode()
        while data:
            data = data[os.write(writer, data) :]
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(0)


def _wait_for(pid: int, reader: int, notes: mmap.mmap, progress: WorkProgress) -> tuple[bytes, str]:
    """Return the answer of a process, empty if it ended without one, and a limit that it passed."""
    parts: list[bytes] = []
    seen, idle_s, begun = -1, 0.0, _memory_of(pid)
    while True:
        ready, _, _ = select.select([reader], [], [], WORK_POLL_S)
        if ready:
            part = os.read(reader, 2**16)
            if not part:
                return b"".join(parts), ""
            parts.append(part)
            continue
        units_done, _ = _read_notes(notes)
        progress.check(units_done)
        # of polls, not of a clock, which goes on while this process is stopped
        idle_s = idle_s + WORK_POLL_S if units_done == seen else 0.0
        seen = units_done
        if idle_s > IDLE_S:
            return b"", f"{IDLE_S:.0f} s"
        if begun and _memory_of(pid) - begun > MOST_MEMORY:
            return b"", f"{MOST_MEMORY / 2**30:.1f} GiB of memory"


def _read_notes(notes: mmap.mmap) -> tuple[int, str]:
    """Return how many units are done, and the place of the last one."""
    units_done, size = (int.from_bytes(notes[at : at + 8], "little") for at in (0, 8))
    text = notes[16 : 16 + min(size, PAGE - 16)].decode(errors="replace")
    return units_done, visible(text) or "its start"


def _memory_of(pid: int) -> int:
    """Return the bytes of memory of a process, 0 if that is not known."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE
    except (OSError, IndexError):
        return 0


def _take(answer: dict[str, Any], what: str) -> Any:
    if "result" in answer:
        return answer["result"]
    kind, text = answer["error"]
    for error_type in ERRORS_RAISED_AGAIN:
        if kind == error_type.__name__:
            raise error_type(text)
    error = RuntimeError(f"{what}: {kind}")
    if hasattr(error, "add_note"):  # from Python 3.11 on
        error.add_note(text)
    raise error
