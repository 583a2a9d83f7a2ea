"""SLURM jobs of two nodes that are requeued."""

from __future__ import annotations

import contextlib
import random
import sys
import time
from pathlib import Path
from typing import Any

from harness.launch import environment_of_a_command as environment
from harness.slurm import Cluster, unavailable

from faults.common import REPOSITORY, Row, folder, random_of, wait_for, words_of
from faults.launches import Undisturbed
from faults.meshes import MESHES, SIZE, TASK, _layout, _name
from faults.runs import EVERY, LIMIT_S, _judge
from faults.task import MARKS

LAYOUTS = {"ddp": ("strategy=ddp",), **{_name(axes): _layout(axes) for axes in MESHES}}
LENGTH = 40  # steps of a job
WINDOWS = (range(6, 16), range(22, 34))  # steps at which a job is requeued
SIGNAL = ("scancel", "--signal=USR1")  # by itself
WAYS = (SIGNAL, ("scontrol", "requeue"))
ENDS = {"COMPLETED", "FAILED"}


def requeues(amount: int, seed: int) -> Row:
    """Requeue jobs of four ranks on two nodes at random steps, by SLURM's signal or by SLURM: they
    end like undisturbed runs."""
    row, chance = Row("SLURM job that is requeued", amount), random_of(seed)
    row.skipped = unavailable()
    if row.skipped:
        return row
    with folder() as base, contextlib.ExitStack() as stack:
        try:
            cluster = stack.enter_context(Cluster(base / "slurm"))
        except (OSError, AssertionError) as error:
            row.skipped = f"SLURM could not be started: {str(error).splitlines()[0]}"
            return row
        ours = environment()
        cluster.environment |= {name: ours[name] for name in ("PYTHONPATH", "OMP_NUM_THREADS")}
        cluster.environment["PATH"] = f"{Path(sys.executable).parent}:{cluster.environment['PATH']}"
        _requeue_jobs(cluster, base, row, chance)
    return row


def _requeue_jobs(cluster: Any, base: Path, row: Row, chance: random.Random) -> None:
    undisturbed = Undisturbed(base)
    told = []
    layouts = chance.sample(sorted(LAYOUTS), len(LAYOUTS))
    for number in range(-(-row.asked // len(WINDOWS))):
        name = layouts[number % len(layouts)]
        settings = [f"run.steps={LENGTH}", *LAYOUTS[name]]
        end, _ = undisturbed(TASK, SIZE, *settings)
        windows = WINDOWS[: row.asked - len(WINDOWS) * number]
        asked = {chance.choice(window): chance.choice(WAYS) for window in windows}
        problem = _Job(cluster, base / str(number), settings).problem(asked, end, chance)
        told.append(f"{name} at steps {', '.join(map(str, asked))}")
        for step in asked:
            row.note(f"{name}, requeue after step {step}", problem)
    row.detail = "; ".join(told)


class _Job:
    """A job with scripts/deploy/slurm.sbatch; its run directory is named by the time."""

    def __init__(self, cluster: Any, place: Path, settings: list[str]):
        self.cluster, self.place = cluster, place
        self.marks = place / "marks"
        place.mkdir()
        self.marks.touch()
        cluster.environment[MARKS] = str(self.marks)
        words = words_of(TASK, place, *EVERY, *settings, "run.name=null")[3:]
        ranks = ["-N2", f"--ntasks-per-node={SIZE // 2}", "--cpus-per-task=1"]
        script = REPOSITORY / "scripts/deploy/slurm.sbatch"
        self.number = cluster.submit(script, f"--chdir={place}", *ranks, "--", *words)

    def output(self) -> str:
        return (self.place / f"slurm-{self.number}.out").read_text(errors="replace")

    def problem(
        self, asked: dict[int, tuple[str, ...]], end: Any, chance: random.Random
    ) -> str | None:
        """Requeue the job after each of the steps; return what is wrong then or at its end."""
        return self._ask(asked, chance) or self._judge_end([*asked.values()], end)

    def _ask(self, asked: dict[int, tuple[str, ...]], chance: random.Random) -> str | None:
        for number, (step, way) in enumerate(asked.items()):
            marked = lambda step=step: f"step {step}" in self.marks.read_text().splitlines()  # noqa: E731
            if not wait_for(marked, LIMIT_S):
                return f"attempt {number} did not reach step {step}: {self._tail()}"
            time.sleep(chance.random() * 0.02)
            self.cluster.run(*way, self.number)
            is_requeued = lambda n=number: self.cluster.requeues(self.number) > n  # noqa: E731
            if not wait_for(is_requeued, 30.0, 0.2):
                return f"not requeued after step {step}: {self._tail()}"
        return None

    def _judge_end(self, ways: list[tuple[str, ...]], end: Any) -> str | None:
        state = self.cluster.wait(self.number, ENDS, LIMIT_S)
        places, count = [*self.place.glob("*/*")], self.cluster.requeues(self.number)
        if (state, count, len(places)) != ("COMPLETED", len(ways), 1):
            return f"{state}, {count} requeues, {len(places)} run directories: {self._tail()}"
        told = self.output().count(f"requeueing SLURM job {self.number}")
        if told < ways.count(SIGNAL) or "resumed at step" not in self.output():
            return f"the output has {told} requeues: {self._tail()}"
        return _judge(places[0], end)

    def _tail(self) -> str:
        return " | ".join(self.output().splitlines()[-4:])[-500:]
