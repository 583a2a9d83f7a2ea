"""Ranks on a Ray cluster, for `launch=ray`: Ray places them, this process restarts them.

Uses Ray's actors and placement groups, and not Ray Train: its workers run a function in a thread,
where no signal can be handled, and it ends them before it resizes, so steps since the last
checkpoint are lost. Here each rank is a process that an actor starts, under torchrun's variables.
"""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any

from trainer import Config
from trainer.base.errors import STOPPED, one_line
from trainer.base.process import invocation
from trainer.base.process.child import end_with_parent, signals_passed_on
from trainer.base.process.table import OMP_NUM_THREADS, environment_at_start
from trainer.core.api import (
    MARK,
    OF_A_GROUP,
    SIGNALS,
    LaunchSettings,
    check_start,
    interrupt,
    list_sizes,
)
from trainer.places.ray_cluster import PLACE_POLL_S, Cluster, range_of, say

# Ray's runtime environments have the others
PASSED_ON = ("PYTHONPATH", invocation.SCRIPT, OMP_NUM_THREADS)
LOST_CODE = -signal.SIGKILL  # as the exit code of a rank whose node or actor is gone
NOT_STARTED = 1
SIGNAL_S = 0.2  # `ray job stop` kills this process 3 s after its signal by default
OTHERS_S = 30.0  # after the first failure, for the ranks that wait for the lost one
GROWS_AFTER_S = 60.0  # a start takes seconds: a cluster that changes all the time would only start


