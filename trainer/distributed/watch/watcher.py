"""The watcher of one node: a process of its own that names the rank which makes no progress, and ends the group.

Run by its file, so that nothing but the standard library is loaded. It reads what the ranks write into shared memory
(watch.py), and the state that the kernel gives them. The watchers of the other nodes tell that of node 0, which speaks
for all; one that has lost it speaks for its own node.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import secrets
import select
import signal
import socket
import statistics
import struct
import sys
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

# The page: float64 fields, then a text of at most TEXT bytes.
STEP, PHASE, SINCE, BUSY, TOTAL, STEPS, FIELDS = range(7)
TEXT = 3000
PHASES = (
    *(
        "start-up",
        "building data and model",
        "the data loader",
        "forward and backward",
        "gradient all-reduce",
    ),
    *(
        "the update",
        "reading the losses",
        "evaluation",
        "saving a checkpoint",
        "the end of the run",
    ),
)
REDUCE, SAVE = 4, 8
PATIENCE = 5  # times the limit, before the first step and while saving
POLL_S = 0.25
STRAGGLES, OVER_STEPS = 3.0, 50
STOPPED = ("T", "t")  # of the kernel's states: by a signal, by a debugger
ASLEEP_S = 2.0  # between two looks: then this process was stopped, or the machine slept, and the ranks were with it


@dataclass(frozen=True)
class State:
    """One rank at one moment."""

    rank: int
    host: str
    pid: int
    step: int
    phase: int
    seconds: float
    total: float
    steps: int
    is_stopped: bool
    frozen: list[int]  # its child processes that are stopped

    @property
    def limit(self) -> int:
        return PATIENCE if not self.steps or self.phase == SAVE else 1


class Rank:
    """Its page and its stack, reached through the file descriptors that it holds open."""

    def __init__(self, facts: dict[str, Any], host: str):
        self.rank, self.pid, self.host = facts["rank"], facts["pid"], host
        self._launcher: int | None = facts["launcher"]
        self._stack = Path(f"/proc/{self.pid}/fd/{facts['stack']}")
        with open(f"/proc/{self.pid}/fd/{facts['page']}", "rb") as file:
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ)

    def state(self) -> State | None:
        """None once the process is gone."""
        kernel, parent = _kernel_state(self.pid)
        if kernel in ("", "Z", "X"):
            return None
        if self._launcher not in (
            None,
            parent,
        ):  # a SIGUSR1 kills torchrun, which then tells nobody
            os.kill(self.pid, signal.SIGTERM)
            self._launcher = None
        step, phase, since, _, total, steps = struct.unpack_from(f"{FIELDS}d", self._page)[:6]
        seconds = time.monotonic() - since
        children = _children(self.pid) if seconds > 1 else []
        frozen = [child for child in children if _kernel_state(child)[0] in STOPPED]
        place, counted = (self.rank, self.host, self.pid), (total, int(steps))
        return State(*place, int(step), int(phase), seconds, *counted, kernel in STOPPED, frozen)

    def directory(self) -> str:
        return self._page[FIELDS * 8 : FIELDS * 8 + TEXT].split(b"\0")[0].decode(errors="replace")

    def stack(self, dump: int, limit_s: float = 2.0) -> list[str]:
        """Its Python stack, innermost first, as faulthandler writes it; a stopped process is let go on for it."""
        with contextlib.suppress(OSError):
            size = self._stack.stat().st_size
            os.kill(self.pid, dump)
            os.kill(self.pid, signal.SIGCONT)
            end = time.monotonic() + limit_s
            while self._stack.stat().st_size == size and time.monotonic() < end:
                time.sleep(0.02)
            time.sleep(0.05)
            return _main_thread(self._stack.read_text(errors="replace")[size:])
        return []


class Link:
    """A watcher's line to that of node 0, one JSON object a line."""

    def __init__(self, address: Sequence[Any], token: str):
        self._token, self.is_over = token, False
        self._socket: socket.socket | None = None
        with contextlib.suppress(OSError):
            self._socket = socket.create_connection((address[0], address[1]), timeout=5)
            self._socket.settimeout(5)

    def tell(self, states: Sequence[State]) -> bool:
        """Whether node 0 still listens; `is_over` says that it has ended the group."""
        self.send({"states": [vars(state) for state in states]})
        with contextlib.suppress(OSError):
            while self._socket is not None and select.select([self._socket], [], [], 0)[0]:
                if not self._socket.recv(4096):
                    self._socket = None
                    break
                self.is_over = True  # the only thing that node 0 says
        return self._socket is not None

    def wait(self, limit_s: float = 10.0) -> None:
        """Until node 0 has spoken for all: it closes the line then."""
        with contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.settimeout(limit_s)
                while self._socket.recv(4096):
                    pass

    def send(self, message: dict[str, Any]) -> None:
        if self._socket is not None:
            try:
                self._socket.sendall(json.dumps({"token": self._token, **message}).encode() + b"\n")
            except OSError:
                self._socket = None


