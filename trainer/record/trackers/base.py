"""The record of a run: one interface to console, metrics.jsonl, exit.json and trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch

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
        """Record facts about a step that are not curves."""

    def hyper_parameters(self, values: Mapping[str, Any]) -> None: ...

    def images(self, step: int, inputs: Any) -> None:
        """Show the first inputs of a micro-batch, if they are images."""

    def histogram(self, step: int, name: str, values: torch.Tensor) -> None:
        """Record the distribution of a parameter's values."""

    def observe(self, step: int) -> None:
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

    def settle(self) -> None:
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
    observe = _or_fail(Sink.observe)
    flush = _in_every_sink(Sink.flush)
    exit = _in_every_sink(Sink.exit)
    close = _in_every_sink(Sink.close)
