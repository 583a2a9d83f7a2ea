"""The record of a run: one face for its console, metrics.jsonl, exit.json and trackers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


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


class Record(Sink):
    """All sinks of a run. Off rank 0 it has none, so callers never ask for the rank."""

    def __init__(self, sinks: Sequence[Sink] = ()):
        self._sinks = sinks

    def say(self, text: str) -> None:
        for sink in self._sinks:
            sink.say(text)

    def table(self, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        for sink in self._sinks:
            sink.table(columns, rows)

    def progress(self, step: int, num_steps: int) -> None:
        for sink in self._sinks:
            sink.progress(step, num_steps)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        for sink in self._sinks:
            sink.scalars(step, values)

    def note(self, step: int, facts: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.note(step, facts)

    def hyper_parameters(self, values: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.hyper_parameters(values)

    def images(self, step: int, inputs: Any) -> None:
        for sink in self._sinks:
            sink.images(step, inputs)

    def observe(self, step: int, model: torch.nn.Module) -> None:
        for sink in self._sinks:
            sink.observe(step, model)

    def flush(self) -> None:
        for sink in self._sinks:
            sink.flush()

    def exit(self, code: int, reason: str, facts: Mapping[str, Any]) -> None:
        for sink in self._sinks:
            sink.exit(code, reason, facts)

    def close(self) -> None:
        for sink in self._sinks:
            sink.close()