class Hub:
    """Node 0's end of the lines."""

    def __init__(self, server: socket.socket, token: str):
        self._server, self._token = server, token
        self._lines: dict[socket.socket, bytes] = {}
        self._states: dict[socket.socket, tuple[float, list[State]]] = {}
        self._stacks: dict[int, list[str]] = {}

    def states(self) -> list[State]:
        """The other nodes' ranks, as last told."""
        self._read()
        now = time.monotonic()
        return [
            replace(s, seconds=s.seconds + now - at)
            for at, states in self._states.values()
            for s in states
        ]

    def end(self, limit_s: float = 4.0) -> dict[int, list[str]]:
        """The stacks that the other watchers send, asked once: they end their ranks when this process ends."""
        for line in self._lines:
            with contextlib.suppress(OSError):
                line.sendall(b"end\n")
        end, wanted = (
            time.monotonic() + limit_s,
            sum(len(states) for _, states in self._states.values()),
        )
        while len(self._stacks) < wanted and time.monotonic() < end:
            self._read()
            time.sleep(0.02)
        return self._stacks

    def _read(self) -> None:
        for line in select.select([self._server, *self._lines], [], [], 0)[0]:
            if line is self._server:
                self._lines[self._server.accept()[0]] = b""
            else:
                data = b""
                with contextlib.suppress(OSError):
                    data = line.recv(65536)
                *whole, self._lines[line] = (self._lines[line] + data).split(b"\n")
                for text in whole:
                    self._take(line, text)
                if not data or len(self._lines[line]) > 2**20:  # gone: its launcher knows
                    line.close()
                    del self._lines[line]
                    self._states.pop(line, None)

    def _take(self, line: socket.socket, text: bytes) -> None:
        with contextlib.suppress(Exception):  # whatever a stranger sends
            message = json.loads(text)
            if not secrets.compare_digest(message.pop("token"), self._token):
                return
            if "states" in message:
                self._states[line] = (
                    time.monotonic(),
                    [State(**state) for state in message["states"]],
                )
            else:
                self._stacks |= {int(rank): frames for rank, frames in message["stacks"].items()}


def _kernel_state(pid: int) -> tuple[str, int]:
    """(R, S, D, T (stopped), t (traced), Z; empty where there is no such process; its parent's process id)."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        return state, int(parent)
    except OSError:
        return "", 0


def _main_thread(dump: str) -> list[str]:
    """The last thread's frames: the main thread stands last."""
    return [
        line.strip()
        for line in dump.strip().split("\n\n")[-1].splitlines()
        if line.startswith("  File ")
    ]


def _children(pid: int) -> list[int]:
    try:
        return [
            int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        ]
    except OSError:
        return []


class Watch:
    def __init__(self, settings: dict[str, Any]):
        self.timeout_s, self.dump = settings["timeout_s"], settings["dump"]
        self.ranks = [Rank(facts, settings["host"]) for facts in settings["ranks"]]
        self.seen: deque[list[State]] = deque(maxlen=600)
        self.told: set[int] = set()
        self.woke = self.looked = time.monotonic()
        server, token = settings["server"], settings["token"]
        self.hub = Hub(socket.socket(fileno=server), token) if server is not None else None
        self.link = (
            Link(settings["address"], token) if server is None and settings["address"] else None
        )

    def look(self) -> bool:
        """True when the watch is over."""
        now = time.monotonic()
        self.woke, self.looked = now if now - self.looked > ASLEEP_S else self.woke, now
        here = [state for rank in self.ranks if (state := rank.state())]
        if len(here) < len(self.ranks):
            return True  # a rank has died: its launcher knows
        if self.link is not None and self.link.tell(here):
            if self.link.is_over:
                self.link.send({"stacks": self._stacks()})
                self.link.wait()
                self._kill()
            return self.link.is_over
        states = sorted([*here, *(self.hub.states() if self.hub else [])], key=lambda s: s.rank)
        states = [replace(state, seconds=min(state.seconds, now - self.woke)) for state in states]
        if any(s.seconds > self.timeout_s * s.limit for s in states):
            self.end(states)
            return True
        self.warn(states)
        return False

    def end(self, states: Sequence[State]) -> None:
        stacks = self._stacks() | (self.hub.end() if self.hub else {})
        lines = report(states, stacks, self.timeout_s)
        print("\n".join(lines), file=sys.stderr, flush=True)
        if directory := self.ranks[0].directory():
            with contextlib.suppress(OSError):
                _write_exit(
                    Path(directory), lines[0].removeprefix("error: "), min(s.step for s in states)
                )
        self._kill()

    def _stacks(self) -> dict[int, list[str]]:
        return {rank.rank: rank.stack(self.dump) for rank in self.ranks}

    def _kill(self) -> None:
        for pid in [
            pid
            for rank in self.ranks
            for pid in (*_children(rank.pid), rank.pid)
            if pid != os.getpid()
        ]:
            with contextlib.suppress(OSError):
                os.kill(
                    pid, signal.SIGKILL
                )  # a stopped data worker would stay, and hold our output open

    def warn(self, states: list[State]) -> None:
        """Say once of each rank that its own part of a step takes 3 times the median's, over 50 steps."""
        self.seen.append(states)
        alike = [past for past in self.seen if len(past) == len(states)]
        before = next(
            (past for past in alike if states[0].steps - past[0].steps <= 2 * OVER_STEPS), states
        )
        while self.seen and self.seen[0] is not before:
            self.seen.popleft()
        pairs = list(zip(states, before, strict=True))
        if len(states) < 2 or min(now.steps - past.steps for now, past in pairs) < OVER_STEPS:
            return
        hosts = {s.rank: s.host for s in states}
        each = {
            now.rank: (now.total - past.total) / (now.steps - past.steps) for now, past in pairs
        }
        usual = statistics.median_low(each.values())
        for rank, seconds in each.items():
            if seconds > STRAGGLES * usual and rank not in self.told:
                self.told.add(rank)
                times = f"{seconds * 1e3:.1f} ms a step over the last {OVER_STEPS} steps, the median is {usual * 1e3:.1f}"
                print(
                    f"warning: rank {rank} on {hosts[rank]} is a straggler: {times}",
                    file=sys.stderr,
                    flush=True,
                )


