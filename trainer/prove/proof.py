"""A proof: the commands are run, in fp64 if the script allows it, and their histories compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from trainer.prove.bounds import Bounds, measure
from trainer.prove.comparison import PairComparison, compare
from trainer.prove.merging import CommandHistory
from trainer.prove.rank_reading import open_histories
from trainer.prove.reasons import explain
from trainer.prove.runner import CommandRun, Recording, run_command


@dataclass
class Bench:
    """Where commands are run: `folder` of the records, number of steps, limit for a command."""

    folder: Path
    steps: int
    dtype: str  # auto, fp64 or native
    limit_s: float
    tell: Callable[[str], None]
    begun: float = field(default_factory=time.time)

    def run(
        self,
        name: str,
        command: str,
        dtype: str,
        is_perturbed: bool = False,
        work: Path | None = None,
        kill: int | None = None,
    ) -> CommandRun:
        """Run a command and return how it ended; `work` is {dir} in it, `kill` a step."""
        self.tell(f"running {name} in {dtype}: {command}")
        recording = Recording(self.steps, dtype, kill, is_perturbed, self.begun)
        place = (self.folder / f"{name}-{dtype}".replace(" ", "-")).absolute()
        work = work or place.with_name(f"files-{place.name}")
        return run_command(command, place, recording, self.limit_s, work)

    def read(self, name: str, done: CommandRun) -> CommandHistory:
        """Return the history of a run. Raises ConfigError if it failed.

        A run whose ranks made different numbers of steps fails because of that: it is compared.
        """
        ranks = open_histories(done.records)
        lengths = {rank.num_begun for rank in ranks}
        if len(lengths) < 2 or len(ranks) < ranks[0].world_size:
            done.check()
        history = CommandHistory.of(name, done.command, ranks)
        if (done.code or done.stopped) and not done.is_complete:
            how = done.stopped or f"failed with code {done.code}"
            history.note = f"{name} {how} and was ended" if done.stopped else f"{name} {how}"
            self.tell(f"{done.last_lines()}\n{history.note}; the steps that it made are compared")
        return history


def prove_pair(bench: Bench, first: str, second: str) -> PairComparison:
    """Return how two commands differ."""
    dtype = "native" if bench.dtype == "native" else "fp64"
    done = bench.run("A", first, dtype)
    if bench.dtype == "auto" and done.has_failed and done.code:
        return prove_pair(_native(bench, "A"), first, second)
    one = bench.read("A", done)
    other_run = bench.run("B", second, dtype)
    if other_run.has_failed and other_run.code and dtype == "fp64" and bench.dtype == "auto":
        return prove_pair(_native(bench, "B"), first, second)
    other = bench.read("B", other_run)
    bounds = find_bounds(bench, one, dtype)
    return explain(compare(one, other, bounds))


def _native(bench: Bench, name: str) -> Bench:
    bench.tell(f"{name} fails in fp64, so the script's own precision is used")
    return replace(bench, dtype="native")


def find_bounds(bench: Bench, one: CommandHistory, dtype: str) -> Bounds:
    """Return the bounds of rounding: known in fp64, otherwise measured by a repeat of A."""
    kinds = {k for rank in one.ranks for a in rank.optimizers.values() for k in a["dtypes"]}
    losses = {b["dtype"] for r in one.ranks for s in r.steps for b in s.backwards}
    if dtype == "fp64" and kinds | losses <= {"torch.float64"}:
        return Bounds()
    repeat = bench.run("A again", one.command, dtype, is_perturbed=True)
    return measure(one, bench.read("A again", repeat))
