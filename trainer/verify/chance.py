"""The task's functions that depend on chance: other generators, threads, the clock, files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy

from trainer.base.python_code import owner_of_file
from trainer.core.rng import global_rngs

# The strongest evidence first: code may well read the clock or a file without using it.
TEXTS = {
    "unseeded": "{} draws unseeded random numbers",
    "global": "{} draws from numpy's or Python's generator",
    "threads": "{} starts threads, whose order is left to chance",
    "clock": "{} reads the clock",
    "files": "{} opens a file",
}
MOST_FUNCTIONS = 2
_CLOCKS = {"time", "perf_counter", "monotonic", "process_time", "thread_time"}
_KINDS_BY_CALL = {
    "urandom": "unseeded",
    "Generator.seed": "unseeded",  # torch's
    "start_new_thread": "threads",
    "start_joinable_thread": "threads",
    "datetime.now": "clock",
    "datetime.utcnow": "clock",
}
_NUMPY = str(Path(numpy.__file__).parent) + os.sep


class ChanceCalls:
    """A context that notes the user's functions that take something from chance, in this thread.

    Generators are compared at each call of a function, which suits one step.
    """

    def __init__(self) -> None:
        self._functions: dict[tuple[str, str], None] = {}  # (kind, name and line), in their order
        self._generators: Any = None
        self._before: Any = None

    def __enter__(self) -> ChanceCalls:
        self._generators = global_rngs()
        self._before = sys.getprofile()
        sys.setprofile(self._notice)
        return self

    def __exit__(self, *error: object) -> None:
        sys.setprofile(self._before)

    @property
    def lines(self) -> list[str]:
        """Sentences about the functions that take something from chance, the surest first."""
        return [
            text.format(function)
            for kind, text in TEXTS.items()
            for its_kind, function in self._functions
            if its_kind == kind
        ]

    def _notice(self, frame: FrameType, event: str, arg: Any) -> None:
        if event == "c_call":
            if kind := _kind_of(arg, frame):
                self._add(kind, frame)
        elif event in ("call", "return"):
            generators = global_rngs()
            if generators != self._generators:
                self._generators = generators
                ran = frame.f_back if event == "call" else frame
                if ran is not None:
                    self._add("global", ran)

    def _add(self, kind: str, frame: FrameType) -> None:
        """Note the innermost function outside of Python, numpy and torch, if it is the user's."""
        each = next((f for f in _outwards(frame) if not _is_between(f.f_code.co_filename)), None)
        if each is not None and owner_of_file(each.f_code.co_filename) != "lockstep":
            file = Path(each.f_code.co_filename).name
            self._functions[kind, f"{each.f_code.co_name} ({file}:{each.f_lineno})"] = None


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_between(file: str) -> bool:
    """Return True for code of Python, numpy or torch, which others call."""
    return owner_of_file(file) in ("python", "torch") or file.startswith(_NUMPY)


def _kind_of(function: Any, frame: FrameType) -> str:
    """Return the kind of source that a function written in C is, or an empty string."""
    name = getattr(function, "__qualname__", "")
    if name in _KINDS_BY_CALL:
        return _KINDS_BY_CALL[name]
    module = getattr(function, "__module__", None)
    if module == "time" and name.removesuffix("_ns") in _CLOCKS:
        return "clock"
    if module == "io" and name == "open":
        return "files"
    if name == "Random.seed" and frame.f_locals.get("a", 0) is None:
        return "unseeded"  # random.Random()
    return ""
