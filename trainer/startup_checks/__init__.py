"""The checks before the first step: rows, draws and buffers do not depend on the layout (law 14).

An update is checked at its first step, and its values again at a few later ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trainer.base.errors import ConfigError
from trainer.base.same import CLOSE, find_odd_rank
from trainer.base.same.distance import digest_rows
from trainer.core.data.batches import Batches
from trainer.core.engine.context import Parts
from trainer.core.engine.engine import Engine
from trainer.core.engine.recording import Loss
from trainer.core.engine.trial import Inspection
from trainer.core.state.sandbox import keep_attributes, keep_modes, sandbox
from trainer.core.strategy.modules.batchnorm import describe_cut_statistics, has_plain_batchnorm
from trainer.core.strategy.modules.dry_run import is_large
from trainer.startup_checks.counters import Counters
from trainer.startup_checks.rank_agreement import (
    CallDigest,
    CheckResult,
    Cuts,
    RowReader,
    TrialRows,
    explain_changed,
    explain_kept,
    explain_results,
    explain_rows,
    explain_weights,
    find_first,
    find_place,
    gather_if_ranks_differ,
)
from trainer.startup_checks.row_independence import RowIndependenceCheck
from trainer.startup_checks.snapshots import (
    AttributeSnapshot,
    constants_of,
    digest_snapshot,
    find_unequal,
    held_by,
    take_snapshot,
)
from trainer.startup_checks.step_checks import TRIED_STEPS, StepChecks
from trainer.startup_checks.unsaved import UnsavedState

MESH = "ranks of the mesh"
LATE = (1, 9, 99, 999)  # steps, 0-based, before which forward and loss are checked again
DUE = {step + more for step in (*TRIED_STEPS, *LATE) for more in (0, 1)}  # these, and after them


@dataclass(frozen=True)
class CheckedRun:
    """Parts of a run in training that the checks use; `say` tells a line."""

    batches: Batches
    say: Callable[[str], None]
    cuts: Sequence[Cuts]
    steps: StepChecks


def open_checks(parts: Parts, engine: Engine) -> Inspection:
    """Return the checks of a run, which begin later."""
    return StartupChecks(parts, engine)


class StartupChecks(Inspection):
    """Checks each update of a run at its first step, and its values at a few later ones.

    A collective: every rank must make the same updates.
    """

    due = frozenset(DUE)

    def __init__(self, parts: Parts, engine: Engine):
        self.row_check = RowIndependenceCheck(parts, engine)
        self._parts = parts
        self._engine = engine
        self.is_due = False  # in this step updates are checked again
        self._open: CheckedRun | None = None
        self._rows: TrialRows | None = None
        self._checked: set[tuple[str, int]] = set()
        self.found: list[str] = []  # lines about this layout, which end later checks
        self.told: set[str] = set()  # lines that were told, about any layout
        self._noted: set[str] = set()  # among what notes about another layout say it would show
        self._unsaved = UnsavedState(
            parts.hooks,
            engine.model,
            list(engine.optimizers),
            engine.optimizers.rates.schedule,
            parts.config.packages,
        )

    def begin(self, batches: Batches, say: Callable[[str], None]) -> None:
        """Check updates from now on, on the first rows of these batches; `say` tells a line."""
        if self._parts.config.run.prove:
            cuts = self.row_check.list_cuts(not batches.is_streamed)
            steps = StepChecks(self._parts, self._engine, batches)
            self._open = CheckedRun(batches, say, cuts, steps)
            self._rows = self._read(self._open, 0)

    def close(self) -> None:
        """Check nothing from now on."""
        self._rows = self._open = None

    def _read(self, run: CheckedRun, first: int) -> TrialRows:
        """Read a few rows, the same on every rank: those from the `first` one of the run."""
        unit = self._parts.config.norm_rows or 1
        module, devices = self._parts.strategy.module, self._parts.strategy.world.devices
        hooks = self._parts.hooks
        repeat = Counters(module, hooks).repeat
        with sandbox(keep_attributes(module, hooks)):
            reader = RowReader(run.batches, devices, unit, repeat)
            rows = reader.read(first, run.cuts)
            if rows.changed is None:
                return rows
            before = AttributeSnapshot(held_by(run.batches.dataset, hooks), constants_of(module))
            reader.prepare(rows.indices)
            changed = before.changed(held_by(run.batches.dataset, hooks))
        return replace(rows, reading=explain_changed(rows.changed, changed))

    def begin_step(self, step: int) -> None:
        """Let go of the rows; if updates are checked again in the 0-based `step`, read others.

        The task's own train_step is tried here, if that is due. Called for steps in `DUE`. A
        collective.
        """
        run = self._open
        self.is_due = False
        if run is None or step == 0 or not self._checked:
            return
        self._rows = None
        if step in TRIED_STEPS:
            self._try_step(run, step)
        if step in LATE and not self.found:
            self.is_due = True
            self._rows = self._read(run, max(run.cuts[0]) * step)

    def examine(self, name: str, loss: Loss, step: int) -> None:
        """Check an update at its first step, and if `step` is due.

        Raises ConfigError for one that is wrong in this layout.
        """
        is_first = (name, -1) not in self._checked
        key = (name, -1 if is_first else step)
        run = self._open
        if run is None or key in self._checked or not (is_first or self.is_due):
            return
        if self._rows is None:
            self._rows = self._read(run, 0)
        self._checked |= {key, (name, step)}
        begun = time.monotonic()
        found = self.row_check.examine(name, loss, self._rows, is_first)
        whole = self._parts.strategy.tensors.structure
        had_row = is_first and is_large(whole)  # in the dry run, and no more
        if had_row and any(self._parts.ranks.group.max(bool(found.line))):
            self._engine.trace_draws(name, loss)  # more rows may draw what one does not
            found = self.row_check.examine(name, loss, self._rows, is_first)
        for what in self._engine.effects.take():
            why = "in the trial passes of the start, too"
            run.say(f"note: {what} {why}: runs with another run.prove may differ")
        result = self._agreed(run, name, loss, found, is_first, step)
        if not is_first and not self._is_of_this_layout(run, result):
            objective = self._engine.open_objective(name).of(loss)
            with self._engine.trial(), sandbox(keep_modes(self._parts.strategy.module)):
                line = self._parts.strategy.prove(self._rows.batch, objective)
            if line:
                result = replace(result, line=line, among=MESH)
        self._tell(run, result, name, time.monotonic() - begun, is_first)

    def _try_step(self, run: CheckedRun, step: int) -> None:
        """Try the task's own train_step on parts of the rows. A collective."""
        if not run.steps.is_needed or self.found:
            return
        result = run.steps.examine(step, self._most_cuts(run))
        if result.unproved:
            run.say(f"{'proof':<7} of train_step: {result.unproved}")
        self._tell(run, result, "train_step")

    def find_lost(self, names: Sequence[str], step: int) -> list[str]:
        """Return those of some attributes that a resume after `step` misses. A collective."""
        if self._open is None:
            return list(names)
        cuts = self._most_cuts(self._open)
        return self._open.steps.find_lost(names, step - 1, cuts)

    def _most_cuts(self, run: CheckedRun) -> list[int]:
        """Return the cuts of the most rows that are tried."""
        unit = self._parts.config.norm_rows or 1
        return [unit * row for row in max(run.cuts, key=max)]

    def list_changed(self) -> list[str]:
        return self._unsaved.changed()

    def _tell(
        self,
        run: CheckedRun,
        result: CheckResult,
        name: str,
        seconds: float = 0.0,
        is_first: bool = False,
    ) -> None:
        line = result.line
        if not line:
            what = f"{'proof':<7} " + (f"of {name}: " if name != "loss" else "")
            if is_first:
                said = result.unproved or self._agreement(run.batches.plan.accumulation)
                tried = f"{result.rows} rows tried, " if not result.unproved else ""
                run.say(f"{what}{said} ({tried}{seconds:.2f} s)")
            return
        if line in self.told:
            return
        if not self._is_of_this_layout(run, result):
            is_other = result.among and not self._noted & {result.among, ""}
            if self._noted and not is_other:  # one note is enough, also of what follows from it
                return
            self.told.add(line)
            self._noted.add(result.among)
            where = result.among or "ranks or micro-batches"
            run.say(f"with more {where} this run would differ: {line}")
            return
        self.told.add(line)
        self.found.append(line)
        if self._parts.config.run.prove == "warn":
            run.say(f"warning: this run differs from one with a single micro-batch: {line}")
            return
        raise ConfigError(f"run.prove=true: {line}; set run.prove=warn to go on all the same")

    def _is_of_this_layout(self, run: CheckedRun, result: CheckResult) -> bool:
        """Return True for a line that is about this layout, not only about another one."""
        mesh = self._parts.strategy.mesh
        parts = {"ranks": mesh.data_size, "micro-batches": run.batches.plan.accumulation}
        parts[MESH] = mesh.size
        among = [result.among] if result.among else ["ranks", "micro-batches"]
        return bool(result.line) and max(parts[each] for each in among) > 1

    def _agreement(self, accumulation: int) -> str:
        """Return what does not depend on the layout: BatchNorm over a micro-batch does."""
        strategy, config = self._parts.strategy, self._parts.config
        is_chosen = type(strategy).batch_split(config).is_fixed or config.strategy.sync_batchnorm
        outside = ""
        if has_plain_batchnorm(strategy.module) and not is_chosen:
            outside = "apart from plain BatchNorm, "
        elif describe_cut_statistics(strategy.module, config, accumulation):
            outside = "apart from BatchNorm, "
        return f"{outside}data, random numbers and buffers do not depend on the layout"

    def _agreed(
        self,
        run: CheckedRun,
        name: str,
        loss: Loss,
        result: CheckResult,
        is_first: bool,
        step: int,
    ) -> CheckResult:
        """Return the first result of any rank with a line, or that ranks differ. A collective.

        That they differ comes before a line that is about another layout.
        """
        assert self._rows is not None
        rows = self._rows
        digests = digest_rows(rows.batch)
        own = replace(result, line=rows.reading or result.line)
        group = self._parts.ranks.group
        details = [rows.reading, digests]
        every = gather_if_ranks_differ(group, own, lambda: details, digests, len(rows.indices))
        if not every:
            return result
        if reading := next((details[0] for _, details in every if details[0]), ""):
            return CheckResult(reading)
        if other := find_odd_rank([details[1] for _, details in every], CLOSE):
            return CheckResult(explain_rows(other[0], int(rows.indices[other[1]])))
        results = [each for each, _ in every]
        first_result = find_first(results)
        first_result = first_result or CheckResult()
        is_certain = self._is_of_this_layout(run, first_result) or first_result.unproved
        if not is_certain and all(each.digests for each in results):
            limit = max(each.limit for each in results)
            if other := find_odd_rank([each.digests for each in results], limit):
                return self._name_rank(name, loss, other[0], is_first, step)
        return replace(first_result, rows=result.rows)

    def _name_rank(
        self, name: str, loss: Loss, rank: int, is_first: bool, step: int
    ) -> CheckResult:
        """Return why a rank has other results for the same rows. A collective."""
        assert self._rows is not None
        group = self._parts.ranks.group
        snapshot = take_snapshot(self._parts.strategy.module, self._parts.hooks, has_private=True)
        names = find_unequal(group.gather(digest_snapshot(snapshot)), rank)
        if names:
            return CheckResult(explain_kept(rank, names))
        if not is_first and not self._has_equal_weights():
            return CheckResult(explain_weights(rank, step))
        every = group.gather(self._digest(name, loss, self._rows))
        return CheckResult(explain_results(rank, find_place(every[0], every[rank]) or "the loss"))

    def _has_equal_weights(self) -> bool:
        """Return True if all ranks have the weights of rank 0. A collective."""
        strategy = self._parts.strategy
        if strategy.mesh.divides_model:  # a pass gathers them, so they are equal
            return True
        sums = [float(p.detach().double().sum()) for p in strategy.module.parameters()]
        return find_odd_rank(self._parts.ranks.group.gather(sums), CLOSE) is None

    def digest(self) -> list[CallDigest]:
        """Return numbers that change with what modules and task.loss make of the first rows.

        The rows are the same in every layout. A collective.
        """
        assert self._open is not None
        return self._digest("loss", self._parts.hooks.loss, self._read(self._open, 0))

    def _digest(self, name: str, loss: Loss, rows: TrialRows) -> list[CallDigest]:
        passed = self.row_check.trace(name, loss, rows)
        return [] if passed is None else passed.digest_calls()
