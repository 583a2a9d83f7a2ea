"""The proof of an update: its rows, draws and buffers do not depend on the layout (law 14)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from trainer.data.batches import Batches
from trainer.data.preparation import MicroBatch
from trainer.engine.parts import Parts
from trainer.engine.proof.holders import undone
from trainer.engine.proof.judge import Judge, Verdict
from trainer.engine.proof.outside import Traces
from trainer.engine.proof.passes import modes_kept
from trainer.engine.proof.ranks import (
    CLOSE,
    RESULTS,
    digest_rows,
    explain_kept,
    explain_results,
    explain_rows,
    find_rank,
    is_alike,
    padded,
)
from trainer.engine.proof.rows import Cuts, ProofRows, RowReader
from trainer.engine.proof.snapshots import digest_snapshot, find_unequal, take_snapshot
from trainer.engine.proof.step_proof import STEPS, StepProof, Training
from trainer.engine.recording import Loss, Recorder
from trainer.errors import ConfigError
from trainer.rng.philox import seed_step
from trainer.strategy.modules.batchnorm import has_plain_batchnorm
from trainer.strategy.modules.dry_run import eager

MESH = "ranks of the mesh"
LATE = (1, 9, 99, 999)  # steps, 0-based, before which forward and loss are proved again


@dataclass(frozen=True)
class Proving:
    """Parts of a run in training that a proof uses; `say` tells a line."""

    batches: Batches
    say: Callable[[str], None]
    cuts: Sequence[Cuts]
    training: Training
    steps: StepProof


class Proof:
    """Proves each update of a run at its first step, and its values at a few later ones.

    A collective: every rank must make the same updates.
    """

    def __init__(self, parts: Parts, recorder: Recorder, batch: MicroBatch):
        """`batch` is a micro-batch, on a few rows of which draws are rehearsed."""
        self.judge = Judge(parts, recorder, batch)
        self._parts = parts
        self._recorder = recorder
        self.is_running = False
        self._has_updated = False  # in this step
        self._open: Proving | None = None
        self._rows: ProofRows | None = None
        self._step = 0
        self._proved: set[tuple[str, int]] = set()
        self.found: list[str] = []  # lines about this layout
        self.told: set[str] = set()  # all lines
        self._traces = Traces()

    def open(self, batches: Batches, say: Callable[[str], None], training: Training) -> None:
        """Prove updates from now on, on the first rows of these batches; `say` tells a line."""
        if self._parts.config.run.prove:
            cuts = self.judge.list_cuts(not batches.is_streamed)
            steps = StepProof(self._parts, self._recorder, batches, training, self.rehearse)
            self._open = Proving(batches, say, cuts, training, steps)
            self._rows = self._read(self._open, 0)

    def close(self) -> None:
        """Prove nothing from now on."""
        self._rows = self._open = None

    def _read(self, proving: Proving, first: int) -> ProofRows:
        """Read a few rows, the same on every rank: those from the `first` one of the run."""
        unit = self._parts.config.norm_rows or 1
        reader = RowReader(proving.batches, self._parts.strategy.world.devices, unit)
        return reader.read(first, proving.cuts)

    def begin_step(self, step: int) -> None:
        """Begin the 0-based `step`: seed what its hooks draw themselves, and let go of the rows.

        Other rows are read if the step is proved again.
        """
        if self._parts.may_draw:  # seeding takes 12 us
            seed_step(self._parts.config.run.seed, step, self._parts.ranks.group.world.device)
        self._step = step
        self._has_updated = False
        proving = self._open
        if proving is None or step == 0 or not self._proved:
            return
        self._rows = None
        if step in STEPS:
            self._prove_step(proving, step)
        if step in LATE and not self.told:
            self._rows = self._read(proving, max(proving.cuts[0]) * step)

    def end_update(self) -> None:
        """Note that this step has changed the weights."""
        self._has_updated = True

    def of(self, name: str, loss: Loss) -> None:
        """Rehearse the draws of an update at its first step, and prove it if that is due.

        Raises ConfigError for one that is wrong in this layout.
        """
        if not self._parts.draws.is_known(name):
            self.rehearse(name, loss)
        is_first = (name, -1) not in self._proved
        key = (name, -1 if is_first else self._step)
        is_due = is_first or (self._step in LATE and not self.told)
        proving = self._open
        if proving is None or key in self._proved or not is_due:
            return
        if self._rows is None:
            self._rows = self._read(proving, 0)
        self._proved |= {key, (name, self._step)}
        begun = time.monotonic()
        found = self.judge.examine(name, loss, self._rows, self._running())
        for what in self._traces.take():
            why = "in the trial passes of the start, too"
            proving.say(f"note: {what} {why}: runs with another run.prove may differ")
        verdict = self._agreed(found, is_first)
        if not is_first and not verdict.line:
            objective = proving.training.open_objective(name).of(loss)
            with self._running(), modes_kept(self._parts.strategy.module):
                line = self._parts.strategy.prove(self._rows.batch, objective)
            verdict = replace(verdict, line=line, among=MESH)
        self._tell(proving, verdict, name, time.monotonic() - begun, is_first)

    def _prove_step(self, proving: Proving, step: int) -> None:
        """Try the task's own train_step on parts of the rows. A collective."""
        if not proving.steps.is_needed or self.told:
            return
        verdict = proving.steps.examine(step, self._most_cuts(proving), self._running())
        if verdict.unproved:
            proving.say(f"{'proof':<7} of train_step: {verdict.unproved}")
        self._tell(proving, verdict, "train_step", 0.0, False)

    def find_lost(self, names: Sequence[str]) -> list[str]:
        """Return those of some attributes that a resume would miss. A collective."""
        if self._open is None:
            return list(names)
        cuts = self._most_cuts(self._open)
        return self._open.steps.find_lost(names, self._step, cuts, self._running())

    def _most_cuts(self, proving: Proving) -> list[int]:
        """Return the cuts of the most rows that a proof tries."""
        unit = self._parts.config.norm_rows or 1
        return [unit * number for number in max(proving.cuts, key=max)]

    def rehearse(self, name: str, loss: Loss) -> None:
        """Find the random draws of an update by a rehearsal, which leaves the model unchanged."""
        parts = self._parts
        strategy, draws = parts.strategy, parts.draws

        def compute(inputs: Any, targets: Any) -> None:
            strategy.compute(inputs, targets, loss)

        with self._running(), undone(strategy.module, parts.hooks):
            draws.rehearse(name, compute, self.judge.few_rows, parts.config.norm_rows or 1)
        if strategy.mesh.divides_model:
            draws.agree(name, parts.ranks.group.max)
        strategy.tensors.refresh()

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Run model and loss eagerly, without records and requests to stop."""
        self.is_running = True
        watched = self._traces.watched(self._parts.strategy.module, self._parts.hooks)
        try:
            with eager(self._parts.config), self._recorder.closed(), watched:
                yield
        finally:
            self.is_running = False

    def _tell(
        self, proving: Proving, verdict: Verdict, name: str, seconds: float, is_first: bool
    ) -> None:
        line = verdict.line
        if not line:
            what = f"{'proof':<7} " + f"of {name}: " * (name != "loss")
            if is_first:
                said = verdict.unproved or self._agreement()
                tried = f"{verdict.rows} rows tried, " * (not verdict.unproved)
                proving.say(f"{what}{said} ({tried}{seconds:.2f} s)")
            return
        if line in self.told:
            return
        self.told.add(line)
        parts = {"ranks": self._parts.strategy.mesh.data_size}
        parts["micro-batches"] = proving.batches.plan.accumulation
        parts[MESH] = self._parts.strategy.mesh.size
        among = [verdict.among] if verdict.among else ["ranks", "micro-batches"]
        parts = {each: parts[each] for each in among}
        if max(parts.values()) == 1:
            where = verdict.among or "ranks or micro-batches"
            proving.say(f"with more {where} this run would differ: {line}")
            return
        self.found.append(line)
        if self._parts.config.run.prove == "warn":
            proving.say(f"warning: this run differs from one with a single micro-batch: {line}")
            return
        if not self._has_updated:
            self._recorder.end_step()  # so the state is complete, and is saved
        raise ConfigError(f"run.prove=true: {line}; set run.prove=warn to go on all the same")

    def _agreement(self) -> str:
        """Return what does not depend on the layout: plain BatchNorm is outside the proof."""
        strategy, config = self._parts.strategy, self._parts.config
        is_chosen = type(strategy).cut(config).is_fixed or config.strategy.sync_batchnorm
        is_outside = has_plain_batchnorm(strategy.module) and not is_chosen
        outside = "apart from plain BatchNorm, " * is_outside
        return f"{outside}data, random numbers and buffers do not depend on the layout"

    def _agreed(self, verdict: Verdict, is_first: bool) -> Verdict:
        """Return the first verdict of any rank with a line, or that ranks differ. A collective.

        First by a reduction, which fails soon where a rank has ended.
        """
        assert self._rows is not None
        batch, indices = self._rows.batch, self._rows.indices
        group = self._parts.ranks.group
        facts = [*padded(digest_rows(batch), len(indices)), *padded(verdict.results, RESULTS)]
        most = group.max(bool(verdict.line or verdict.unproved), *facts, *(-f for f in facts))
        if not most[0] and is_alike(most[1 : len(facts) + 1], most[len(facts) + 1 :]):
            return verdict
        own = [verdict.line, verdict.among, verdict.unproved]
        every = group.gather([*own, digest_rows(batch), list(verdict.results), verdict.limit])
        found = next((each for each in every if each[0]), every[0])
        if other := find_rank([each[3] for each in every], CLOSE):
            rank, number = other
            return Verdict(explain_rows(rank, int(indices[number])))
        is_judged = not found[0] and not found[2]
        if is_judged and (
            other := find_rank([each[4] for each in every], max(each[5] for each in every))
        ):
            kept = digest_snapshot(take_snapshot(self._parts.strategy.module, self._parts.hooks))
            names = find_unequal(group.gather(kept), other[0])
            if names:
                return Verdict(explain_kept(other[0], names))
            if is_first:  # later the weights may differ, which the drift check names
                return Verdict(explain_results(other[0]))
        return Verdict(found[0], found[1], found[2], rows=verdict.rows)
