"""Two machines on one: network namespaces with a cable between them. Linux, root, and Debian's iproute2.

    with Machines(tmp_path) as machines:
        ranks = [machines.start(n, sys.executable, "-m", "trainer", "task=cifar", RANK=str(n)) for n in (0, 1)]

They share files, processes and the host's name, but no network: each has an `eth0` and a loopback of its own.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")  # seen inside only, so the same in every test run
LIMIT_S = 20

_numbers = itertools.count()


def unavailable() -> str:
    """Why there can be no machines here; empty where there can."""
    if not hasattr(os, "geteuid") or os.geteuid():
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "no ip: apt-get install iproute2"
    name = f"lockstep-{os.getpid()}-probe"
    try:
        _ip("netns", "add", name)
        _ip("-n", name, "link", "add", "probe0", "type", "veth", "peer", "name", "probe1")
    except RuntimeError as error:
        return f"network namespaces are not allowed: {error}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=LIMIT_S)
    return ""


class Machines:
    """While the block runs. What is started writes stdout and stderr to one file in `folder`, its working directory:
    a pipe would be held open by whatever outlives the process."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.names = [f"lockstep-{os.getpid()}-{next(_numbers)}" for _ in ADDRESSES]
        self._started: list[subprocess.Popen] = []

    def __enter__(self) -> "Machines":
        try:
            for name in self.names:
                _ip("netns", "add", name)
            one, other = self.names  # the cable is made inside, so that nothing appears outside
            _ip("link", "add", "eth0", "netns", one, "type", "veth", "peer", "name", "eth0", "netns", other)
            for name, address in zip(self.names, ADDRESSES, strict=True):
                _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
                _ip("-n", name, "link", "set", "lo", "up")
            self.heal()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in self.names:
            self.kill(self.names.index(name))
            subprocess.run(["ip", "netns", "del", name], capture_output=True, timeout=LIMIT_S)
        for process in self._started:
            process.wait(LIMIT_S)

    def start(self, number: int, *words: str, **environment: str) -> subprocess.Popen:
        """Run a command on machine 0 or 1."""
        with self._output(len(self._started)).open("w") as output:
            own = {"cwd": self.folder, "env": {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", **environment}}
            inside = ["ip", "netns", "exec", self.names[number], *words]  # becomes the command: the same process
            files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            self._started.append(subprocess.Popen(inside, **files, **own))
        return self._started[-1]

    def said(self, process: subprocess.Popen) -> str:
        """All that it, and what it started, has written so far."""
        return self._output(self._started.index(process)).read_text(errors="replace")

    def pids(self, number: int) -> list[int]:
        """What runs on machine 0 or 1."""
        found = subprocess.run(["ip", "netns", "pids", self.names[number]], capture_output=True, text=True)
        return [int(pid) for pid in found.stdout.split()]

    def kill(self, number: int) -> None:
        """SIGKILL for all that runs on a machine, until nothing does: the machine is lost, its end of the cable not."""
        end = time.monotonic() + LIMIT_S
        while pids := self.pids(number):
            assert time.monotonic() < end, f"processes {pids} do not die"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def partition(self) -> None:
        """From now on what is sent is lost, and nobody is told: the frames go to an address that no machine has."""
        for name, other in zip(self.names, reversed(ADDRESSES), strict=True):
            _ip("-n", name, "neighbor", "replace", other, "lladdr", "02:00:00:00:00:99", "dev", "eth0", "nud", "permanent")

    def heal(self) -> None:
        for name in self.names:
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", name, "neighbor", "flush", "dev", "eth0", "nud", "permanent")

    def _output(self, place: int) -> Path:
        return self.folder / f"output-{place}.txt"


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=LIMIT_S)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
