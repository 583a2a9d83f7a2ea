"""Trackers: the interface of a sink, and all of a run, of which none can stop it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

from trainer.base.errors import one_line
from trainer.core.config.schema import Config

SAMPLES = "samples/"  # before the names of those texts
Method = TypeVar("Method", bound=Callable[..., None])


class Sink:
    """A destination that stores or shows a part of the record; by default it does neither."""

    def say(self, text: str) -> None:
        """Show a line to the person at the terminal."""

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None: ...

    def progress(self, step: int, num_steps: int, is_last: bool) -> None:
        """Show the progress after every step."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Record one value per name, each name at most once per step."""

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of an evaluation, which `scalars` had too."""

    def saved(self, step: int, path: Path) -> None:
        """Record the directory of a checkpoint that was published; called from another thread."""

    def note(self, step: int, facts: Mapping[str, Any]) -> None:
        """Record facts about a step that are not curves, such as texts of `Task.samples`."""

    def hyper_parameters(self, values: Mapping[str, Any]) -> None: ...

    def images(self, step: int, inputs: Any) -> None:
        """Show the first inputs of a micro-batch, if they are images."""

    def histogram(self, step: int, name: str, values: torch.Tensor) -> None:
        """Record the distribution of a parameter's values."""

    def profile(self, step: int) -> None:
        """Record a profile when it is due; called after every step."""

    def flush(self) -> None:
        """Write everything to disk. Raises OSError."""

    def exit(self, code: int, reason: str, facts: Mapping[str, Any]) -> None:
        """Record how the run ended."""

    def close(self) -> None: ...


def _in_every_sink(method: Method) -> Method:
    """Make a method of Record that calls the same method of each sink that overrides it."""
    name = method.__name__

    def call(record: Record, *arguments: Any) -> None:
        for receive in record.receivers[name]:
            receive(*arguments)

    return cast(Method, call)


def _or_fail(method: Method) -> Method:
    """Make a method of Record as above, after whose errors the run stops when it is saved."""
    name = method.__name__

    def call(record: Record, *arguments: Any) -> None:
        for receive in record.receivers[name]:
            try:
                receive(*arguments)
            except Exception as error:  # other ranks have no sinks, and do not know of it
                record.fail(error)

    return cast(Method, call)


class Record(Sink):
    """All sinks of a run; none on ranks other than 0, so that callers never ask for the rank.

    `receivers` are the sinks' methods by name, bound once: some are called after every step.
    """

    def __init__(self, sinks: Sequence[Sink] = ()):
        self._failure: Exception | None = None
        self.receivers: dict[str, list[Callable[..., None]]] = {}
        for name in vars(Sink):
            own = [s for s in sinks if getattr(type(s), name) is not getattr(Sink, name)]
            self.receivers[name] = [getattr(sink, name) for sink in own]

    def fail(self, error: Exception) -> None:
        self._failure = self._failure or error

    @property
    def has_failed(self) -> bool:
        """True if a sink has raised an error. Read after every step."""
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raise the first error of a sink."""
        if self._failure is not None:
            raise self._failure

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self.scalars(step, metrics)
        self._evaluated(step, metrics)

    say = _or_fail(Sink.say)
    table = _or_fail(Sink.table)
    progress = _or_fail(Sink.progress)
    scalars = _or_fail(Sink.scalars)
    _evaluated = _or_fail(Sink.evaluation)
    saved = _or_fail(Sink.saved)
    note = _or_fail(Sink.note)
    hyper_parameters = _or_fail(Sink.hyper_parameters)
    images = _or_fail(Sink.images)
    histogram = _or_fail(Sink.histogram)
    profile = _or_fail(Sink.profile)
    flush = _in_every_sink(Sink.flush)
    exit = _in_every_sink(Sink.exit)
    close = _in_every_sink(Sink.close)


Say = Callable[[str], None]
OBSERVER_PATIENCE_S = 30.0  # for one call, and at the end for all that are left


class Observer:
    """Receiver of a run's logs, evaluations and checkpoints on rank 0, named in `log.observers`.

    A separate thread calls its methods, with copies, so they cannot change, delay or end the run.
    One that raises, or takes longer than 30 s for a call, is named in a warning and not called
    again.
    """

    def __init__(self, config: Config, directory: Path):
        self.config = config
        self.directory = directory

    def start(self, step: int) -> None:
        """Begin: the run starts or resumes after `step` steps."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Receive the values of a log or an evaluation, by name as in metrics.jsonl."""

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Receive the metrics of an evaluation, which `scalars` had too."""

    def checkpoint(self, step: int, path: Path) -> None:
        """Receive the directory of a published checkpoint; a later one may remove it."""

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
        copied_values = dict(values)
        self._later(lambda observer: observer.scalars(step, copied_values))

    def evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        copied_metrics = dict(metrics)
        self._later(lambda observer: observer.evaluation(step, copied_metrics))

    def saved(self, step: int, path: Path) -> None:
        self._later(lambda observer: observer.checkpoint(step, path))

    def exit(self, code: int, reason: str, facts: Mapping[str, Any]) -> None:
        self._later(lambda observer: observer.end(code, reason))

    def close(self) -> None:
        self._calls.put(None)
        self._thread.join(0.0 if self._problem else OBSERVER_PATIENCE_S)
        if self._thread.is_alive() and not self._problem:
            self._problem = f"has not taken everything within {OBSERVER_PATIENCE_S:.0f} s"
        self._tell()

    def _later(self, call: Callable[[Observer], None]) -> None:
        since = self._since
        if since is not None and time.monotonic() - since > OBSERVER_PATIENCE_S:
            self._problem = self._problem or f"has not returned within {OBSERVER_PATIENCE_S:.0f} s"
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
