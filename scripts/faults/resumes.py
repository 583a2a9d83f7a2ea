"""SIGKILL at each request of a resume from a bucket, on an empty disk and on a half-filled one."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import boto3
from harness import fit_on, warm_up
from harness.internals import checkpoint
from harness.s3 import Proxy

from faults.common import Row, difference, folder, random_of, state_of
from faults.mirror import Killing, faults_of, in_child, points_of, served
from trainer.core.config.copies import copy_of
from trainer.places.bucket import Bucket
from trainer.places.listing import read_listing

WORDS = (
    *("task=tiny", "task.options.norm=true", "task.options.dropout=0.2", "strategy.precision=fp32"),
    *("run.steps=16", "log.every_steps=4", "eval.every_steps=6", "checkpoint.every_steps=12"),
    *("checkpoint.mirror_timeout_s=60", "run.resume=auto"),
)
STOP_STEP = 8
LAST_STEP = 16
STRATEGIES = {1: (), 2: ("strategy=fsdp",)}


class Bucketed:
    """A run in a bucket."""

    def __init__(self, name: str, ranks: int):
        self.prefix = f"{name}-{ranks}"
        self.address = f"s3://data/{self.prefix}"
        self.ranks = ranks
        self.words = [*WORDS, *STRATEGIES[ranks], f"checkpoint.mirror={self.address}"]

    def train(self, disk: Path, *more: str) -> int:
        """Train to the end or to a signal, in this process and its children."""
        return fit_on(self.ranks, disk, *self.words, *more)["code"]

    def newest(self) -> int:
        return max(read_listing(Bucket(self.address)).checkpoints(), default=0)

    def begin_as(self, other: Bucketed, proxy: Proxy) -> None:
        """Copy all files of another run, past the proxy."""
        store = boto3.resource("s3", endpoint_url=f"http://{proxy.behind}").Bucket("data")
        for each in store.objects.filter(Prefix=f"{other.prefix}/"):
            new = each.key.replace(other.prefix, self.prefix, 1)
            store.copy({"Bucket": "data", "Key": each.key}, new)


def _end_of(run: Path) -> dict[str, Any]:
    """Return the state at the end of a run, without what its record says of a store that failed."""
    last = checkpoint.steps(run / "checkpoints")[LAST_STEP]
    found = {**state_of(run), "ledger": checkpoint.load(last).manifest["ledger"]}
    return {**found, "record": [line for line in found["record"] if "mirror" not in line]}


class Case:
    """A stopped run that is killed twice when it resumes, and then ends."""

    def __init__(self, proxy: Proxy, run: Bucketed, state: dict[str, Any], place: Path):
        self.proxy = proxy
        self.run = run
        self.state = state
        self.place = place
        self.kills = 0
        self.step = STOP_STEP

    def kill(self, killing: Killing, disk: str) -> str:
        """Return what is wrong after a kill: fewer steps in the bucket than before it."""
        code = killing.run(lambda: self.run.train(self.place / disk))
        self.kills += killing.is_done
        if not killing.is_done and code != 0:
            return f"ended with code {code}"
        before, self.step = self.step, in_child(self.run.newest)
        return f"step {before} was there, now {self.step}" if self.step < before else ""

    def end(self, killing: Killing, disk: str) -> str:
        """Return what differs from an undisturbed run at the end."""
        code = killing.run(lambda: self.run.train(self.place / disk))
        if code != 0:
            return f"the last session ended with code {code}"
        return in_child(lambda: difference(_end_of(copy_of(self.run.address)), self.state)) or ""


def _reference(proxy: Proxy, ranks: int, place: Path) -> tuple[Bucketed, dict[str, Any]]:
    """Return a run that was stopped, and the end of one that was not."""
    proxy.begin(lambda number, method, path: "")
    whole, stopped = Bucketed("whole", ranks), Bucketed("stopped", ranks)
    assert in_child(lambda: whole.train(place / whole.prefix)) == 0
    signal = f"task.options.signal_at={STOP_STEP}"
    assert in_child(lambda: stopped.train(place / stopped.prefix, signal)) == 75
    return stopped, _end_of(place / whole.prefix / "tiny/run")


def resumes(amount: int, seed: int) -> Row:
    """Kill a run at each request of its resume from a bucket, twice, and resume it again."""
    row = Row("SIGKILL at a request of a resume from a bucket", amount)
    chance = random_of(seed)
    kills: Counter[str] = Counter()
    warm_up()
    with served() as proxy, folder() as place:
        begun = {ranks: _reference(proxy, ranks, place) for ranks in STRATEGIES}
        counts = {ranks: _count(proxy, *begun[ranks], place) for ranks in begun}
        ranks_of = [1 + number % 2 for number in range(amount)]
        drawn = {
            ranks: iter(points_of(counts[ranks], ranks_of.count(ranks), chance)) for ranks in begun
        }
        for number, ranks in enumerate(ranks_of):
            at, is_lost = next(drawn[ranks])
            draw = faults_of(chance) if number // 2 % 2 else lambda: ""
            again = chance.randrange(1, counts[ranks] + 1)
            first = Killing(proxy, at, is_lost, draw)
            second = Killing(proxy, again, chance.random() < 0.5, draw)
            stopped, state = begun[ranks]
            with tempfile.TemporaryDirectory(dir=place) as own:
                case = Case(proxy, Bucketed(f"case-{number}", ranks), state, Path(own))
                case.run.begin_as(stopped, proxy)
                disks = ("half", "half", "empty") if number // 4 % 2 else ("one", "two", "two")
                try:
                    problem = case.kill(first, disks[0]) or case.kill(second, disks[1])
                    problem = problem or case.end(Killing(proxy, 0, False, draw), disks[2])
                except Exception as error:
                    problem = str(error)[-1500:]
            kills[f"{ranks}"] += case.kills
            where = f"{ranks} ranks, requests {at} and {again} of {counts[ranks]}"
            row.note(where, problem or None)
    row.detail = f"{kills['1']} kills of 1 rank ({counts[1]} requests) and {kills['2']} of 2"
    row.detail += f" ({counts[2]}); half of them in a store that fails at random; weights, record"
    row.detail += " and ledger equal an undisturbed run's"
    return row


def _count(proxy: Proxy, stopped: Bucketed, state: dict[str, Any], place: Path) -> int:
    """Return how many requests an undisturbed resume makes until it saves, after comparing its
    end."""
    case = Case(proxy, Bucketed("counted", stopped.ranks), state, place / "counted")
    case.run.begin_as(stopped, proxy)
    killing = Killing(proxy, 0, False, lambda: "")
    problem = case.end(killing, str(stopped.ranks))
    assert not problem, problem
    names = [path if method == "PUT" else "" for method, path in killing.requests]
    return next(number for number, name in enumerate(names) if "/checkpoints/" in name)


ROWS = {"resumes": (resumes, 150, 2)}
