"""Restarts, signals and hangs on meshes of four ranks."""

from __future__ import annotations

import random
import re
import signal
from collections import Counter

from faults.common import Row, folder, random_of
from faults.hangs import HOW, _Hang
from faults.launches import (
    LAUNCHERS,
    MOMENTS,
    TARGETS,
    Undisturbed,
    _restart,
    _Signal,
    command,
)
from faults.runs import PHASES, STEPS, Launched

Axes = dict[str, int]
MESHES: tuple[Axes, ...] = (
    {"pipeline": 2, "tensor": 2},
    {"shard": 2, "tensor": 2},
    {"pipeline": 2, "shard": 2},
    {"shard": 2, "context": 2},
    {"pipeline": 4},
)
SIZE, TASK = 4, "spread"
STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


def _layout(axes: Axes) -> tuple[str, ...]:
    return ("strategy=parallel", *(f"strategy.mesh.{axis}={size}" for axis, size in axes.items()))


def _name(axes: Axes) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in axes.items())


def _places(axes: Axes, rank: int) -> dict[str, int]:
    """Return the coordinates of a rank; those of the last axis change first."""
    found = {}
    for axis, size in reversed(axes.items()):
        rank, found[axis] = divmod(rank, size)
    return {axis: found[axis] for axis in axes}


def _draw(kinds: tuple[str, ...], amount: int, chance: random.Random) -> list[tuple[Axes, str]]:
    """Return `amount` pairs of a mesh and a kind, all of both in turn, in changing pairs."""
    shuffled = chance.sample(kinds, len(kinds))
    meshes = chance.sample(MESHES, len(MESHES))
    return [
        (meshes[n % len(meshes)], shuffled[(n + 2 * (n // len(meshes))) % len(shuffled)])
        for n in range(amount)
    ]


def restarts(amount: int, seed: int) -> Row:
    """Kill one of four ranks of a mesh: its launcher restarts the ranks, and the run ends like an
    undisturbed one."""
    row, chance, hit = Row("rank of a mesh killed", amount), random_of(seed), Counter[str]()
    with folder() as base:
        undisturbed = Undisturbed(base)
        for number, (axes, phase) in enumerate(_draw(PHASES, amount, chance)):
            settings = [f"run.steps={STEPS}", *_layout(axes)]
            end, _ = undisturbed(TASK, SIZE, *settings)
            place, kind = base / str(number), LAUNCHERS[number % 2]
            words = command(kind, TASK, place, SIZE, *settings, restarts=3)
            run = Launched(words, place, "killed")
            problem = _restart(run, place / TASK, phase, end, chance, hit)
            row.note(f"{_name(axes)}, {kind}, {phase}", problem)
    row.detail = f"{hit['killed']} ranks were killed (rank 0: {hit['rank 0']}), {hit['over']} runs "
    row.detail += f"had ended; at most {hit['longest']} s from the kill to the end"
    return row


def signals(amount: int, seed: int) -> Row:
    """Send SIGTERM, SIGINT or SIGUSR1 to a running mesh of four ranks: all ranks end within 5 s
    with a checkpoint, and a resume finishes the run."""
    row, chance, hit = Row("signal on a mesh", amount), random_of(seed), Counter[str]()
    longest = 0.0
    with folder() as base:
        undisturbed = Undisturbed(base)
        for number, (axes, moment) in enumerate(_draw(MOMENTS[1:], amount, chance)):
            stop = chance.choice(STOPS)
            target, kind = TARGETS[number % len(TARGETS)], LAUNCHERS[number % len(LAUNCHERS)]
            case = _Signal(
                base / str(number), kind, SIZE, target, moment, stop, 0, TASK, _layout(axes)
            )
            row.note(f"{_name(axes)}, {case}", case.problem(undisturbed, chance))
            hit[case.outcome] += 1
            hit[stop.name] += 1
            longest = max(longest, case.seconds)
    row.detail = ", ".join(f"{name} {hit[name]}" for name in sorted(hit))
    row.detail += f"; longest {longest:.1f} s"
    return row


def hangs(amount: int, seed: int) -> Row:
    """Make a rank of a mesh hang: it is named with its coordinates and the groups in which the
    others wait, and the run ends or is restarted."""
    row, chance, hit = Row("rank of a mesh that hangs", amount), random_of(seed), Counter[str]()
    longest = 0.0
    with folder() as base:
        undisturbed = Undisturbed(base)
        for number, (axes, how) in enumerate(_draw(tuple(HOW), amount, chance)):
            moment, is_restarted = chance.choice(("mid run", "evaluation")), number % 2 == 1
            case = _MeshHang(base / str(number), how, moment, SIZE, chance, is_restarted)
            case.set_axes(axes)
            row.note(f"{_name(axes)}, {case}", case.problem(undisturbed))
            hit["restarted" if is_restarted else "ended"] += 1
            longest = max(longest, case.seconds - case.limit_s)
    row.detail = f"{hit['ended']} ended, {hit['restarted']} restarted; reported at most "
    row.detail += f"{longest:.1f} s after the limit"
    return row


class _MeshHang(_Hang):
    task = TASK

    def set_axes(self, axes: Axes) -> None:
        self.axes, self.layout = axes, _layout(axes)
        places = _places(axes, self.rank)
        self.coordinates = ", ".join(f"{axis} {place}" for axis, place in places.items()) + "; "

    def _judge_waits(self, line: str, at: str) -> str | None:
        """Return a problem unless all others wait at this step, one of them in a group that it
        shares with the hung rank."""
        found = re.findall(r"(ranks? [\d, -]+) waits? in ([^;]*?) of step (\d+)", line)
        waits = {rank: place for ranks, place, _ in found for rank in _numbers(ranks)}
        others = [rank for rank in range(self.size) if rank != self.rank]
        if sorted(waits) != others or {step for *_, step in found} != {at}:
            return f"all others must wait at step {at}: {line}"
        shared = [
            rank
            for rank, place in waits.items()
            for axis in self.axes
            if self._meets(rank, axis)
            if f"the {axis} group in " in place
        ]
        # torch's FSDP has collectives of its own, and before each pass of an evaluation all ranks
        # agree on errors, in no group of an axis
        nameless = {"a collective in evaluation"}
        if "shard" in self.axes:
            nameless.add("a collective in forward and backward")
        shared += [rank for rank, place in waits.items() if place in nameless]
        return None if shared else f"no rank waits in a group of rank {self.rank}: {line}"

    def _meets(self, rank: int, axis: str) -> bool:
        """Return True if the rank is in the same group of this axis as the hung one."""
        ours, theirs = _places(self.axes, self.rank), _places(self.axes, rank)
        return {**ours, axis: 0} == {**theirs, axis: 0}


def _numbers(text: str) -> list[int]:
    """Return the numbers in a text such as "ranks 0-2, 5"."""
    ranges = [part.partition("-") for part in re.findall(r"\d+(?:-\d+)?", text)]
    return [n for first, _, last in ranges for n in range(int(first), int(last or first) + 1)]
