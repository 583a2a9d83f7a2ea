"""Observers of services that have a run of their own for each run of ours."""

from __future__ import annotations

import json
from collections.abc import Callable

from trainer import Observer
from trainer.base.durable_files import replace_file
from trainer.base.plain_files import read_json

TRACKED_RUNS = "trackers.json"  # in the run directory: its runs in the services
MOST_OF_TRACKED_RUNS = 2**16  # bytes of it


class KnownObserver(Observer):
    """An observer with a run of its own in a service, which trackers.json names."""

    name = ""

    def known(self, make: Callable[[], str]) -> tuple[str, bool]:
        """Return the name of this run's run there, and whether an earlier process made it."""
        path = self.directory / TRACKED_RUNS
        names = read_json(path, MOST_OF_TRACKED_RUNS) if path.exists() else {}
        is_known = isinstance(names.get(self.name), str)
        if not is_known:
            names[self.name] = make()
            replace_file(path, json.dumps(names) + "\n")
        return names[self.name], is_known
