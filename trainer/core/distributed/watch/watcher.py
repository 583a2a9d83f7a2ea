"""The watcher of one node: a process that reports a hung rank of its node and kills all of them.

It loads no more than the standard library. It reads the heartbeats that the ranks write to shared
memory (heartbeat.py) and the kernel's state of each process. Watchers of different nodes do not
communicate: each judges and kills the ranks of its own node.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer.base.process.table import (
    bytes_moved,
    is_ending,
    kernel_state,
    list_children,
    read_stat,
    seconds_of_work,
    send,
    signal_main_thread,
)
from trainer.core.distributed.watch import phases
from trainer.core.distributed.watch.exit_file import ExitFile
from trainer.core.distributed.watch.phases import (
    HOST,
    MESH_GROUPS,
    PHASES,
    Phase,
    State,
    Stragglers,
    name_ranks,
    ranks_by_value,
    say,
)

# The signal that dumps a stack (Linux only): SIGUSR1 asks to stop, SIGUSR2 is left to the task.
DUMP = getattr(signal, "SIGRTMIN", 0) + 7
# Signals that torchrun, SLURM, systemd or a terminal sends to all processes of a job.
OF_A_JOB = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
# The page: float64 fields, then a path of at most MAX_PATH bytes, then the rank's place. Behind it
# is the rank's mailbox, up to MMAP_BYTES, and then its stacks.
MMAP_BYTES = mmap.PAGESIZE + phases.MAX_ANSWER
STEP, PHASE, SINCE, BUSY, TOTAL, STEPS, GROUP, FIELDS = range(8)
MAX_PATH = 3000
ALL_WAIT = "every rank waits for another"
ALL_WAIT_HERE = "every rank of this node waits for a rank of another node or of this one"

# A rank that loses another one; the watcher that ends or misses the other knows more.
LOST = "another rank has exited or does not answer"
WHY_IT_ENDED = "it was killed (by a launcher, a second signal, the kernel) or called os._exit"

OTHER_NODES_FIRST = 1.5  # times the limit, if all ranks of this node wait
WATCH_POLL_S = 0.25
ASLEEP_S = 2.0  # a longer gap between two checks: the machine, and so the ranks, were suspended
STOPPED_STATES = ("T", "t")  # the kernel's states: stopped by a signal, by a debugger
# A rank that builds data and model is working, not hung, above either of these.
LEAST_LOAD = 0.05  # of a core
LEAST_BYTES_MOVED = 2**16  # read or written
LOAD_S = 0.5  # the shortest interval over which they are measured
ENDING_S = 0.5  # between a process's files being closed and its exit
BEREFT_S = 5.0  # a rank still waits for its device that long after another one has ended


class Rank:
    """A rank's heartbeat and stack dumps, read through the file that the rank holds open."""

    def __init__(self, facts: Mapping[str, Any], is_inherited: bool):
        """`is_inherited`: this process has the file too, so the rank may have exited already."""
        self.rank: int = facts["rank"]
        self.pid: int = facts["pid"]
        self._launcher: int | None = facts["launcher"]
        owner = "self" if is_inherited else self.pid
        self._memory = Path(f"/proc/{owner}/fd/{facts['memory']}")
        self._work = (time.monotonic(), 0.0, 0)
        self._worked = 0.0
        with open(self._memory, "rb") as file:
            self._page = mmap.mmap(file.fileno(), MMAP_BYTES, prot=mmap.PROT_READ)
        pipe = f"/proc/{self.pid}/fd/{facts['pipe']}"
        self.mailbox = phases.Mailbox(memoryview(self._page)[mmap.PAGESIZE :], pipe)

    def fields(self) -> Sequence[float]:
        """Return the last values that the rank wrote, even after it exited."""
        return memoryview(self._page)[: FIELDS * 8].cast("d").tolist()

    def read(self, woke: float) -> State | None:
        """Return the rank's state, its seconds counted since the node woke; None if it exited."""
        if is_ending(self.pid):
            return None
        fields = self.fields()
        worked = self._last_work() if fields[PHASE] == Phase.BUILD else 0.0
        seconds = time.monotonic() - max(fields[SINCE], woke, worked)
        below = list_children(self.pid) if seconds > 1 else []
        return State(
            rank=self.rank,
            place=self.text(FIELDS * 8 + MAX_PATH),
            pid=self.pid,
            step=int(fields[STEP]),
            phase=int(fields[PHASE]),
            seconds=seconds,
            total=fields[TOTAL],
            steps=int(fields[STEPS]),
            group=MESH_GROUPS[int(fields[GROUP])],
            is_stopped=kernel_state(self.pid) in STOPPED_STATES,
            stopped_children=[pid for pid in below if kernel_state(pid) in STOPPED_STATES],
        )

    def _last_work(self) -> float:
        """Return when it last used the CPU or files: preprocessing may take long."""
        clock = time.monotonic()
        then, spent, moved = self._work
        pids = (self.pid, *list_children(self.pid))
        work = (clock, sum(map(seconds_of_work, pids)), sum(map(bytes_moved, pids)))
        if work[1] - spent > LEAST_LOAD * (clock - then) or work[2] - moved > LEAST_BYTES_MOVED:
            self._worked = clock
        if clock - then > LOAD_S:
            self._work = work
        return self._worked

    def text(self, first: int) -> str:
        """Return the text that the rank wrote at this place of the page; it may be empty."""
        return self._page[first : mmap.PAGESIZE].split(b"\0")[0].decode(errors="replace")

    def stack(self, limit_s: float = 2.0) -> list[str]:
        """Return the main thread's frames, innermost first, continuing a stopped process."""
        with suppress(OSError):
            size = self._memory.stat().st_size
            signal_main_thread(self.pid, DUMP)
            os.kill(self.pid, signal.SIGCONT)
            end = time.monotonic() + limit_s
            while self._memory.stat().st_size == size and time.monotonic() < end:
                time.sleep(0.02)
            time.sleep(0.05)
            dump = self._memory.read_bytes()[size:].decode(errors="replace")
            return [line.strip() for line in dump.splitlines() if line.startswith("  File ")]
        return []

    def stop_if_orphan(self) -> None:
        """Ask it once to stop if its torchrun exited: SIGUSR1 kills that before it can ask."""
        if self._launcher not in (None, int(read_stat(self.pid)[1])):
            self._launcher = None
            send(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and its children: a stopped data worker would keep its output open."""
        for pid in (*list_children(self.pid), self.pid):
            if pid != os.getpid():
                send(pid, signal.SIGKILL)


class Watcher:
    """Checker of this node's ranks, called several times within the limit."""

    def __init__(self, settings: Mapping[str, Any]):
        self._timeout_s: float = settings["timeout_s"]
        self._is_only_node: bool = settings["is_only_node"]
        self._ranks = [Rank(facts, index == 0) for index, facts in enumerate(settings["ranks"])]
        self._stragglers = Stragglers()
        self._looked = time.monotonic()
        self._woke = self._looked
        self._next_report = 0.0
        self._exit = ExitFile(lambda: self._ranks[0].text(FIELDS * 8))

    def look(self) -> bool:
        """Check once. Return True at the end: a rank has exited, or all ranks were killed."""
        clock = time.monotonic()
        if clock - self._looked > ASLEEP_S:
            self._woke = clock
        self._looked = clock
        self._exit.find_writer()
        states = [state for rank in self._ranks if (state := rank.read(self._woke))]
        if len(states) < len(self._ranks):
            self.tell_ends()
            return True
        for rank in self._ranks:
            rank.stop_if_orphan()
        states = [state for state in states if state.phase != Phase.LEFT]
        overdue = max((s.seconds / s.patience for s in states), default=0.0) / self._timeout_s
        if overdue > 1 and clock > self._next_report:
            return self._judge(states, overdue)
        if len(states) == len(self._ranks):
            self._stragglers.report(states)
        return False

    def tell_ends(self) -> None:
        """Report each rank that exited without an error message; its exit code may even be 0."""
        reasons = {}
        for rank in self._ranks:
            fields = rank.fields()
            phase = int(fields[PHASE])
            if phase != Phase.LEFT and rank.read(self._woke) is None:
                step = int(fields[STEP])
                where = f"in {PHASES[phase]}, at step {step}"
                who = f"rank {rank.rank} (process {rank.pid} on {HOST})"
                line = f"{who} ended without an error message {where}: {WHY_IT_ENDED}"
                say(f"error: {line}")
                reasons[line] = step
        if reasons:
            self._exit.write("; ".join(reasons), min(reasons.values()), LOST)

    def end_bereft(self) -> None:
        """Kill ranks that wait for their device, in a collective that a rank has left by ending.

        NCCL does not notice its end, and the host's wait lets no signal through: torchrun would
        kill them 30 s after it asked them to stop.
        """
        waiting = self._list_bereft()
        end = time.monotonic() + BEREFT_S
        while waiting and time.monotonic() < end:
            time.sleep(WATCH_POLL_S)
            still_waiting = self._list_bereft()
            waiting = {
                rank: since for rank, since in waiting.items() if still_waiting.get(rank) == since
            }
        for rank in waiting:
            rank.kill()

    def _list_bereft(self) -> dict[Rank, float]:
        """Return the ranks that wait for their device, and since when."""
        alive = {r: r.fields() for r in self._ranks if r.read(self._woke) is not None}
        waiting = {r: fields[SINCE] for r, fields in alive.items() if fields[PHASE] == Phase.DEVICE}
        return waiting if len(alive) < len(self._ranks) else {}

    def _judge(self, states: Sequence[State], overdue: float) -> bool:
        """Report a hang and kill the ranks; later if the hung rank may be on another node."""
        able = {state.rank for state in states if not state.is_stopped}
        answers = phases.ask({r.rank: r.mailbox for r in self._ranks if r.rank in able})
        self._looked = time.monotonic()  # waiting for answers is no suspension
        stacks = self._read_stacks(states)
        if self._has_moved(states):
            return False  # a rank goes on, or ends with an error of its own
        waiting = [s for s in states if s.is_waiting(stacks[s.rank])]
        hung = [s for s in states if s not in waiting and s.seconds > self._timeout_s / 2]
        if pause := self._find_pause(states, waiting, hung, overdue):
            self._next_report = time.monotonic() + self._timeout_s * pause
            return False
        if not hung and self._is_passing(states, stacks):
            return False
        parts = [s.describe() for s in hung] or [ALL_WAIT if self._is_only_node else ALL_WAIT_HERE]
        parts += _describe_waiting([s for s in states if s not in hung], waiting)
        calls = [*phases.describe(answers, [rank.rank for rank in self._ranks])]
        self._report(f"hang detected: {'; '.join(parts)}", calls, states, hung, stacks)
        for rank in self._ranks:
            rank.kill()
        return True

    def _has_moved(self, states: Sequence[State]) -> bool:
        """Return True if a rank has entered another phase, or ended, since it was read."""
        if any(s.is_stopped for s in states):  # reading its stack has continued it
            return False
        before = {s.rank: s.seconds for s in states}
        later = [rank.read(self._woke) for rank in self._ranks if rank.rank in before]
        return any(s is None or s.seconds < before[s.rank] for s in later)

    def _find_pause(
        self,
        states: Sequence[State],
        waiting: Sequence[State],
        hung: Sequence[State],
        overdue: float,
    ) -> float:
        """Return for how many limits to wait on: other ranks, or another node, may be at work."""
        idle = (*waiting, *hung)
        if any(s.phase == Phase.BUILD and s not in idle for s in states):
            return 1
        may_be_elsewhere = not self._is_only_node and overdue < OTHER_NODES_FIRST
        return OTHER_NODES_FIRST - 1 if may_be_elsewhere and not hung else 0

    def _is_passing(self, states: Sequence[State], stacks: Mapping[int, list[str]]) -> bool:
        """Return True if ranks pass from one collective to the next.

        They are read one after another, and a collective may end in between: the first rank is
        then seen in it, the last one in the next collective.
        """
        time.sleep(WATCH_POLL_S)
        return self._read_stacks(states) != stacks

    def _report(
        self,
        line: str,
        calls: Sequence[str],
        states: Sequence[State],
        hung: Sequence[State],
        stacks: Mapping[int, list[str]],
    ) -> None:
        """Print a hang with the last collectives and the stacks of ranks, and write exit.json."""
        say("\n".join([f"error: {line}", *calls]))
        for s in hung or states:
            frames = stacks[s.rank][:12]
            title = ", innermost call first:" if frames else ": its stack could not be read"
            say("\n  ".join([f"rank {s.rank}{title}", *frames]))
        self._exit.write("; ".join([line, *calls]), min(s.step for s in states))

    def _read_stacks(self, states: Iterable[State]) -> dict[int, list[str]]:
        numbers = {state.rank for state in states}
        return {rank.rank: rank.stack() for rank in self._ranks if rank.rank in numbers}


def _describe_waiting(states: Sequence[State], waiting: Sequence[State]) -> Iterator[str]:
    """Describe the phases, or the collectives in them, in which ranks are blocked."""
    phase_texts = {}
    for s in states:
        other = "a collective in " if s.phase != Phase.REDUCE else ""
        group = f"the {s.group} group in " if s.group else other
        phase_texts[s.rank] = f"{group * (s in waiting)}{PHASES[s.phase]} of step {s.step}"
    for phase_text, ranks in ranks_by_value(phase_texts).items():
        yield f"{name_ranks(ranks)} wait{'s' * (len(ranks) == 1)} in {phase_text}"


def main() -> None:
    """Watch until a rank exits, or the rank that started this process writes a second line."""
    for signal_number in OF_A_JOB:
        signal.signal(signal_number, signal.SIG_IGN)  # they are meant for the ranks
    with open(0, "rb", buffering=0) as lines:  # unbuffered, so that `select` notices a second line
        settings = json.loads(lines.readline())
        try:
            watcher = Watcher(settings)
        except OSError:
            return  # a rank has exited already
        while not watcher.look():
            if select.select([lines], [], [], min(WATCH_POLL_S, settings["timeout_s"] / 10))[0]:
                if not lines.read(1):
                    time.sleep(ENDING_S)  # the rank that started this process is exiting
                watcher.tell_ends()
                break
        watcher.end_bereft()
