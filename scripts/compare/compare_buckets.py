"""Kill runs that save to a bucket, at their requests to it, and resume them on an empty disk:
Lightning, Composer and Lockstep.

    python scripts/compare/compare_buckets.py [--lightning PYTHON] [--composer PYTHON] [--cases N]

Each PYTHON is that of a venv with lightning, s3fs and torchdata, or with mosaicml. The store is
moto's server behind a proxy. A run is killed (SIGKILL) at each of its requests in turn, before or
after the store has it; its next session on an empty disk is killed at a request, too; the one after
that ends. In every second case the proxy refuses, cuts, loses or drops one answer in eight. Prints
the kills, and the runs that went back behind a checkpoint which a store had ("lost"), could not go
on ("unreadable"), or ended with other weights than an undisturbed one ("differs").
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / each) for each in ("", "tests", "scripts")]
import torch  # noqa: E402
from faults.common import random_of  # noqa: E402
from faults.mirror import Killing, faults_of, points_of, served  # noqa: E402
from harness.s3 import Proxy  # noqa: E402

PEERS = REPOSITORY / "scripts/compare/peers"
TITLES = {"lightning": "Lightning", "composer": "Composer", "lockstep": "Lockstep"}
LIMIT_S = 60.0  # of a session
MOST_STARTS = 4  # of the last session, if it ends with an error
FIRST = 12  # requests of a resume, at one of which the second session is killed


class Worker:
    """A contestant with its packages loaded, which forks a process for each session."""

    def __init__(self, name: str, python: str):
        environment = {**os.environ, "PYTHONPATH": str(PEERS.parent), "OMP_NUM_THREADS": "1"}
        environment.pop("AWS_MAX_ATTEMPTS", None)  # the client's own default
        if name == "composer":
            environment["S3_ENDPOINT_URL"] = environment["AWS_ENDPOINT_URL"]
        self._process = subprocess.Popen(
            [python, str(PEERS / f"bucket_{name}.py")],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, killing: Killing, session: dict[str, str]) -> int:
        """Return the exit code of a session."""
        assert self._process.stdin and self._process.stdout
        with killing.disturbed():
            self._process.stdin.write(json.dumps(session) + "\n")
            self._process.stdin.flush()
            pid = json.loads(self._process.stdout.readline())
            killing.aim(pid)
            limit = threading.Timer(LIMIT_S, os.killpg, (pid, signal.SIGKILL))
            limit.start()
            code = json.loads(self._process.stdout.readline())
            limit.cancel()
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)  # its own processes, as of a lost node
        return code

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


class Case:
    """A run in a prefix of its own, and what its sessions note."""

    def __init__(self, worker: Worker, proxy: Proxy, name: str, place: Path):
        self.worker = worker
        self.proxy = proxy
        self.address = f"s3://data/{name}"
        self.place = place
        self.sessions = 0

    def run(self, killing: Killing) -> int:
        """Return the code of a session on an empty disk."""
        self.sessions += 1
        disk = self.place / f"disk-{self.sessions}"
        words = {"address": self.address, "disk": str(disk), "notes": str(self.place)}
        return self.worker.run(killing, words)

    def notes(self) -> list[tuple[str, int]]:
        file = self.place / "steps.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def is_lost(self) -> bool:
        """Return True if a session began before a step that was saved."""
        saved = 0
        for what, step in self.notes():
            if what == "began" and step < saved:
                return True
            saved = max(saved, step)
        return False

    def weights(self) -> dict[str, torch.Tensor]:
        return torch.load(self.place / "weights.pt", weights_only=True)

    def error(self) -> str:
        lines = (self.place / "output").read_text().splitlines()
        return next((line for line in reversed(lines) if "Error" in line), "")[:300]


def measure(name: str, python: str, cases: int, seed: int, place: Path) -> Counter[str]:
    found: Counter[str] = Counter()
    chance = random_of(seed)
    quiet = lambda: ""  # noqa: E731
    with served() as proxy:
        worker = Worker(name, python)
        whole = _case(worker, proxy, "whole", place)
        counted = Killing(proxy, 0, False, quiet)
        if code := whole.run(counted):
            raise SystemExit(f"{name} ended with code {code}: {whole.error()}")
        expected = whole.weights()
        count = len(counted.requests)
        print(f"{TITLES[name]}: {count} requests of an undisturbed run", flush=True)
        for number, (at, is_lost) in enumerate(points_of(count, cases, chance)):
            case = _case(worker, proxy, f"case-{number}", place)
            draw = faults_of(chance) if number % 2 else quiet
            result = _kill(case, at, is_lost, draw, chance, found)
            if result == "good" and not _same(case.weights(), expected):
                result = "differs"
            found[result] += 1
            if result != "good":
                told = f"request {at} of {count}: {case.notes()} {case.error()}"
                print(f"{TITLES[name]}, case {number}: {result}: {told}", flush=True)
        worker.close()
    return found


def _case(worker: Worker, proxy: Proxy, name: str, place: Path) -> Case:
    own = place / name
    own.mkdir(parents=True)
    return Case(worker, proxy, name, own)


def _kill(case: Case, at: int, is_lost: bool, draw, chance: Random, found: Counter[str]) -> str:
    """Kill two sessions, and let the next one end in a store without faults."""
    second = (chance.randrange(1, FIRST + 1), chance.random() < 0.5)
    for point in ((at, is_lost), second):
        killing = Killing(case.proxy, *point, draw)
        code = case.run(killing)
        found["kills"] += killing.is_done
        found["failed"] += code != 0 and not killing.is_done
    for _ in range(MOST_STARTS):
        if case.run(Killing(case.proxy, 0, False, lambda: "")) == 0:
            return "lost" if case.is_lost() else "good"
    return "unreadable"


def _same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, other[name]) for name, value in one.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lightning", metavar="PYTHON", help="of a venv with lightning and s3fs")
    parser.add_argument("--composer", metavar="PYTHON", help="of a venv with mosaicml")
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    pythons = {"lightning": given.lightning, "composer": given.composer, "lockstep": sys.executable}
    rows = []
    for name, python in pythons.items():
        if python is None:
            continue
        with tempfile.TemporaryDirectory(prefix="lockstep-buckets-") as folder:
            begun = time.monotonic()
            found = measure(name, python, given.cases, given.seed, Path(folder))
        told = [found[key] for key in ("kills", "lost", "unreadable", "differs", "failed")]
        rows.append("|".join(["", TITLES[name], str(given.cases), *map(str, told), ""]))
        print(rows[-1], f"{time.monotonic() - begun:.0f} s", flush=True)
    print("\n|of|runs|kills|lost|unreadable|differs|sessions that the store ended|")
    print("|-|-|-|-|-|-|-|")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
