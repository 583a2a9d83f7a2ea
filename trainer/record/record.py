"""The record of a run: one face for its console, metrics.jsonl, exit.json and trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch

Method = TypeVar("Method", bound=Callable[..., None])


class Sink:
    """Something that keeps or shows a part of the record; by default it does neither."""

    def say(self, text: str) -> None:
        """A line for the person at the terminal."""

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None: ...

    def progress(self, step: int, num_steps: int) -> None:
        """Called after every step; at `step == num_steps` the run is over."""

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """A value per name; a name at most once per step."""

    def note(self, step: int, facts: Mapping[str, Any]) -> None:
        """Facts about a step that are no curve."""

    def hyper_parameters(self, values: Mapping[str, Any]) -> None: ...

    def images(self, step: int, inputs: Any) -> None:
        """Show the first inputs of a micro-batch, if they are images."""

    def observe(self, step: int, model: torch.nn.Module) -> None:
        """Called after every step: histograms and profiles, when they are due."""

    def flush(self) -> None:
        """Have everything on the disk. Raises OSError."""

    def exit(self, code: int, reason: str, facts: Mapping[str, Any]) -> None:
        """Keep how the run ended."""

    def close(self) -> None: ...


def _in_every_sink(method: Method) -> Method:
    """A method of Record that calls the same method of each sink that has its own."""
    name = method.__name__

    def call(record: Record, *arguments: Any) -> None:
        for receive in record.receivers[name]:
            receive(*arguments)

    return cast(Method, call)


class Record(Sink):
    """All sinks of a run. Off rank 0 it has none, so callers never ask for the rank.

    `receivers` are the sinks' methods by name, bound once: some are called after every step.
    """

    def __init__(self, sinks: Sequence[Sink] = ()):
        self.receivers: dict[str, list[Callable[..., None]]] = {}
        for name in vars(Sink):
            own = [s for s in sinks if getattr(type(s), name) is not getattr(Sink, name)]
            self.receivers[name] = [getattr(sink, name) for sink in own]

    say = _in_every_sink(Sink.say)
    table = _in_every_sink(Sink.table)
    progress = _in_every_sink(Sink.progress)
    scalars = _in_every_sink(Sink.scalars)
    note = _in_every_sink(Sink.note)
    hyper_parameters = _in_every_sink(Sink.hyper_parameters)
    images = _in_every_sink(Sink.images)
    observe = _in_every_sink(Sink.observe)
    flush = _in_every_sink(Sink.flush)
    exit = _in_every_sink(Sink.exit)
    close = _in_every_sink(Sink.close)
