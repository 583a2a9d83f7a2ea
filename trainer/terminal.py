"""Standard streams that survive a closed terminal, so that a background run continues."""

import io
import os
import select
import sys
from typing import Any

WAIT_S = 5.0  # for the slow reader of a full pipe


class _Lasting(io.FileIO):
    """Stream that drops output it cannot write: its reader has exited, or its disk is full."""

    def write(self, data: Any) -> int:
        try:
            written = super().write(data)
            if written is None:  # a non-blocking pipe that is full
                select.select([], [self], [], WAIT_S)
                written = super().write(data)
        except OSError:
            written = None
        return len(data) if written is None else written


def outlive_terminal() -> None:
    """Ignore write errors of standard output and error, and open closed streams on /dev/null.

    Otherwise the next files to be opened would get the descriptors of the closed streams.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            descriptor = os.open(os.devnull, os.O_RDWR)  # the lowest free descriptor is `number`
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
    """Return True for Python's own stream of a descriptor, False for a program's replacement."""
    try:
        return isinstance(stream, io.TextIOWrapper) and stream.fileno() == number
    except (OSError, ValueError):
        return False
