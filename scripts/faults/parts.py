"""SIGKILL of one rank at the system calls of its part of a sharded save, while the others live."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch.distributed as dist
from harness.internals import checkpoint
from harness.stored import opened_saver

from faults.calls import calls_in, inject
from faults.common import FACTS, Row, Shape, folder, random_of, traced, without_strace
from trainer.base.errors import RunError
from trainer.core.checkpoints.saver import Snapshot

RANKS, OLD, NEW = 4, 1, 2
ATTEMPTS = 3  # on a busy machine a rank that waits makes some calls more or fewer
WAIT_S = 0.05  # how long rank 0 waits for the line of a rank that is dead
SIZES = (1, 1000, 300_000, 3_000_000)


@dataclass(frozen=True)
class Point:
    """The `at`-th system call named `call` of one rank, while it saves its part of step 2."""

    shape: Shape
    rank: int
    call: str
    at: int

    def __str__(self) -> str:
        return f"{self.call} {self.at} of rank {self.rank}, {self.shape}"


class Save:
    """A save of step 2 over a copy of step 1, by a traced rank and others that live.

    The ranks meet in a TCPStore, as those of a run do.
    """

    def __init__(self, shape: Shape, place: Path):
        self.shape = shape
        self.root = place / "checkpoints"
        place.mkdir(parents=True, exist_ok=True)
        shape.save(self.root, OLD)
        self.server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        limit = timedelta(seconds=20)
        # made before the fork: its calls are not counted
        self._client = dist.TCPStore("127.0.0.1", self.server.port, timeout=limit)
        self.staging = str(checkpoint.stage(self.root, NEW))

    def write(self, rank: int, store: dist.Store) -> None:
        """Do what this rank does in a save."""
        content = self.shape.content(NEW)
        snapshot = Snapshot(NEW, self.shape.parts(NEW)[rank], content["training"], FACTS, None)
        with opened_saver(self.root, rank, RANKS, store, keep_last=1, limit_s=WAIT_S) as saver:
            saver.save(self.staging, snapshot, False)

    def run(self, rank: int, options: list[str], log: str) -> tuple[int, str]:
        """Save with this rank traced; return its exit code, and what ended rank 0 if it lived."""
        for other in range(1, RANKS):
            if other != rank:
                self.write(other, self.server)
        code, _ = traced(partial(self.write, rank, self._client), options, log)
        if rank:
            try:
                self.write(0, self.server)
            except RunError as error:
                return code, str(error)
        return code, ""


def _points(base: Path, shape: Shape) -> Iterator[Point]:
    first = Save(shape, base / "first")  # imports and caches of a first save are not counted
    for rank in reversed(range(RANKS)):
        first.write(rank, first.server)
    shutil.rmtree(first.root)
    for rank in range(RANKS):
        log = base / "log"
        counted: list[list[tuple[str, int]]] = []
        for again in range(2):  # on busy cores a save may have some calls more
            save = Save(shape, base / f"counted-{rank}-{again}")
            assert save.run(rank, [], str(log)) == (0, "")
            shutil.rmtree(save.root)
            counted.append([*calls_in(log.read_text())])
        for call, at in counted[0]:
            if (call, at) in counted[1]:
                yield Point(shape, rank, call, at)


def parts(amount: int, seed: int) -> Row:
    """Kill one rank before one system call of its part of a sharded save: nothing is mixed."""
    row = Row("SIGKILL of a rank at a system call of its part", amount, skipped=without_strace())
    if row.skipped:
        return row
    ends: Counter[str] = Counter()
    with folder() as base:
        points = [point for size in SIZES for point in _points(base, Shape(RANKS, size))]
        chosen = random_of(seed).sample(points, min(amount, len(points)))
        for number, point in enumerate(chosen):
            row.note(str(point), _one(point, base / str(number), ends))
        row.asked = len(chosen)
    row.detail = f"of {len(points)} points; rank 0 was killed {ends['rank 0']} times; the newest"
    row.detail += f" checkpoint was the old one {ends['old']} times, the new one {ends['new']}"
    return row


def _one(point: Point, place: Path, ends: Counter[str]) -> str | None:
    options = inject(point.call, point.at, "signal=KILL")
    for attempt in range(ATTEMPTS):
        save = Save(point.shape, place / str(attempt))
        code, said = save.run(point.rank, options, os.devnull)
        if code:
            break
    ends[f"rank {point.rank}"] += 1
    if code != -9:
        return f"exited with code {code}, not by the signal"
    loaded, skipped = checkpoint.find_newest(save.root, checkpoint.load)
    try:
        step = point.shape.step_of(loaded)
    except Exception as error:
        return str(error)
    ends["new" if step == NEW else "old"] += 1
    shutil.rmtree(save.root)
    if skipped:
        return f"a checkpoint is invalid: {skipped}"
    if said and (step != OLD or f"rank {point.rank} has not written its part" not in said):
        return f"step {step} was found after: {said}"
    if point.rank and not said and step != NEW:
        return "rank 0 had published, and the old step was found"
    return None if step in (OLD, NEW) else f"step {step} was found"
