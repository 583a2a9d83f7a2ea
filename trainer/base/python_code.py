"""Python's code: whose it is, the names that it uses, and the line that raised an exception."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, Literal

from trainer.base.folders import PACKAGE

Owner = Literal["user", "installed", "torch", "python", "lockstep"]
LIBRARY = str(Path(os.__file__).parent) + os.sep
# as the file system has it, and as it was imported, perhaps through a link
_PACKAGES = tuple(f"{folder}{os.sep}" for folder in (PACKAGE, Path(__file__).parents[1]))
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_TYPED = ("<stdin>", "<ipython-input", "<python-input")  # by a user, at a prompt


def owner_of_file(file: str) -> Owner:
    """Return whose code is in a file."""
    for package in _PACKAGES:
        if file.startswith(package):  # the tasks in a wheel are there to be copied
            return "user" if file.startswith(f"{package}tasks{os.sep}") else "lockstep"
    if _INSTALLED.search(file):
        return "torch" if f"-packages{os.sep}torch{os.sep}" in file else "installed"
    if file.startswith("<"):
        return "user" if file.startswith(_TYPED) else "python"
    return "python" if file.startswith(LIBRARY) else "user"


def owner_of(definition: Any) -> Owner:
    """Return whose code defines a class or a function."""
    name = str(getattr(definition, "__module__", None) or "builtins")
    if name == "__main__":  # a script, a notebook, or a task that a notebook has sent here
        return "user"
    file = getattr(sys.modules.get(name), "__file__", None)
    return _owner_of_module(name, file or "<built in>")


def owner_of_frame(frame: FrameType) -> Owner:
    """Return whose code runs in a frame."""
    return _owner_of_module(str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename)


def _owner_of_module(name: str, file: str) -> Owner:
    if name.partition(".")[0] == "torch":  # also where it is built, and what it generates
        return "torch"
    return owner_of_file(file)


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that a function's code uses, and those of the functions in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)


def place_in(step: TracebackType | None, *owners: Owner) -> str:
    """Return `file.py:12`, the last line of a traceback that one of these owns, or ""."""
    lines = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(step)
        if owner_of_frame(frame) in owners
    ]
    return lines[-1] if lines else ""
