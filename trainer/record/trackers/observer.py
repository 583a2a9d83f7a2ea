"""Observers of a run: the user's own, and the trackers of vendors."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trainer.config.schema import Config
from trainer.errors import one_line
from trainer.record.trackers.base import Sink

Say = Callable[[str], None]
PATIENCE_S = 30.0  # for one call, and at the end for all that are left


class Observer:
    """Something that rank 0 tells about a run, named in `log.observers`.

    Its methods are called one after another, in a thread of its own. They get copies, and cannot
    change, delay or end the run: an observer that raises, or takes longer than 30 s for a call, is
    named in a warning and not called again.
    """

    def __init__(self, config: Config, directory: Path):
        self.config = config
        self.directory = directory

    def start(self, step: int) -> None:
        """Begin: the run starts or goes on after `step` steps."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Take the values of a log or an evaluation, by name as in metrics.jsonl."""

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Take the metrics of an evaluation, after `scalars` had them too."""

    def checkpoint(self, step: int, path: Path) -> None:
        """Take the directory of a checkpoint that was published; a later one may remove it."""

    def end(self, code: int, reason: str) -> None:
        """Finish. `code` is the run's exit code: 0 done, 1 failed, 2 bad settings, 75 stopped."""


class Observed(Sink):
    """An observer as a sink, called in a thread of its own."""

    def __init__(self, name: str, make: Callable[[], Observer], step: int, say: Say):
        """`name` is the setting and the observer in it, for warnings."""
        self._name = name
        self._say = say
        self._problem = ""
        self._is_told = False
        self._since: float | None = None  # of the call in progress
        self._calls: queue.Queue[Callable[[Observer], None] | None] = queue.Queue()
        work = partial(self._work, make)
        self._thread = threading.Thread(target=work, daemon=True, name=f"observer {name}")
        self._thread.start()
        self._calls.put(lambda observer: observer.start(step))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        found = dict(values)
        self._later(lambda observer: observer.scalars(step, found))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        found = dict(metrics)
        self._later(lambda observer: observer.evaluation(step, found))

    def saved(self, step: int, path: Path) -> None:
        self._later(lambda observer: observer.checkpoint(step, path))

    def exit(self, code: int, reason: str, facts: Mapping[str, Any]) -> None:
        self._later(lambda observer: observer.end(code, reason))

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(0.0 if self._problem else PATIENCE_S)
        if self._thread.is_alive() and not self._problem:
            self._problem = f"has not taken everything within {PATIENCE_S:.0f} s"
        self._tell()

    def _later(self, call: Callable[[Observer], None]) -> None:
        since = self._since
        if since is not None and time.monotonic() - since > PATIENCE_S:
            self._problem = self._problem or f"has not returned within {PATIENCE_S:.0f} s"
        self._tell()
        if not self._problem:
            self._calls.put(call)

    def _tell(self) -> None:
        if self._problem and not self._is_told:
            self._is_told = True
            why = f"{self._problem}; the run continues without it"
            self._say(f"warning: {self._name}: {why}")

    def _work(self, make: Callable[[], Observer]) -> None:
        observer: Observer | None = None
        while (call := self._calls.get()) is not None:
            if self._problem:
                continue
            self._since = time.monotonic()
            try:
                observer = observer or make()
                call(observer)
            except BaseException as error:  # of foreign code, SystemExit too
                self._problem = one_line(error)[:200] or type(error).__name__
            self._since = None
