"""A disk that fails: what `checkpoint.on_error` says of it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from trainer.config.schema import Checkpoint
from trainer.errors import RunError


class Disk:
    """The disk of a run directory. `failure` ends the run at the next step, if set."""

    def __init__(self, directory: Path, config: Checkpoint, say: Callable[[str], None]):
        self.failure: RunError | None = None
        self._directory = directory
        self._stops = config.on_error == "stop"
        self._say = say
        self._warned: set[tuple[str, int | None]] = set()

    def report(self, error: OSError, doing: str, need: int = 0) -> None:
        """End the run, or warn once for each kind of error; `need` counts the bytes wanted."""
        place = error.filename or self._directory
        free = shutil.disk_usage(self._directory).free
        sizes = f"{need / 1e6:,.1f} MB are needed, {free / 1e6:,.1f} MB free"
        line = f"{place}: {error.strerror or error} in {doing}; {sizes}"
        kind = (doing.split(" step ")[0], error.errno)
        if self._stops:
            advice = "make room and go on with run.resume, or give checkpoint.on_error=continue"
            self.failure = RunError(f"{line}; {advice}")
        else:
            self._warn(kind, f"{line}; going on, as checkpoint.on_error=continue says")

    def bear(self, error: OSError, doing: str) -> None:
        """Warn, once for each kind of error, of what a run can do without."""
        place = error.filename or self._directory
        line = f"{place}: {error.strerror or error} in {doing}; the run goes on without it"
        self._warn((doing, error.errno), line)

    def _warn(self, kind: tuple[str, int | None], line: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            self._say(f"warning: {line}")

    def recover(self, doing: str) -> None:
        """Note that `doing` works again: its next failure is another one."""
        self._warned = {kind for kind in self._warned if kind[0] != doing}
