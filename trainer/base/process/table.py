"""Processes and cores as the kernel reports them (Linux), and signals to processes."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

OMP_NUM_THREADS = "OMP_NUM_THREADS"
# The system call tgkill, which the C library of older Linux distributions does not offer.
TGKILL = {"x86_64": 234, "aarch64": 131}.get(os.uname().machine)

PF_EXITING = 4  # in the kernel's flags of a process


def is_ending(pid: int) -> bool:
    """Return True if it has exited or is exiting: peers may see closed files some ms before."""
    fields = read_stat(pid)
    return fields[0] in ("", "Z", "X") or bool(int(fields[6]) & PF_EXITING)


def kernel_state(pid: int) -> str:
    """Return the kernel's state: R, S, D, Z, T (stopped), t (traced); empty if it is gone."""
    return read_stat(pid)[0]


def seconds_of_work(pid: int) -> float:
    """Return the CPU time of a process in seconds."""
    return sum(map(int, read_stat(pid)[11:13])) / os.sysconf("SC_CLK_TCK")


def read_stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on: "" and zeros if it is gone."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return ["", *["0"] * 20]


def bytes_moved(pid: int) -> int:
    """Return the bytes that a process has read and written."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/io").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))
    return 0


def list_children(pid: int) -> list[int]:
    with suppress(OSError):
        return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]
    return []


def send(pid: int, signal_number: int) -> None:
    with suppress(OSError):
        os.kill(pid, signal_number)


def signal_main_thread(pid: int, signal_number: int) -> None:
    """Send a signal to the main thread.

    A stopped process gives a signal of its own to any of its threads when it continues. 2 of 100
    such processes crashed: that thread read the stack of the main thread, which ran meanwhile.
    """
    if TGKILL is None or ctypes.CDLL(None).syscall(TGKILL, pid, pid, int(signal_number)):
        send(pid, signal_number)


def environment_at_start(pid: int | str = "self") -> dict[str, str]:
    """Return the environment with which a process was started; empty if it cannot be read."""
    with suppress(OSError):
        text = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes())
        return dict(word.split("=", 1) for word in text.split("\0") if "=" in word)
    return {}


def usable_cores() -> int:
    """Return the number of cores that this process may use, limited by the container's quota."""
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    with suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores
