"""exit.json of a run whose ranks cannot write it themselves."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


class ExitFile:
    """exit.json of the run that the ranks of a node write."""

    def __init__(self, find_directory: Callable[[], str]):
        """`find_directory` returns the run directory; empty before the ranks have one."""
        self._find_directory = find_directory
        self._writer: Any = None  # the token of the directory's writer

    def find_writer(self) -> None:
        """Read once who writes in the directory."""
        if self._writer is None and (directory := self._find_directory()):
            self._writer = _read(Path(directory, ".writer")).get("token", "")

    def write(self, reason: str, step: int, replaced: str = "") -> None:
        """Write a failure, unless another reason is there, or another process writes there now.

        A reason that contains `replaced` is no other one.
        """
        directory = Path(self._find_directory() or os.devnull)
        path = directory / "exit.json"
        former_reason = str(_read(path).get("reason", ""))
        if former_reason and not (replaced and replaced in former_reason):
            return
        if self._writer and _read(directory / ".writer").get("token") not in (None, self._writer):
            return  # a restart
        with suppress(OSError):
            staged = directory / ".exit.json.new"
            staged.unlink(missing_ok=True)
            with open(staged, "x", encoding="utf-8") as file:
                json.dump({"code": 1, "reason": reason, "step": step}, file, indent=1)
            os.replace(staged, path)


def _read(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        content = json.loads(path.read_bytes()) if path.is_file() else {}
        return content if isinstance(content, dict) else {}
    return {}
