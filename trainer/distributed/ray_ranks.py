"""Ranks on a Ray cluster, for `launch=ray`: Ray places them, this process restarts them.

Uses Ray's actors and placement groups, and not Ray Train: its workers run a function in a thread,
where no signal can be handled, and it ends them before it resizes, so steps since the last
checkpoint are lost. Here each rank is a process that an actor starts, under torchrun's variables.
"""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from trainer.config.schema import LaunchSettings
from trainer.distributed import launchers
from trainer.distributed.launchers import MARK, MASTER, RANKS
from trainer.distributed.ray_cluster import POLL_S, Cluster, say
from trainer.distributed.signals import SIGNALS, check_start, interrupt
from trainer.process.child import end_with_parent, signals_passed_on

PASSED_ON = ("PYTHONPATH", launchers.SCRIPT)  # Ray's runtime environments have the others
LOST = -signal.SIGKILL  # as the exit code of a rank whose node or actor is gone
STOPPED = 75
SIGNAL_S = 0.2  # `ray job stop` kills this process 3 s after its signal by default
OTHERS_S = 30.0  # after the first failure, for the ranks that wait for the lost one
GROWS_AFTER_S = 60.0  # a start takes seconds: a cluster that changes all the time would only start


class Place:
    """An actor: a place for one rank on some node. Starts the rank as a child process."""

    def __init__(self) -> None:
        self._output: queue.Queue[tuple[bool, bytes]] = queue.Queue()
        self._process: subprocess.Popen[bytes] | None = None
        self._store: Any = None
        self._code: int | None = None

    def describe(self) -> tuple[str, str]:
        """Return this node's address and Ray's id of it."""
        import ray

        return ray.util.get_node_ip_address(), ray.get_runtime_context().get_node_id()

    def serve(self) -> int:
        """Serve the store in which the ranks meet, for the one of rank 0. Return its port."""
        dist = import_module("torch.distributed")  # 1.5 s and 200 MB, for one actor
        # ranks of other nodes connect
        everywhere = "0.0.0.0"  # noqa: S104
        self._store = dist.TCPStore(everywhere, 0, is_master=True, wait_for_workers=False)
        return int(self._store.port)

    def start(self, words: Sequence[str], variables: Mapping[str, str], folder: str) -> None:
        """Start `python <words>` in a folder of that name, if this node has it."""
        threading.Thread(target=self._run, args=(words, variables, folder), daemon=True).start()

    def _run(self, words: Sequence[str], variables: Mapping[str, str], folder: str) -> None:
        # the kernel ends the child with the thread that started it: this one waits for its end
        own = {key: value for key, value in os.environ.items() if key not in (*RANKS, *MASTER)}
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, *words],
            cwd=folder if Path(folder).is_dir() else None,
            env={**own, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=end_with_parent,
        )
        readers = [
            threading.Thread(target=self._copy, args=(stream, is_error), daemon=True)
            for is_error, stream in enumerate((self._process.stdout, self._process.stderr))
        ]
        for reader in readers:
            reader.start()
        code = self._process.wait()
        for reader in readers:
            reader.join(POLL_S)  # a process that the rank left may hold its output
        self._code = code

    def _copy(self, stream: IO[bytes], is_error: bool) -> None:
        log = sys.stderr if is_error else sys.stdout  # Ray's files of this actor
        for line in stream:
            self._output.put((bool(is_error), line))
            log.write(line.decode(errors="replace"))

    def read(self) -> tuple[list[tuple[bool, bytes]], int | None]:
        """Return lines of output, and the exit code, after at most POLL_S."""
        code = self._code  # before the lines: the last ones are there when it is
        lines = []
        with suppress(queue.Empty):
            lines.append(self._output.get(timeout=0 if code is not None else POLL_S))
            while True:
                lines.append(self._output.get_nowait())
        return lines, code

    def send(self, number: int) -> None:
        """Send a signal to the rank."""
        if self._process is not None and self._code is None:
            self._process.send_signal(number)


