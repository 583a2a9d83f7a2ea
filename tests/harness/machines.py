"""Two machines on one: network namespaces with a cable between them. Linux, root, and Debian's
iproute2.

    with Machines(tmp_path) as machines:
        words = [sys.executable, "-m", "trainer", "task=cifar"]
        ranks = [machines.start(number, *words, RANK=str(number)) for number in (0, 1)]

Each has a loopback and an `eth0` of its own and nothing else to send by; files, process ids and the
host's name are those of the host.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")  # known inside only, so the same in every test run
NOBODY = "02:00:00:00:00:99"
LIMIT_S = 20

_numbers = itertools.count()


def unavailable() -> str:
    """Why there can be no machines here; empty where there can."""
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
    """Number 0 and 1, while the block runs.

    What is started has `folder` as its working directory and writes stdout and stderr to one file
    there: a pipe would be held open by whatever outlives the process.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self.names = [f"lockstep-{os.getpid()}-{next(_numbers)}" for _ in ADDRESSES]
        self._started: list[subprocess.Popen] = []

    def __enter__(self) -> "Machines":
        try:
            for name in self.names:
                _ip("netns", "add", name)
            one, other = self.names  # made inside, so that no interface appears outside
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
            with contextlib.suppress(RuntimeError):  # one that was never made
                self.kill(number)
                _ip("netns", "del", name)
        for process in self._started:
            process.wait(LIMIT_S)

    def start(self, number: int, *words: str, **environment: str) -> subprocess.Popen:
        """Run a command on a machine; the process is the command's own, `ip` is gone by then."""
        inside = ("ip", "netns", "exec", self.names[number], *words)
        given = {**os.environ, "GLOO_SOCKET_IFNAME": "eth0", **environment}
        with self._output(len(self._started)).open("w") as output:
            files = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": output}
            self._started.append(subprocess.Popen(inside, cwd=self.folder, env=given, **files))
        return self._started[-1]

    def said(self, process: subprocess.Popen) -> str:
        """All that it, and what it started, has written so far."""
        return self._output(self._started.index(process)).read_text(errors="replace")

    def pids(self, number: int) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.names[number]).split()]

    def kill(self, number: int) -> None:
        """SIGKILL for all that runs on a machine, again until nothing does.

        Its network stays, and says so to peers.
        """
        end = time.monotonic() + LIMIT_S
        while pids := self.pids(number):
            assert time.monotonic() < end, f"processes {pids} do not die"
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)

    def partition(self) -> None:
        """Pull the cable: what is sent is lost and nobody is told.

        A link that is set down would tell its own side.
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
