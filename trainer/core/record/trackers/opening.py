"""Opens the trackers of a run: CSV, services by their names, and the observers of a user."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from trainer.base.errors import ConfigError
from trainer.core import extensions
from trainer.core.config.schema import Config
from trainer.core.config.targets import resolve
from trainer.core.record.trackers import Observed, Observer, Say, Sink
from trainer.core.record.trackers.jsonl import CsvFile


def open_trackers(config: Config, directory: Path, step: int, say: Say) -> list[Sink]:
    """Open the trackers of `log.trackers`, except TensorBoard, and the observers.

    A service that has started this process, and says so by a variable, is told its progress too,
    unless `log.trackers` is empty. Raises ConfigError for an observer that is none.
    """
    names = config.log.trackers
    sinks: list[Sink] = [CsvFile(directory, say)] if "csv" in names else []
    for variable, service in extensions.STARTERS.items():
        address = os.environ.get(variable)
        if names and address and (sink := service.load().open_sink(address, say)):
            sinks.append(sink)
    kinds: dict[str, type[Observer]] = {}
    for name, tracker in extensions.TRACKERS.items():
        if name in names:
            kinds[f"log.trackers: {name}"] = tracker.load().TRACKER
    for name in config.log.observers:
        kinds[f"log.observers: {name}"] = _find_observer(name, config.packages)
    sinks += [
        Observed(name, partial(kind, config, directory), step, say) for name, kind in kinds.items()
    ]
    return sinks


def _find_observer(name: str, packages: Sequence[str]) -> type[Observer]:
    kind = resolve(name, "log.observers", packages)
    if not (isinstance(kind, type) and issubclass(kind, Observer)):
        raise ConfigError(f"log.observers={name}: must be a subclass of trainer.Observer")
    return kind
