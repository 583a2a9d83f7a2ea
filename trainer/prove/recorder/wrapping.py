"""The recorder's log, and functions of torch wrapped so that their calls are noted in it.

A process writes no file before its first step: launchers and data workers write none at all.

A watched function binds what it is given by the signature of the original, so each argument may
come by its place or by its name.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import inspect
import json
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing import util
from pathlib import Path
from typing import Any

import torch

from . import SETTINGS

PATIENCE_S = 20.0  # for other ranks


class Log:
    """The events of this process, in order."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._file: int | None = None
        self._is_broken = False  # the disk, or a limit of the shell, takes no more
        self._num_errors = 0
        self.seconds = 0.0  # that recording took
        self._begun = time.time()  # of this process

    def add(self, event: str, **values: Any) -> None:
        """Add an event; it is written at the next step."""
        self._lines.append(json.dumps({"event": event, **values}))

    @property
    def is_open(self) -> bool:
        """True from the first optimizer step on: this process trains."""
        return self._file is not None

    def open(self, rank: int, world_size: int) -> None:
        """Create the file of this process; a second process of a rank gets its own."""
        path = Path(SETTINGS["folder"]) / f"rank{rank}-{os.getpid()}.jsonl"
        try:
            self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        except OSError as error:
            self._file = -1
            self._give_up(error)
        about = {"rank": rank, "world_size": world_size, "begun": self._begun}
        self._lines.insert(0, json.dumps({"event": "start", **about}))
        atexit.register(self.end)
        util.Finalize(
            None, self.end, exitpriority=0
        )  # a forked child of multiprocessing has no atexit

    def flush(self) -> None:
        """Write all events with one system call, so that a kill leaves whole lines."""
        if self._file is None or not self._lines:
            return
        text = ("\n".join(self._lines) + "\n").encode()
        self._lines.clear()
        if self._is_broken:
            return
        try:
            if os.write(self._file, text) < len(text):
                os.write(self._file, b"\n")  # raises the error of the part that is missing
                self._is_broken = True
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        """Say by an empty file that the records could not be written, which a full disk takes."""
        self._is_broken = True
        with contextlib.suppress(OSError):
            (Path(SETTINGS["folder"]) / f"unwritten-{error.errno}-{os.getpid()}").touch()

    def end(self) -> None:
        """Write the last events, and a file which says that this process ends."""
        if self._file is not None:
            self.flush()
            with contextlib.suppress(OSError):  # the folder is gone
                (Path(SETTINGS["folder"]) / f"ended-{os.getpid()}").touch()

    def forget(self) -> None:
        """Start anew in a forked process, whose events are not those of its parent."""
        self._lines.clear()
        self._file = None
        self._begun = time.time()

    def add_error(self) -> None:
        """Note an error of the recorder itself, which must not stop the script."""
        self._num_errors += 1
        if self._num_errors <= 3:
            self.add("error", text=traceback.format_exc()[-2000:])


LOG = Log()
os.register_at_fork(after_in_child=LOG.forget)


def quietly(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with its errors noted instead of raised, and its time measured."""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **options: Any) -> Any:
        start = time.perf_counter()
        try:
            return function(*arguments, **options)
        except Exception:
            LOG.add_error()
            return None
        finally:
            LOG.seconds += time.perf_counter() - start

    return wrapper


def meet(rank: int, world_size: int) -> None:
    """Write the last events, and wait for every rank: an earlier exit could break a collective."""
    LOG.end()
    folder = Path(SETTINGS["folder"])
    with contextlib.suppress(OSError):
        (folder / f"done-{rank}").touch()
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        if len(list(folder.glob("done-*"))) >= world_size:
            break
        time.sleep(0.02)


Given = dict[str, Any]  # arguments by their names in the original; a builtin has none
WRAPPED: list[tuple[Any, str]] = []  # owner and name of each function that was replaced


def replace(owner: Any, name: str, call: Callable[..., Any]) -> None:
    """Replace a function by one that does more, under the same name and signature.

    The compiler of TorchScript, which reads a function's text, is led to the original by what
    `torch.jit.script_if_tracing` gives its functions; torch.compile follows it too.
    """
    original = getattr(owner, name)
    wrapper: Any = functools.wraps(original)(call)
    if inspect.isfunction(original):
        setattr(wrapper, "__script_if_tracing_wrapper", True)  # a class mangles it
        setattr(wrapper, "__original_fn", original)
    setattr(owner, name, wrapper)
    WRAPPED.append((owner, name))


def watch_builtins() -> None:
    """Let the compiler of TorchScript take a wrapped function for the operator that it was."""
    module: Any = torch.jit._builtins
    find = module._find_builtin

    def find_original(function: Any) -> Any:
        original = getattr(function, "__original_fn", None)
        return find(function) or (None if original is None else find(original))

    module._find_builtin = find_original


def watch(
    owner: Any,
    name: str,
    before: Callable[[Given], None] | None = None,
    after: Callable[[Given, Any], None] | None = None,
) -> None:
    """Call `before(named_arguments)` and `after(named_arguments, result)` around a function.

    `before` may replace values of `named_arguments`. Errors in both are noted instead of raised.
    """
    original = getattr(owner, name)
    signature = find_signature(original)
    begin = quietly(before) if before else None
    end = quietly(after) if after else None

    def call(*arguments: Any, **options: Any) -> Any:
        if torch.compiler.is_compiling():
            return original(*arguments, **options)
        bound = bind(signature, arguments, options)
        if bound is None and signature is not None:
            return original(*arguments, **options)  # raises the error of a wrong call
        named_arguments: Given = bound.arguments if bound else {"": arguments, **options}
        if begin:
            begin(named_arguments)
        if bound is not None:
            arguments, options = bound.args, bound.kwargs
        result = original(*arguments, **options)
        if end:
            end(named_arguments, result)
        return result

    replace(owner, name, call)


def find_signature(function: Any) -> inspect.Signature | None:
    """Return the signature of a function; None for a builtin without one."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None


def bind(
    signature: inspect.Signature | None, arguments: tuple[Any, ...], options: dict[str, Any]
) -> inspect.BoundArguments | None:
    """Return the arguments by name; None for a call that the function does not take."""
    try:
        return None if signature is None else signature.bind(*arguments, **options)
    except TypeError:
        return None
