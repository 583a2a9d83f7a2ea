"""The terminal of a process: it may go away, and what goes on behind it does not end with it."""

import io
import os
import select
import sys
from typing import Any

WAIT_S = 5.0  # for a reader that is slower than a pipe is large


class _Lasting(io.FileIO):
    """A stream that drops what cannot be written: its reader is gone, or its disk is full."""

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
            if written is None:  # a pipe that does not block, and is full
                select.select([], [self], [], WAIT_S)
                written = super().write(data)
        except OSError:
            written = None
        return len(data) if written is None else written


def outlive_terminal() -> None:
    """Have no error of standard output end this process; closed ones become /dev/null.

    Left closed, their numbers would be those of the next files that are opened.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free number: this one
            os.set_inheritable(descriptor, True)
            mode = "r" if number == 0 else "w"
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
        stream = getattr(sys, name)
        if number and _is_on(stream, number):
            raw = io.BufferedWriter(_Lasting(number, "w", closefd=False))
            is_quick = stream.line_buffering or stream.write_through or number == 2
            text = io.TextIOWrapper(raw, stream.encoding, stream.errors, None, is_quick)
            setattr(sys, name, text)


def _is_on(stream: Any, number: int) -> bool:
    """Is it Python's own stream of a descriptor, and not what a program put in its place?"""
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == number
    except (OSError, ValueError):
        return False