def report(states: Sequence[State], stacks: dict[int, list[str]], timeout_s: float) -> list[str]:
    """One line that names who makes no progress and what the others wait in; then the stacks of those named."""
    waiting = [s for s in states if not s.is_stopped and _is_waiting(s, stacks.get(s.rank, []))]
    named = [s for s in states if s not in waiting and s.seconds > timeout_s / 2]
    parts = [_describe(s) for s in named] or ["every rank waits for another"]
    places: dict[str, list[int]] = {}
    for s in states:
        if s not in named:
            what = (
                PHASES[s.phase]
                if s.phase == REDUCE or s not in waiting
                else f"a collective in {PHASES[s.phase]}"
            )
            places.setdefault(f"{what} of step {s.step}", []).append(s.rank)
    parts += [f"{_ranks(ranks)} in {place}" for place, ranks in places.items()]
    lines = ["error: no progress: " + "; ".join(parts)]
    for s in named or states:
        frames = stacks.get(s.rank, [])
        lines.append(
            f"rank {s.rank}, innermost call first:"
            if frames
            else f"rank {s.rank}: its stack cannot be had"
        )
        lines += [f"  {frame}" for frame in frames[:12]]
    return lines


def _describe(state: State) -> str:
    who = f"rank {state.rank} (process {state.pid} on {state.host})"
    frozen = ", ".join(map(str, state.frozen))
    return (
        f"{who} has been in {PHASES[state.phase]} for {state.seconds:.0f} s, at step {state.step}"
        + (", stopped by a signal" if state.is_stopped else "")
        + (f"; its child process {frozen} is stopped" if frozen else "")
    )


def _is_waiting(state: State, stack: Sequence[str]) -> bool:
    is_in_ddp = any(
        "torch/nn/parallel/distributed.py" in frame for frame in stack[:1]
    )  # before its first forward
    return (
        state.phase == REDUCE
        or is_in_ddp
        or any("torch/distributed/" in frame for frame in stack[:3])
    )


def _ranks(ranks: Iterable[int]) -> str:
    ranks = list(ranks)
    return (
        f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} wait{'s' * (len(ranks) == 1)}"
    )


def _write_exit(directory: Path, reason: str, step: int) -> None:
    staged = directory / ".exit.json.new"
    staged.unlink(missing_ok=True)
    with open(staged, "x", encoding="utf-8") as file:
        json.dump({"code": 1, "reason": reason, "step": step}, file, indent=1)
    os.replace(staged, directory / "exit.json")


def main(settings: dict[str, Any]) -> None:
    try:
        watch = Watch(settings)
    except OSError:
        return  # a rank is gone already
    while os.getppid() == settings["parent"] and not watch.look():
        if select.select([0], [], [], min(POLL_S, watch.timeout_s / 10))[0]:
            return  # our rank is done


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the ranks
    with open(
        0, "rb", buffering=0
    ) as told:  # byte by byte: what follows the line stays where `select` sees it
        main(json.loads(told.readline()))
