"""Files: those that the script writes, and those that it reads though they are new.

A command may read what the command before it wrote, such as a snapshot.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from .log import LOG, SETTINGS

MOST_FILES = 4000  # of a process
NOT_OF_A_SCRIPT = ("/dev/", "/proc/", "/sys/")
CACHES = ("__pycache__", "/.cache/", "torchinductor_", "/.triton/")


class Files:
    """Paths of files that this process has opened."""

    def __init__(self) -> None:
        self._read: set[str] = set()
        self._written: set[str] = set()
        self._is_busy = False

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note an event of Python's audit; it must not raise errors in the script."""
        if event not in ("open", "os.rename") or self._is_busy:
            return
        self._is_busy = True
        try:
            if event == "os.rename":
                self.add(arguments[1], is_written=True)
            elif isinstance(arguments[0], (str, bytes, os.PathLike)):
                self.add(arguments[0], _writes(arguments[1], arguments[2]))
        except Exception:  # noqa: S110  # a strange path
            pass
        finally:
            self._is_busy = False

    def add(self, path: Any, is_written: bool) -> None:
        """Note a file that is written, or a new one that is read."""
        place = os.path.realpath(os.fsdecode(path))
        known = self._written if is_written else self._read
        if place in known or place in self._written or len(known) >= MOST_FILES:
            return
        if place.startswith((*NOT_OF_A_SCRIPT, SETTINGS["folder"])):
            return
        if any(each in place for each in CACHES):
            return
        known.add(place)
        is_new = is_written or os.stat(place).st_mtime >= SETTINGS["begun"]  # noqa: PTH116
        if is_new and not os.path.isdir(place):  # noqa: PTH112
            LOG.add("file", path=place, is_written=is_written)


def _writes(mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return bool(flags & (os.O_WRONLY | os.O_RDWR))


FILES = Files()


def watch_files() -> None:
    """Note each file from now on."""
    sys.addaudithook(FILES.note)
