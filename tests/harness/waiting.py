"""Wait for a condition with a limit, and compute limits that work on a slow or busy machine."""

import contextlib
import functools
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

QUIET_S = 0.7  # import time of torch on the machine for which the limits of the tests were set


def wait_for(condition: Callable[[], Any], limit_s: float = 60.0, every_s: float = 0.01) -> Any:
    """Return the value of `condition` once it is true; raise AssertionError after `limit_s`."""
    end = time.monotonic() + limit_s
    while not (found := condition()):
        assert time.monotonic() < end, f"not within {limit_s} s"
        time.sleep(every_s)
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for_port(port: int) -> None:
    """Wait until a server of this machine accepts connections."""

    def accepts() -> bool:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return True
        return False

    wait_for(accepts)


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    """Interrupt the block after so many seconds."""

    def late(number, frame):
        raise AssertionError(f"took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def seconds_of_importing_torch() -> float:
    """Measure the import of torch in a new process, now."""
    began = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.monotonic() - began


@functools.cache
def slowness() -> float:
    """Return how much slower this machine is than an idle one, at least 1; measured once."""
    return max(1.0, seconds_of_importing_torch() / QUIET_S)


class Beside:
    """A time limit from the time that the same machine takes for similar work at the same time.

    beside = Beside(lambda: command(...))   # the same without the wait
    assert seconds < limit_s + beside.allowance_s
    """

    def __init__(self, body: Callable[[], Any], times: int = 1):
        began = time.monotonic()
        for _ in range(times):
            body()
        self.seconds = (time.monotonic() - began) / times

    @property
    def allowance_s(self) -> float:
        """Five times the measured time, and half a second for the scheduler."""
        return 0.5 + 5 * self.seconds
