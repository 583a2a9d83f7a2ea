"""SIGKILL at each request of a save to a bucket, through a proxy: nothing is lost or mixed."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

from harness import CONF
from harness.fences import open_fence
from harness.s3 import Proxy, proxied, serving_s3

from faults.common import Row, Shape, folder, random_of
from trainer import load_config
from trainer.core.checkpoints import transaction
from trainer.core.config.copies import copy_of
from trainer.core.config.stores import Events
from trainer.core.distributed import owner
from trainer.places import bucket, fence
from trainer.places.bucket import Bucket
from trainer.places.listing import read_listing
from trainer.places.mirror import BucketMirror

SHAPE = Shape(2, 2000)
OTHER = Shape(3, 2000)  # of a zombie
OLD = 1  # the step that a session before has published
NEW = (2, 3, 4)  # those of the session that is killed
LIMIT_S = 30.0
FAULTS = ("503", "cut", "lost", "torn", "drop", "slow")  # of the proxy
REQUEST_S = 1.0  # instead of 30: so long a client waits for an answer that was dropped


def faults_of(chance: Random) -> Callable[[], str]:
    """Return a function that draws what a proxy does to a request: a fault for one in eight."""
    return lambda: chance.choice(FAULTS) if chance.random() < 1 / 8 else ""


@contextmanager
def served() -> Iterator[Proxy]:
    """A store behind a proxy, with the login in this process's environment."""
    before = dict(os.environ)
    with (
        folder() as place,
        serving_s3(place) as server,
        proxied(server.environment["AWS_ENDPOINT_URL"]) as proxy,
    ):
        os.environ.update({**server.environment, "AWS_ENDPOINT_URL": proxy.url})
        limit_s = bucket.REQUEST_S
        bucket.REQUEST_S = REQUEST_S
        try:
            yield proxy
        finally:
            bucket.REQUEST_S = limit_s
            os.environ.clear()
            os.environ.update(before)


class Child:
    """A forked process that makes `body`, and leads a group of processes.

    obstore has threads, so this process itself never uses it.
    """

    def __init__(self, body: Callable[[], Any]):
        self._source, sink = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._source)
            os.setpgrp()
            try:
                found = {"value": body()}
            except BaseException:
                found = {"error": traceback.format_exc()}
            with os.fdopen(sink, "w") as pipe:
                json.dump(found, pipe)
            os._exit(0)
        os.close(sink)

    def has_ended(self) -> bool:
        is_over = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, is_over) is not None

    def end(self) -> Any:
        """Wait for what it returns, None if it was killed. Raises AssertionError."""
        with os.fdopen(self._source) as pipe:
            text = pipe.read()
        os.waitpid(self.pid, 0)
        found = json.loads(text) if text else {"value": None}
        if "error" in found:
            raise AssertionError(found["error"])
        return found["value"]


def in_child(body: Callable[[], Any], begun: Callable[[int], None] = lambda pid: None) -> Any:
    """Return what `body` returns in a forked process, None if that was killed."""
    child = Child(body)
    begun(child.pid)
    return child.end()


class Session:
    """A run of steps that are saved in a directory of its own, and mirrored."""

    def __init__(self, address: str, place: Path, steps: tuple[int, ...], shape: Shape = SHAPE):
        self.address = address
        self.place = place
        self.steps = steps
        self.shape = shape
        self.log = place / "published"

    def run(self) -> list[Any]:
        """Save and mirror each step, and note those that a store has; return what was told."""
        keep = load_config(["task=tiny", "checkpoint.keep_best=0"], [CONF]).checkpoint
        keep.keep_last = 1
        keep.mirror = self.address
        keep.mirror_timeout_s = LIMIT_S
        told: list[Any] = []
        there = max(read_listing(Bucket(self.address)).checkpoints(), default=0)
        own = open_fence(self.address, there, there)
        note: Callable[..., None] = lambda step, facts: told.append([step, facts])  # noqa: E731
        (self.place / "checkpoints").mkdir(parents=True, exist_ok=True)
        lose: Callable[[Exception], None] = lambda error: told.append(str(error))  # noqa: E731
        mirror = BucketMirror(keep, own, self.place, Events(told.append, note, lose))
        for step in self.steps:
            self.shape.save(self.place / "checkpoints", step)
            (self.place / "config.json").write_text("{}")
            (self.place / "metrics.jsonl").write_text(json.dumps({"step": step}))
            mirror.look()
            assert mirror.wait(LIMIT_S), told
            with self.log.open("a") as file:
                file.write(f"{step}\n")
        mirror.close()
        return told

    @property
    def published(self) -> int:
        """The newest step that the store had acknowledged before this session ended."""
        return int(self.log.read_text().split()[-1]) if self.log.exists() else 0


