"""The process that owns a run directory or a run in a bucket: by machine, number and start."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trainer.base.errors import shortened, visible
from trainer.base.process.table import kernel_state, read_stat

HIDDEN_PROCESS = "?"  # another user's process where /proc has the option hidepid
MOST_OF_A_HOST = 100  # characters of a host, as anybody may have written it


@dataclass(frozen=True)
class Owner:
    """A process, with a token that no other writer of the same thing has.

    `machine` names the boot and the namespace of process numbers; `began` is when the process
    began, in ticks since the boot. Both are "" if they are not known.
    """

    token: str
    host: str
    pid: Any
    machine: str
    began: str

    @classmethod
    def new(cls) -> Owner:
        """Return this process, with a new token."""
        pid = os.getpid()
        return cls(secrets.token_hex(8), socket.gethostname(), pid, machine_id(), began(pid))

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Owner:
        """Return the owner that a file names, in which anything may be written."""
        texts = {name: str(facts.get(name) or "") for name in ("token", "host", "machine", "began")}
        return cls(pid=facts.get("pid"), **texts)

    def facts(self) -> dict[str, Any]:
        """Return plain values, for JSON."""
        return asdict(self)

    @property
    def is_here(self) -> bool:
        """True if its process has a number on this machine, since it was booted."""
        return bool(self.machine) and self.machine == machine_id()

    @property
    def is_this_process(self) -> bool:
        return self.is_here and self.pid == os.getpid() and self.began == began(os.getpid())

    @property
    def is_running(self) -> bool:
        """True if it runs on this machine: neither one that has ended and was not waited for, as of
        a killed launcher, nor a later one with its number."""
        start = began(self.pid)
        return start == HIDDEN_PROCESS or (start != "" and self.began in ("", start))

    @property
    def is_stopped(self) -> bool:
        """True if it is on this machine, and stopped by a signal or a debugger."""
        is_number = isinstance(self.pid, int)
        return self.is_here and is_number and kernel_state(self.pid) in ("T", "t")

    def describe(self) -> str:
        """Return the process in words, such as `process 12 on node1`."""
        names = ["?" if each in (None, "") else str(each) for each in (self.pid, self.host)]
        pid, host = (visible(shortened(name, MOST_OF_A_HOST)) for name in names)
        return f"process {pid} on {host}"


@cache
def machine_id() -> str:
    """Return what names this machine, since it was booted, and its process numbers.

    Where that is not known, it is a name that no other process has.
    """
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/pid').readlink()}"
    return secrets.token_hex(8)


def began(pid: Any) -> str:
    """Return when a process began, in ticks since the boot; "" for one that has ended."""
    try:
        fields = read_stat(int(pid))
        if not fields[0]:
            os.kill(int(pid), 0)
    except PermissionError:
        return HIDDEN_PROCESS
    except (OSError, ValueError, TypeError, OverflowError):
        return ""
    return "" if fields[0] in ("", "Z", "X") else fields[19]
