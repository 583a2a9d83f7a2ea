"""Processes that end with the one that started them."""

from __future__ import annotations

import ctypes
import signal
from contextlib import suppress

PR_SET_PDEATHSIG = 1  # prctl(2)


def end_with_parent() -> None:
    """Have the kernel kill this process when its parent dies, also by SIGKILL."""
    with suppress(OSError, AttributeError):  # only Linux has it
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_as_by_interrupt() -> None:
    """Let SIGTERM and SIGHUP raise KeyboardInterrupt, so that the processes started here end."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, signal.default_int_handler)
