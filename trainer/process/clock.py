"""Clock of a run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Clock of training time in seconds, without evaluation and saving."""

    def __init__(self) -> None:
        self._paused = 0.0

    def read(self) -> float:
        return time.monotonic() - self._paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self._paused += time.monotonic() - begun
