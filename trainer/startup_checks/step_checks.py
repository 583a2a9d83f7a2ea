"""Check of a task's own train_step: state that it keeps of its own rows must not matter later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from trainer.base.errors import one_line
from trainer.base.same import OF_RANKS, ROWS, find_odd_rank
from trainer.core.data.batches import Batches
from trainer.core.engine.context import Parts
from trainer.core.engine.engine import Engine
from trainer.core.engine.trial import Trial
from trainer.core.strategy.modules.batchnorm import has_batch_statistics
from trainer.startup_checks.mismatch import NarrowestDtype
from trainer.startup_checks.rank_agreement import (
    CheckResult,
    explain_kept,
    find_first,
    gather_if_ranks_differ,
)
from trainer.startup_checks.snapshots import Snapshot, digest_snapshot, find_unequal
from trainer.startup_checks.unsaved import FirstValues
from trainer.startup_checks.whole_step import (
    StepTrial,
    StepTrials,
    digest_trial,
    explain_trials,
    have_other_results,
    needs_all_ranks,
)

TRIED_STEPS = (1, 10)  # 0-based, before which train_step is tried: it has kept something by then


Micro = tuple[torch.Tensor, ...]  # the examples of each micro-batch


class StepChecks:
    """Tries a task's train_step on all rows, and on parts of them as ranks or micro-batches."""

    def __init__(self, parts: Parts, engine: Engine, batches: Batches):
        self._parts = parts
        self._engine = engine
        self._batches = batches
        self._first = FirstValues(parts.hooks, parts.strategy.tensors.structure)

    @property
    def is_needed(self) -> bool:
        return self._parts.has_own_step and self._is_possible

    @cached_property
    def _is_possible(self) -> bool:
        """True if steps can be tried. It reads the code of the task, which most starts need not."""
        parts, structure = self._parts, self._parts.strategy.tensors.structure
        return (
            parts.draws.is_by_example
            and not has_batch_statistics(structure)
            and not needs_all_ranks(parts.hooks, structure)
        )

    def examine(self, step: int, cuts: Sequence[int]) -> CheckResult:
        """Try the 0-based `step`; `cuts` bound micro-batches. A collective."""
        own_result = CheckResult()
        tried: StepTrial | None = None
        strategy = self._parts.strategy
        precision = self._parts.precision
        # in full precision if that can be: less is hidden by rounding
        casts = [nullcontext, precision.autocast] if precision.is_narrow else [nullcontext]
        whole = strategy.tensors.whole()
        with whole as module, self._engine.trial(module) as opened:
            for autocast in casts:
                try:
                    tried, own_result = self._try(opened, module, step, cuts, autocast)
                    break
                except Exception as error:
                    why = one_line(error) or type(error).__name__
                    own_result = CheckResult(unproved=f"left out: {why}")
        return self._agreed(own_result, tried)

    def find_lost(self, names: Sequence[str], step: int, cuts: Sequence[int]) -> list[str]:
        """Return those of these attributes whose first values change steps from now on.

        A resume would start with them. All are returned if that cannot be tried. A collective.
        """
        is_known = self._is_possible and all(map(self._first.knows, names))
        if any(self._parts.ranks.group.max(not is_known)):  # attributes may differ among ranks
            return list(names)
        strategy = self._parts.strategy
        rows, _, _ = self._list_rows(step, cuts)
        batch = self._batches.of_examples(*rows)
        try:
            whole = strategy.tensors.whole()
            with whole as module, self._engine.trial(module) as opened:
                trials = StepTrials(self._parts, self._engine, opened, module, nullcontext)
                continued = trials.run(batch, batch, step)
                limit = ROWS.of(continued.updates[0][0][1].dtype)

                def differs(some: set[str]) -> bool:
                    reset = partial(self._first.reset, module, some)
                    resumed = trials.run(batch, batch, step, change=reset)
                    return have_other_results(continued, resumed, limit)

                if not differs(set(names)):
                    return []
                return [name for name in names if differs({name})] or list(names)
        except Exception:
            return list(names)

    def _try(
        self,
        trial: Trial,
        module: nn.Module,
        step: int,
        cuts: Sequence[int],
        autocast: Callable[[], AbstractContextManager[Any]],
    ) -> tuple[StepTrial, CheckResult]:
        parts = self._parts
        trials = StepTrials(parts, self._engine, trial, module, autocast)
        whole_rows, halves_of_rows, cut_rows = self._list_rows(step, cuts)
        read = self._batches.of_examples
        later = read(*whole_rows)
        whole = trials.run(later, later, step)
        ranks = [read(*rows, first=first) for first, rows in enumerate(halves_of_rows)]
        halves = [trials.run(batch, later, step, whole) for batch in ranks]
        cut = [trials.run(read(*rows), later, step, whole) for rows in cut_rows]
        if not whole.updates[0]:
            return whole, CheckResult()
        limit = ROWS.of(whole.updates[0][0][1].dtype)
        if explain_trials(whole, halves, limit) or (cut and explain_trials(whole, cut, limit)):
            types = NarrowestDtype()
            trials.run(later, later, step, types=types)
            limit = max(limit, types.limit)
        is_narrow = parts.precision.dtype.itemsize < 4 or autocast is not nullcontext
        limit = ROWS.narrower if is_narrow else limit
        of_ranks = explain_trials(whole, halves, limit)
        of_rank = explain_trials(whole, cut, limit) if cut else ""
        if of_ranks and of_rank:
            return whole, CheckResult(of_ranks)
        return whole, CheckResult(of_ranks or of_rank, "ranks" if of_ranks else "micro-batches")

    def _list_rows(
        self, step: int, cuts: Sequence[int]
    ) -> tuple[Micro, tuple[Micro, Micro], list[Micro]]:
        """Return the micro-batches of all rows, of two ranks, and of one rank with more of them.

        Those of a fixed tree are not cut.
        """
        config = self._parts.config
        first = self._batches.first_examples
        if type(self._parts.strategy).batch_split(config).is_fixed:
            size = self._batches.plan.micro_batch
            leaves = first(2 * size * step, 2 * size).split(size)
            return leaves, (leaves[:1], leaves[1:]), []
        indices = first(cuts[-1] * step, cuts[-1])
        unit = config.norm_rows or 1
        middle = cuts[-1] // unit // 2 * unit
        halves = ((indices[:middle],), (indices[middle:],))
        return (indices,), halves, [tuple(indices[slice(*each)] for each in pairwise(cuts))]

    def _agreed(self, result: CheckResult, trial: StepTrial | None) -> CheckResult:
        """Return the first result with a line, or that steps differ among ranks. A collective."""
        snapshot: Snapshot = {}
        if trial is not None:
            snapshot = trial.kept
            result = replace(result, digests=digest_trial(trial))
        every = gather_if_ranks_differ(
            self._parts.ranks.group, result, lambda: digest_snapshot(snapshot)
        )
        results = [each for each, _ in every]
        if (first_result := find_first(results)) is not None:
            return first_result
        limit = max(OF_RANKS, ROWS.fp32)
        if (other := find_odd_rank([each.digests for each in results], limit)) is None:
            return result
        names = find_unequal([digests for _, digests in every], other[0])
        return CheckResult(explain_kept(other[0], names), "ranks") if names else result
