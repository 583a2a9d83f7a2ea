"""Python's code: whose it is, the names that it uses, and the line that raised an exception."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, Literal

from trainer.base.folders import PACKAGE

Owner = Literal["user", "installed", "torch", "python", "lockstep"]
LIBRARY = str(Path(os.__file__).parent) + os.sep
_PACKAGE = str(PACKAGE) + os.sep
_TASKS = str(PACKAGE / "tasks") + os.sep  # in a wheel; they are there to be copied


def owner_of_file(file: str) -> Owner:
    """Return whose code is in a file; a notebook's cell is the user's."""
    if file.startswith(_PACKAGE) and not file.startswith(_TASKS):
        return "lockstep"
    if file.startswith(_TASKS):
        return "user"
    _, is_installed, path = file.rpartition(f"-packages{os.sep}")  # site- or dist-packages
    if is_installed:
        return "torch" if path.startswith(f"torch{os.sep}") else "installed"
    return "python" if file.startswith((LIBRARY, "<")) else "user"


def owner_of(definition: Any) -> Owner:
    """Return whose code defines a class or a function."""
    name = str(getattr(definition, "__module__", None) or "builtins")
    file = getattr(sys.modules.get(name), "__file__", None)
    if file is not None:
        return owner_of_file(file)
    return "user" if name == "__main__" else "python"  # the first is a notebook


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that a function's code uses, and those of the functions in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def place_in(step: TracebackType | None, *owners: Owner) -> str:
    """Return `file.py:12`, the last line of a traceback that one of these owns, or ""."""
    frames = [f for f in traceback.extract_tb(step) if owner_of_file(f.filename) in owners]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""
