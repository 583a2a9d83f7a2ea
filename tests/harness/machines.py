"""Two simulated machines: network namespaces with a cable between them. Needs Linux, root, and
Debian's iproute2.

    with Machines(tmp_path) as machines:
        words = [sys.executable, "-m", "trainer", "task=cifar"]
        ranks = [machines.start(number, *words, RANK=str(number)) for number in (0, 1)]

Each machine has only a loopback and its own `eth0`; files, process ids and the host name are those
of the host.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")  # visible inside only, so the same in every test run
NOBODY = "02:00:00:00:00:99"
LIMIT_S = 20

_numbers = itertools.count()


def unavailable() -> str:
    """Return the reason why machines cannot be simulated here; "" if they can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "no ip: apt-get install iproute2"
    try:
        with Machines(Path()):
            return ""
    except RuntimeError as error:
        return f"no network namespaces: {error}"


class Machines:
    """Machines 0 and 1, for the duration of the block.

    Each process has `folder` as its working directory and writes stdout and stderr to one file
    there; a child that outlives the process would keep a pipe open.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.names = [f"lockstep-{os.getpid()}-{next(_numbers)}" for _ in ADDRESSES]
        self._started: list[subprocess.Popen] = []

    def __enter__(self) -> "Machines":
        try:
            for name in self.names:
                _ip("netns", "add", name)
            one, other = self.names  # created inside, so that no interface appears outside
            _ip(
                "link",
                "add",
                "eth0",
                "netns",
                one,
                "type",
                "veth",
                "peer",
                "name",
                "eth0",
                "netns",
                other,
            )
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
                for interface in ("lo", "eth0"):
                    _ip("-n", name, "link", "set", interface, "up")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for number, name in enumerate(self.names):
            with contextlib.suppress(RuntimeError):  # it may not have been created
                self.kill(number)
                _ip("netns", "del", name)
        for process in self._started:
            process.wait(LIMIT_S)

    def start(self, number: int, *words: str, **environment: str) -> subprocess.Popen:
        """Run a command on a machine; the returned process is the command's, not that of `ip`."""

        inside = ("ip", "netns", "exec", self.names[number], *words)
        given = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", **environment}
        with self._output(len(self._started)).open("w") as output:
            files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            self._started.append(subprocess.Popen(inside, cwd=self.folder, env=given, **files))
        return self._started[-1]

    def said(self, process: subprocess.Popen) -> str:
        """Return the output of the process and its children so far."""
        return self._output(self._started.index(process)).read_text(errors="replace")

    def pids(self, number: int) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.names[number]).split()]

    def kill(self, number: int) -> None:
        """Send SIGKILL to all processes of a machine, repeatedly until none is left.

        Its network stays up, so peers are notified.
        """
        end = time.monotonic() + LIMIT_S
        while pids := self.pids(number):
            assert time.monotonic() < end, f"processes {pids} do not die"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def partition(self) -> None:
        """Pull the cable: packets are lost without a notice.

        Setting a link down would notify its own side.
        """
        for name, peer in zip(self.names, reversed(ADDRESSES), strict=True):
            _ip(
                "-n",
                name,
                "neigh",
                "replace",
                peer,
                "lladdr",
                NOBODY,
                "dev",
                "eth0",
                "nud",
                "permanent",
            )

    def heal(self) -> None:
        for name, peer in zip(self.names, reversed(ADDRESSES), strict=True):
            _ip("-n", name, "neigh", "del", peer, "dev", "eth0")

    def _output(self, place: int) -> Path:
        return self.folder / f"output-{place}.txt"


def _ip(*words: str) -> str:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout
