"""A rank's heartbeat: its step, its phase and the start of the phase, in shared memory.

The watcher (watcher.py) that reads it is a separate process. A thread would be stopped together
with its process, and would wait for the GIL, which a hung C call never releases.
"""

from __future__ import annotations

import mmap
import time
from typing import Any

from trainer.core.distributed.watch import watcher
from trainer.core.distributed.watch.phases import MESH_GROUPS, Phase


class Heartbeat:
    """This rank's progress, written in about 0.2 us a call; without a watcher nothing reads it."""

    def __init__(self, memory: memoryview):
        self._page = memory[: watcher.FIELDS * 8].cast("d")
        self._path = memory[watcher.FIELDS * 8 :][: watcher.MAX_PATH]
        self._place = memory[watcher.FIELDS * 8 + watcher.MAX_PATH : mmap.PAGESIZE]
        self.directory = ""
        self._began = 0.0
        self._waited_s = 0.0

    def enter(self, phase: Phase) -> None:
        """Record the start of a phase."""
        page = self._page
        phase_start = time.monotonic()
        if page[watcher.PHASE] == Phase.DATA:
            self._waited_s += phase_start - page[watcher.SINCE]
        page[watcher.PHASE] = phase
        page[watcher.SINCE] = phase_start

    def refresh(self) -> None:
        """Record that the phase may take longer: for a thread of a rank that waits rightly."""
        self._page[watcher.SINCE] = time.monotonic()

    def take_wait(self) -> float:
        """Return the seconds of waiting for data since the last call."""
        waited_s = self._waited_s
        self._waited_s = 0.0
        return waited_s

    def begin_step(self, step: int) -> None:
        """Record the start of a step; its first phase is loading the data."""
        self._began = time.monotonic()
        page = self._page
        page[watcher.PHASE] = Phase.DATA
        page[watcher.SINCE] = self._began
        page[watcher.STEP] = step

    def reduce_begun(self, *_: Any) -> None:
        """Record that this rank's gradients are ready and that it waits for the other ranks."""
        self.enter(Phase.REDUCE)
        page = self._page
        page[watcher.BUSY] = page[watcher.SINCE] - self._began

    def end_step(self) -> None:
        """Record the end of a step."""
        page = self._page
        page[watcher.TOTAL] += page[watcher.BUSY]
        page[watcher.STEPS] += 1
        page[watcher.STEP] += 1

    def wait_in(self, group: str) -> None:
        """Record that this rank waits for the others of a group of the mesh; "": no longer."""
        self._page[watcher.GROUP] = MESH_GROUPS.index(group)

    def set_place(self, coordinates: str) -> None:
        """Record the coordinates of this rank in the mesh."""
        data = f"{coordinates}; ".encode()[: len(self._place) - 1] + b"\0" if coordinates else b"\0"
        self._place[: len(data)] = data

    def set_directory(self, directory: str) -> None:
        """Record the run directory, where the watcher writes exit.json."""
        self.directory = directory
        data = directory.encode()[: watcher.MAX_PATH - 1] + b"\0"
        self._path[: len(data)] = data