class Attempt:
    """The ranks from one start to their end."""

    def __init__(
        self, cluster: Cluster, words: Sequence[str], variables: Mapping[str, str]
    ) -> None:
        self._cluster, self._ray = cluster, cluster.ray
        self._words, self._variables = words, variables
        self.codes: dict[int, int] = {}
        self.moves = ""  # why the ranks were asked to save and end: to go on elsewhere

    def run(self, asked: list[int]) -> None:
        """Place and start the ranks, show what they write, and wait for their end."""
        group, places = self._cluster.place(Place, asked)
        try:
            self._begin(places)
            self._watch(asked)
        except self._ray.exceptions.RayError:  # a node was lost before all ranks had begun
            self.codes.setdefault(0, LOST)
        finally:
            for place in places:
                self._ray.kill(place)
            self._ray.util.remove_placement_group(group)

    def _begin(self, places: list[Any]) -> None:
        told = self._ray.get([place.describe.remote() for place in places])
        # ranks of a node have adjacent numbers, as under torchrun
        order = sorted(range(len(places)), key=lambda each: told[each][::-1])
        self._places = [places[each] for each in order]
        self._nodes = [told[each][1] for each in order]
        self._nodes_by_number = list(dict.fromkeys(self._nodes))
        sizes, seen = Counter(self._nodes), Counter[str]()
        port = self._ray.get(self._places[0].serve.remote())
        starts = []
        for rank, node in enumerate(self._nodes):
            variables = {
                "RANK": rank,
                "WORLD_SIZE": len(places),
                "LOCAL_RANK": seen[node],
                "LOCAL_WORLD_SIZE": sizes[node],
                "GROUP_RANK": self._nodes_by_number.index(node),
                "GROUP_WORLD_SIZE": len(sizes),
                "MASTER_ADDR": told[order[0]][0],
                "MASTER_PORT": port,
            }
            own = {key: str(value) for key, value in variables.items()} | {**self._variables}
            starts.append(self._places[rank].start.remote(self._words, own, str(Path.cwd())))
            seen[node] += 1
        self._ray.get(starts)
        self._began = time.monotonic()

    def _watch(self, asked: list[int]) -> None:
        waiting = {place.read.remote(): rank for rank, place in enumerate(self._places)}
        end = float("inf")
        sent = 0
        while waiting and time.monotonic() < end:
            done, _ = self._ray.wait(list(waiting), timeout=SIGNAL_S)
            for reference in done:
                rank = waiting.pop(reference)
                if not self._take(rank, reference):
                    waiting[self._places[rank].read.remote()] = rank
            if any(code not in (0, STOPPED) for code in self.codes.values()):
                end = min(end, time.monotonic() + OTHERS_S)
            for number in asked[sent:]:
                self._send(number)
            sent = len(asked)
            may_move = done and not (asked or self.moves or self.codes)
            if may_move and (why := self._why_elsewhere()):
                self.moves = why
                self._send(signal.SIGTERM)
        for rank in waiting.values():
            self.codes[rank] = LOST

    def _take(self, rank: int, reference: Any) -> bool:
        """Show what a rank has written. Return True if it has ended."""
        try:
            lines, code = self._ray.get(reference)
        except self._ray.exceptions.RayError:
            lines, code = [], LOST
        for is_error, line in lines:
            stream = sys.stderr.buffer if is_error else sys.stdout.buffer
            stream.write(line)
            stream.flush()
        if code is not None:
            self.codes[rank] = code
        return code is not None

    def _why_elsewhere(self) -> str:
        lost = self._cluster.draining() & set(self._nodes)
        if lost:
            return f"{len(lost)} of {len(self._nodes_by_number)} nodes will end soon"
        is_old = time.monotonic() - self._began > GROWS_AFTER_S
        if is_old and len(self._places) < self._cluster.most and self._cluster.room():
            return "there is room for more ranks"
        return ""

    def _send(self, number: int) -> None:
        for place in self._places:
            place.send.remote(number)


def launch(config: LaunchSettings, words: Sequence[str], verb: str = "train") -> int:
    """Run a verb, `python -m trainer <words>`, as ranks on a Ray cluster, and wait for their end.

    After a failure the ranks start again, at most `max_restarts` times, on as many places as there
    are. If a node will end soon or there is room for more ranks, they save and go on elsewhere.
    Returns 0 if all ranks succeed, else the first of 2, 1 and 75 that is an exit code of a rank in
    the last attempt, else 1. Raises ConfigError without Ray, and RunError when it is asked to stop
    before the ranks have a place.
    """
    check_start(0.0)
    asked: list[int] = []
    with signals_passed_on(SIGNALS, asked.append):
        with signals_passed_on(SIGNALS, lambda number: interrupt(number, None)):
            cluster = Cluster(config)  # it takes seconds, and there is nothing to save
        try:
            return _attempt_until_the_end(cluster, config, [*launchers.words(verb), *words], asked)
        finally:
            cluster.ray.shutdown()


def _attempt_until_the_end(
    cluster: Cluster, config: LaunchSettings, words: Sequence[str], asked: list[int]
) -> int:
    variables = {MARK: "ray", "TORCHELASTIC_RUN_ID": uuid.uuid4().hex}
    variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    variables |= {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    starts = failures = 0
    while True:
        own = {**variables, "TORCHELASTIC_RESTART_COUNT": str(starts)}
        attempt = Attempt(cluster, words, own)
        attempt.run(asked)
        starts += 1
        codes = set(attempt.codes.values())
        if codes == {0}:
            return 0
        has_failed = not codes <= {0, STOPPED}
        if attempt.moves and not has_failed and not asked:
            say(f"{attempt.moves}; the run is saved and goes on")
        elif not has_failed or 2 in codes or asked or failures == config.max_restarts:
            return next((code for code in (2, 1, STOPPED) if code in codes), 1)
        else:
            failures += 1
            rank, code = next((r, c) for r, c in attempt.codes.items() if c not in (0, STOPPED))
            how = "was lost" if code < 0 else f"ended with code {code}"
            say(f"rank {rank} {how}; restart {failures} of {config.max_restarts}")