def _newest(address: str, place: Path, shape: Shape = SHAPE) -> list[int]:
    """Return the step of the newest checkpoint, after comparing its bytes, and all that count."""
    copy = copy_of(address, place)
    steps = transaction.steps(copy / "checkpoints")
    step = shape.step_of(transaction.load(steps[max(steps)]))
    assert step == max(steps)
    return [step, *steps]


class Killing:
    """Kills a process and its children at a request to a store, before or after that has it. Other
    requests have faults that are drawn."""

    def __init__(self, proxy: Proxy, at: int, is_lost: bool, draw: Callable[[], str]):
        self.proxy = proxy
        self.at = at
        self.is_lost = is_lost
        self.draw = draw
        self._victim = 0
        self.requests: list[tuple[str, str]] = []
        self.is_done = False

    def run(self, body: Callable[[], Any]) -> Any:
        """Return what `body` returns in a process, None if that was killed."""
        with self.disturbed():
            return in_child(body, self.aim)

    @contextmanager
    def disturbed(self) -> Iterator[None]:
        self.proxy.begin(self._plan, self._after)
        try:
            yield
        finally:
            self.requests = self.proxy.requests
            self.proxy.begin(lambda number, method, path: "")

    def aim(self, pid: int) -> None:
        """Name the process to kill, which leads a group."""
        self._victim = pid

    def _plan(self, number: int, method: str, path: str) -> str:
        if number != self.at:
            return self.draw()
        if not self.is_lost:
            self._kill()
        return "lost" if self.is_lost else "cut"

    def _after(self, number: int) -> None:
        if number == self.at:
            self._kill()

    def _kill(self) -> None:
        self.is_done = True
        os.killpg(self._victim, signal.SIGKILL)


def _case(proxy: Proxy, name: str, killing: Killing, place: Path) -> str:
    """Kill a session at a request; check what is there. Return what is wrong."""
    address = f"s3://data/{name}"
    proxy.begin(lambda number, method, path: "")
    in_child(Session(address, place / "before", (OLD,)).run)
    session = Session(address, place / "session", NEW)
    killing.run(session.run)
    known = max(OLD, session.published)
    newest, *_ = in_child(lambda: _newest(address, place))
    if newest < known:
        return f"step {known} was published, and step {newest} is the newest"
    more = (newest + 1, newest + 2)
    in_child(Session(address, place / "after", more).run)
    last = in_child(lambda: _newest(address, place))
    if last != [more[-1], more[-1]]:
        return f"the next session left {last}, not step {more[-1]} alone"
    return ""