class Place:
    """An actor: a place for one rank on some node. Starts the rank as a child process."""

    def __init__(self) -> None:
        self._output: queue.Queue[tuple[bool, bytes]] = queue.Queue()
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = threading.Lock()
        self._early: list[int] = []  # signals that came before the process
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
        try:
            with self._turn:
                process = self._process = self._start(words, variables, folder)
                for signal_number in self._early:
                    process.send_signal(signal_number)
            self._code = self._copy_until_the_end(process)
        except Exception as error:  # such as EAGAIN and ENOMEM
            line = f"error: a rank cannot be started on {socket.gethostname()}: {one_line(error)}\n"
            self._output.put((True, line.encode()))
            self._code = NOT_STARTED

    def _start(
        self, words: Sequence[str], variables: Mapping[str, str], folder: str
    ) -> subprocess.Popen[bytes]:
        # Ray sets OMP_NUM_THREADS to the actor's CPUs: only what the user set counts
        of_ray = {OMP_NUM_THREADS} - {*environment_at_start()}
        left_out = {*OF_A_GROUP, *of_ray}
        own = {key: value for key, value in os.environ.items() if key not in left_out}
        return subprocess.Popen(  # noqa: S603
            [sys.executable, *words],
            cwd=folder if Path(folder).is_dir() else None,
            env={**own, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            preexec_fn=end_with_parent,
            start_new_session=True,  # Ray kills its own, and with it the watcher that says why
        )

    def _copy_until_the_end(self, process: subprocess.Popen[bytes]) -> int:
        readers = [
            threading.Thread(target=self._copy, args=(stream, is_error), daemon=True)
            for is_error, stream in enumerate((process.stdout, process.stderr))
        ]
        for reader in readers:
            reader.start()
        code = process.wait()
        for reader in readers:
            reader.join(PLACE_POLL_S)  # a process that the rank left may hold its output
        return code

    def _copy(self, stream: IO[bytes], is_error: bool) -> None:
        log = sys.stderr if is_error else sys.stdout  # Ray's files of this actor
        with stream:
            for line in stream:
                self._output.put((bool(is_error), line))
                log.write(line.decode(errors="replace"))

    def read(self) -> tuple[list[tuple[bool, bytes]], int | None]:
        """Return lines of output, and the exit code, after at most PLACE_POLL_S."""
        code = self._code  # before the lines: the last ones are there when it is
        lines = []
        with suppress(queue.Empty):
            lines.append(self._output.get(timeout=0 if code is not None else PLACE_POLL_S))
            while True:
                lines.append(self._output.get_nowait())
        return lines, code

    def send(self, signal_number: int) -> None:
        """Send a signal to the rank, as soon as it has started."""
        with self._turn:
            if self._process is None:
                self._early.append(signal_number)
            elif self._code is None:
                self._process.send_signal(signal_number)


class Attempt:
    """The ranks from one start to their end."""

    def __init__(
        self,
        cluster: Cluster,
        words: Sequence[str],
        variables: Mapping[str, str],
        others_s: float,
    ) -> None:
        """`others_s`: how long the other ranks may take to end after the first failure."""
        self._cluster = cluster
        self._ray = cluster.ray
        self._words = words
        self._variables = variables
        self._others_s = others_s
        self._places: list[Any] = []  # by rank
        self._nodes: list[str] = []  # Ray's ids of their nodes
        self._began = 0.0
        self._ended_late: set[int] = set()  # ranks that this process ended after the first failure
        self.codes: dict[int, int] = {}
        self.moves = ""  # why the ranks were asked to save and end: to go on elsewhere

    @property
    def size(self) -> int:
        """Number of ranks that were started."""
        return len(self._places)

    def run(self, asked: list[int]) -> None:
        """Place and start the ranks, show what they write, and wait for their end."""
        group, actors = self._cluster.place(Place, asked)
        try:
            self._begin(actors)
            self._watch(asked)
        except self._ray.exceptions.RayError:  # a node was lost before all ranks had begun
            self.codes.setdefault(0, LOST_CODE)
        finally:
            for actor in actors:
                self._ray.kill(actor)
            self._ray.util.remove_placement_group(group)

    def _begin(self, actors: list[Any]) -> None:
        told = self._ray.get([actor.describe.remote() for actor in actors])
        # ranks of a node have adjacent numbers, as under torchrun
        order = sorted(range(len(actors)), key=lambda each: told[each][::-1])
        self._places = [actors[each] for each in order]
        self._nodes = [told[each][1] for each in order]
        nodes = list(dict.fromkeys(self._nodes))
        sizes = Counter(self._nodes)
        seen = Counter[str]()
        port = self._ray.get(self._places[0].serve.remote())
        starts = []
        for rank, node in enumerate(self._nodes):
            variables = {
                "RANK": rank,
                "WORLD_SIZE": len(actors),
                "LOCAL_RANK": seen[node],
                "LOCAL_WORLD_SIZE": sizes[node],
                "GROUP_RANK": nodes.index(node),
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
        waiting = {actor.read.remote(): rank for rank, actor in enumerate(self._places)}
        end = float("inf")
        sent = 0
        is_refused = False
        while waiting and time.monotonic() < end:
            done, _ = self._ray.wait(list(waiting), timeout=SIGNAL_S)
            for reference in done:
                rank = waiting.pop(reference)
                if not self._take(rank, reference):
                    waiting[self._places[rank].read.remote()] = rank
            if any(code not in (0, STOPPED) for code in self.codes.values()):
                end = min(end, time.monotonic() + self._others_s)
            if 2 in self.codes.values() and not is_refused:
                is_refused = True
                self._send(signal.SIGTERM)  # others may wait for this one to connect
            for signal_number in asked[sent:]:
                self._send(signal_number)
            sent = len(asked)
            may_move = done and not (asked or self.moves or self.codes)
            if may_move and (why := self._why_elsewhere()):
                self.moves = why
                self._send(signal.SIGTERM)
        self._ended_late = {*waiting.values()}
        self.codes |= dict.fromkeys(self._ended_late, LOST_CODE)

    def _take(self, rank: int, reference: Any) -> bool:
        """Show what a rank has written. Return True if it has ended."""
        try:
            lines, code = self._ray.get(reference)
        except self._ray.exceptions.RayError:
            lines, code = [], LOST_CODE
        for is_error, line in lines:
            stream = sys.stderr.buffer if is_error else sys.stdout.buffer
            stream.write(line)
            stream.flush()
        if code is not None:
            self.codes[rank] = code
        return code is not None

    def describe_failure(self) -> str:
        """Describe the rank that failed first, or one that was killed: others fail by its end."""
        failed = [(r, c) for r, c in self.codes.items() if c not in (0, STOPPED)]
        killed = [(r, c) for r, c in failed if c < 0 and r not in self._ended_late]
        rank, code = (killed or failed)[0]
        return f"rank {rank} " + ("was lost" if code < 0 else f"ended with code {code}")

    def _why_elsewhere(self) -> str:
        lost = self._cluster.draining() & set(self._nodes)
        if lost:
            return f"{len(lost)} of {len({*self._nodes})} nodes will end soon"
        is_old = time.monotonic() - self._began > GROWS_AFTER_S
        if is_old and self._cluster.has_room_for_more(self.size):
            return "there is room for more ranks"
        return ""

    def _send(self, signal_number: int) -> None:
        for actor in self._places:
            actor.send.remote(signal_number)


def launch(config: Config, words: Sequence[str]) -> int:
    """Train by `python -m trainer <words>` as ranks on a Ray cluster, and wait for their end.

    After a failure the ranks start again, at most `max_restarts` times, on as many places as there
    are. If a node will end soon or there is room for more ranks, they save and go on elsewhere.
    After a move to another number of ranks, which refuse it, they go back.
    Returns 0 if all ranks succeed, else the first of 2, 1 and 75 that is an exit code of a rank in
    the last attempt, else 1. Raises ConfigError without Ray, and RunError when it is asked to stop
    before the ranks have a place.
    """
    sizes = list_sizes(config, *range_of(config.launch))
    check_start(0.0)
    asked: list[int] = []
    with _end_reported() as leave, signals_passed_on(SIGNALS, asked.append):

        def end(signal_number: int) -> None:
            leave()
            interrupt(signal_number, None)

        with signals_passed_on(SIGNALS, end):
            # it takes seconds, and there is nothing to save
            cluster = Cluster(config.launch, sizes)
        try:
            others_s = OTHERS_S + (config.checkpoint.copy_s or 0.0)
            all_words = [*invocation.words(), *words]
            return _attempt_until_the_end(cluster, config.launch, all_words, asked, others_s)
        finally:
            cluster.ray.shutdown()


ENDED_BY_RAY = (
    "error: launch=ray: Ray has ended this process, as it does when it loses the cluster's head or"
    " this node's raylet, or it was killed; its ranks end too; start the cluster and the run again,"
    " with run.resume=auto\n"
)


@contextmanager
def _end_reported() -> Iterator[Callable[[], object]]:
    """Print a line if this process is ended within the block: Ray does it by C's _exit.

    A child process waits for the end of a pipe. What the block gets is to be called before this
    process ends itself by os._exit.
    """
    reader, writer = os.pipe()
    guard = os.fork()
    if guard == 0:
        os.setsid()
        for signal_number in (*SIGNALS, signal.SIGHUP):
            signal.signal(signal_number, signal.SIG_IGN)
        os.close(writer)
        if not os.read(reader, 1):
            os.write(2, ENDED_BY_RAY.encode())
        os._exit(0)
    os.close(reader)
    try:
        yield partial(os.write, writer, b".")
    finally:
        os.write(writer, b".")
        os.close(writer)
        os.waitpid(guard, 0)


def _attempt_until_the_end(
    cluster: Cluster,
    config: LaunchSettings,
    words: Sequence[str],
    asked: list[int],
    others_s: float,
) -> int:
    variables = {MARK: "ray", "TORCHELASTIC_RUN_ID": uuid.uuid4().hex}
    variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
    variables |= {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    starts = failures = former = 0
    while True:
        own = {**variables, "TORCHELASTIC_RESTART_COUNT": str(starts)}
        attempt = Attempt(cluster, words, own, others_s)
        attempt.run(asked)
        starts += 1
        codes = set(attempt.codes.values())
        if codes == {0}:
            return 0
        has_failed = not codes <= {0, STOPPED}
        if attempt.moves and not has_failed and not asked:
            say(f"{attempt.moves}; the run is saved and goes on")
        elif 2 in codes and former not in (0, attempt.size) and not asked:
            cluster.refuse(attempt.size, former)
            say(f"{attempt.size} ranks refuse to start; the run goes back to {former}")
            continue
        elif not has_failed or 2 in codes or asked or failures == config.max_restarts:
            if has_failed and min(codes) < 0:
                say(attempt.describe_failure())  # a killed process prints nothing
            return next((code for code in (2, 1, STOPPED) if code in codes), 1)
        else:
            failures += 1
            say(f"{attempt.describe_failure()}; restart {failures} of {config.max_restarts}")
        former = attempt.size or former
