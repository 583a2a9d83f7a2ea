"""Other processes as the kernel sees them (Linux), signals to them, and exit.json for them."""

from __future__ import annotations

import ctypes
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