def points_of(count: int, amount: int, chance: Random) -> list[tuple[int, bool]]:
    """Return at which requests to kill, and whether after the store has them: each one in turn."""
    points = [(at, is_lost) for at in range(1, count + 1) for is_lost in (False, True)]
    return [*points] * (amount // len(points)) + chance.sample(points, amount % len(points))


def mirror(amount: int, seed: int) -> Row:
    """Kill a session that mirrors three checkpoints, at each of its requests to the store."""
    row = Row("SIGKILL at a request of a save to a bucket", amount)
    chance = random_of(seed)
    ends: Counter[str] = Counter()
    with served() as proxy, folder() as place:
        counted = Killing(proxy, 0, False, lambda: "")
        problem = _case(proxy, "counted", counted, place / "counted")
        assert not problem, problem
        count = len(counted.requests)
        for number, (at, is_lost) in enumerate(points_of(count, amount, chance)):
            draw = faults_of(chance) if number % 2 else lambda: ""
            killing = Killing(proxy, at, is_lost, draw)
            with tempfile.TemporaryDirectory(dir=place) as own:
                when = "after" if is_lost else "before"
                where = f"request {at} of {count}, {when} the store"
                try:
                    problem = _case(proxy, f"case-{number}", killing, Path(own))
                except Exception as error:
                    problem = str(error)[-600:]
                ends[when if killing.is_done else "not"] += 1
                row.note(where, problem or None)
    row.detail = f"{count} requests, killed before {ends['before']} and after"
    row.detail += f" {ends['after']} of them, {ends['not']} ended before; every second case in a"
    row.detail += " store that fails at random; the next session went on from what was published"
    return row


class Zombie:
    """A session on a machine that is stopped at a request, and wakes after its successor's end."""

    def __init__(self, proxy: Proxy, address: str, place: Path, at: int):
        self.proxy = proxy
        self.address = address
        self.place = place
        self.at = at
        self.requests: list[tuple[str, str]] = []
        self.is_stopped = threading.Event()
        self._wakes = threading.Event()
        self._child: Child | None = None

    def _elsewhere(self, name: str, steps: tuple[int, ...], shape: Shape) -> Callable[[], Any]:
        """Return a session on a machine of its own, which finds the lease of another expired."""
        session = Session(self.address, self.place / name, steps, shape)

        def body() -> Any:
            owner.machine_id = lambda: name  # type: ignore[assignment]
            fence.EXPIRY_S = 0.0
            return session.run()

        return body

    def _plan(self, number: int, method: str, path: str) -> str:
        return "hold" if number == self.at else ""

    def _hold(self) -> None:
        """Stop the session; its request reaches the store after it wakes."""
        assert self._child is not None
        os.killpg(self._child.pid, signal.SIGSTOP)
        self.is_stopped.set()
        self._wakes.wait(LIMIT_S)

    def problem(self) -> str:
        """Return what is wrong after the successor's end, and after the zombie's."""
        self.proxy.begin(self._plan)
        self.proxy.hold = self._hold
        self._child = Child(self._elsewhere("zombie", NEW, OTHER))
        while not self.is_stopped.is_set() and not self._child.has_ended():
            time.sleep(0.005)
        self.requests = self.proxy.requests
        if not self.is_stopped.is_set():
            self._child.end()
            return ""
        try:
            begun = in_child(lambda: max(read_listing(Bucket(self.address)).checkpoints()))
            steps = (begun + 1, begun + 2)
            in_child(self._elsewhere("successor", steps, SHAPE))
            before = in_child(lambda: _newest(self.address, self.place / "before"))
        finally:
            self._wakes.set()
            os.killpg(self._child.pid, signal.SIGCONT)
        with suppress(AssertionError):  # its start may be refused
            self._child.end()
        after = in_child(lambda: _newest(self.address, self.place / "after"))
        last = [steps[-1]] * 2
        if (before, after) != (last, last):
            return f"{before} were there, and {after} after it woke, not step {last[0]} alone"
        more = (last[0] + 1,)
        in_child(self._elsewhere("third", more, SHAPE))
        third = in_child(lambda: _newest(self.address, self.place / "third"))
        return "" if third == [*more] * 2 else f"the third session left {third}, not step {more}"


def zombies(amount: int, seed: int) -> Row:
    """Stop a writer at a request until its successor has written; then it wakes and goes on."""
    row = Row("SIGSTOP of a writer of a bucket, until its successor has written", amount)
    with served() as proxy, folder() as place:
        in_child(Session("s3://data/counted", place / "first", (OLD,)).run)
        counted = Zombie(proxy, "s3://data/counted", place / "counted", 0)
        assert not counted.problem()
        stops = 0
        names = [f"{method} {path.rpartition('/')[2]}" for method, path in counted.requests]
        first = names.index("PUT lease.json")  # before it there is no writer yet
        points = points_of(len(names) - first, amount, random_of(seed))
        for number, (at, _) in enumerate(points):
            address = f"s3://data/case-{number}"
            with tempfile.TemporaryDirectory(dir=place) as own:
                try:
                    in_child(Session(address, Path(own) / "first", (OLD,)).run)
                    zombie = Zombie(proxy, address, Path(own), first + at)
                    problem = zombie.problem()
                    stops += zombie.is_stopped.is_set()
                except Exception as error:
                    problem = str(error)[-600:]
            row.note(f"request {first + at} of {len(names)}", problem or None)
    row.detail = f"{stops} stopped, and the request let through when they woke; only the"
    row.detail += " successor's checkpoint counts, with its bytes"
    return row


ROWS = {"mirror": (mirror, 500, 4), "zombies": (zombies, 100, 2)}
