"""The check of rows: passes over a few rows, whole and in parts, and what differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from trainer.base.errors import one_line
from trainer.base.same import OF_RANKS, ROWS
from trainer.core.blame import is_out_of_memory
from trainer.core.distributed import accelerator
from trainer.core.engine.context import Parts
from trainer.core.engine.engine import Engine
from trainer.core.engine.recording import Loss
from trainer.core.state.sandbox import keep_attributes, keep_hooks, keep_modes, keep_passes, sandbox
from trainer.core.strategy.modules.batchnorm import has_batch_statistics, look_behind_batchnorm
from trainer.core.strategy.modules.dry_run import LARGE_BYTES, Alone, is_large
from trainer.core.strategy.structure import PROVED_BYTES
from trainer.startup_checks.counters import CounterPasses, Counters, Found, explain_counters
from trainer.startup_checks.explanations import (
    MIXED_IN_PREPARATION,
    PADDED,
    RecordedPasses,
    explain,
    explain_buffers,
    explain_untraced,
    explain_written,
)
from trainer.startup_checks.mismatch import (
    NarrowestDtype,
    compare,
    find_late_hook,
    find_written,
    flatten,
    list_changed,
)
from trainer.startup_checks.passes import (
    CheckedUpdate,
    Depth,
    PassResult,
    SlicedPasses,
)
from trainer.startup_checks.rank_agreement import (
    COSTLY_FLOPS,
    CheckResult,
    Costs,
    Cuts,
    TrialRows,
    count_rows_to_try,
    list_cuts,
)
from trainer.startup_checks.snapshots import AttributeSnapshot, constants_of, state_of
from trainer.startup_checks.trace import Gathering

MOST_FLOPS = 2e13  # of all passes: a minute or more on a CPU
FASTER = 50  # times are accelerators: a second where fp64 has a 64th of the speed of fp32
VERIFY = "use python -m trainer.prove"
Attempt = tuple[torch.dtype | None, Cuts, Depth]


@dataclass(frozen=True)
class FirstPass:
    """The first pass. It `changed` these attributes besides buffers, whose values were `before`."""

    passed: PassResult
    changed: Sequence[str]
    before: AttributeSnapshot
    counters: Counters


@dataclass(frozen=True)
class Pair:
    """A first pass over all rows, and parts of them from the state that it left.

    Later passes depend on `counted`.
    """

    first: FirstPass
    parts: PassResult
    counted: Found


class RowIndependenceCheck:
    """Compares whole rows with parts of them, in a model and a loss."""

    def __init__(self, parts: Parts, engine: Engine):
        self.gathering = Gathering()
        self._parts = parts
        self._engine = engine
        self._flops = 0.0  # of norm_rows rows, on any rank

    def list_cuts(self, is_resident: bool) -> list[Cuts]:
        """Return the cuts of rows to try, in units of run.norm_rows. A collective.

        Rows may differ in length, so the ranks agree on what one costs.
        """
        unit = self._parts.config.norm_rows or 1
        is_fast = accelerator.is_used(self._parts.strategy.world.device)
        flops = unit * self._parts.strategy.flops / (FASTER if is_fast else 1)
        self._flops, size = self._parts.ranks.group.max(flops, unit * self._engine.sample.row_bytes)
        costs = Costs(self._flops, int(size), is_resident)
        count = count_rows_to_try(costs, self._parts.config.data.global_batch // unit)
        return list_cuts(count, self._flops)

    def examine(self, name: str, loss: Loss, rows: TrialRows, is_first: bool) -> CheckResult:
        """Compare whole rows with parts of them. A collective.

        Later passes of a large model have no backward, as two sets of gradients beside the state of
        the optimizer would be the peak of its memory.
        """
        strategy = self._parts.strategy
        structure = strategy.tensors.structure
        size = sum(p.nbytes for p in structure.parameters())
        is_fixed = type(strategy).batch_split(self._parts.config).is_fixed
        if size > PROVED_BYTES:
            return CheckResult(unproved=f"left out for a model of {size / 1e9:.1f} GB; {VERIFY}")
        if 6 * self._flops > MOST_FLOPS:
            return CheckResult(unproved=f"left out, since a few rows would take too long; {VERIFY}")
        deepest: Depth = "backward" if is_first or not is_large(structure) else "graph"
        trials = [*_list_trials(rows.cuts, self._list_wide(), deepest)]
        with self._opened(name, loss, rows) as subject:
            versions = {n: p._version for n, p in subject.module.named_parameters()}
            result = self._try(subject, trials, is_fixed)
            parameters = subject.module.named_parameters()
            written = next((n for n, p in parameters if p._version != versions.get(n)), "")
            if is_large(structure) and written and not result.line:  # which is not put back
                return CheckResult(explain_written(written))
            return result

    def trace(self, name: str, loss: Loss, rows: TrialRows) -> PassResult | None:
        """Return a pass with what each module did, or None if none can be run. A collective."""
        with self._opened(name, loss, rows) as subject:
            _prepare_modes(subject)
            for wide in (*self._list_wide(), None):
                with suppress(Exception):
                    return SlicedPasses(subject, wide).run((0, rows.cuts[0][-1]), is_traced=True)
        return None

    def _list_wide(self) -> list[torch.dtype]:
        """Return the types to compute in, apart from the run's own."""
        wide = [torch.float64] if not self._is_costly() else []
        return wide + ([torch.float32] if self._parts.precision.is_rounded else [])

    def _is_costly(self) -> bool:
        is_slow = 6 * self._flops > COSTLY_FLOPS
        return is_slow or is_large(self._parts.strategy.tensors.structure)

    @contextmanager
    def _opened(self, name: str, loss: Loss, rows: TrialRows) -> Iterator[CheckedUpdate]:
        strategy = self._parts.strategy
        with (
            strategy.tensors.whole() as module,
            sandbox(
                keep_passes(module, most_bytes=LARGE_BYTES),  # a pass has copies: see `examine`
                keep_attributes(module, self._parts.hooks),
                keep_modes(module),
                keep_hooks(module),
            ),
            self._engine.trial(module) as opened,
            opened.gathering_by(self.gathering.take_if_on),
        ):
            yield CheckedUpdate(module, loss, name, self._parts, rows, self.gathering, opened)
        strategy.tensors.refresh()

    def _try(
        self, subject: CheckedUpdate, trials: Sequence[Attempt], is_fixed: bool
    ) -> CheckResult:
        """Compare by the first trial that no rank fails. A collective."""
        if has_batch_statistics(subject.module):
            why = "which normalises the rows of a micro-batch, in evaluation too"
            changes = "ranks and eval.micro_batch change the result"
            line = f"left out for BatchNorm without running statistics, {why}: {changes}"
            return CheckResult(unproved=line)
        _prepare_modes(subject)
        has_halves = self._parts.ranks.group.world.world_size > 1 and self._is_costly()
        if has_halves and (agreement := self._try_halves(subject, trials[0], is_fixed)) is not None:
            return agreement
        why = ""
        too_many = None
        for wide, cuts, depth in trials:
            if too_many is not None and cuts[-1] >= too_many:
                continue
            passes = SlicedPasses(subject, wide, depth)
            result = None
            has_room = True
            try:
                result = self._compare(passes, cuts, is_fixed)
            except Exception as error:
                has_room = not is_out_of_memory(error)
                why = one_line(error)
            failed, is_full = self._parts.ranks.group.max(result is None, not has_room)
            if result is not None and not failed:
                return replace(result, rows=cuts[-1])
            if is_full:
                too_many = cuts[-1]
        if too_many is not None:
            return CheckResult(unproved="left out: memory is not enough for a few rows more")
        return CheckResult(unproved=f"{subject.name} cannot run on a few rows: {why}")

    def _try_halves(
        self, subject: CheckedUpdate, trial: Attempt, is_fixed: bool
    ) -> CheckResult | None:
        """Let one half of the ranks run all rows, and the others their parts. A collective.

        Sums and sketches of gradients then have one spread over all ranks. None if that is more
        than rounding, or a pass fails or leaves anything: then each rank runs both, and names it.
        """
        group = self._parts.ranks.group
        wide, cuts, depth = trial
        passes = SlicedPasses(subject, wide, depth)
        own = None
        module, hooks = subject.module, subject.hooks
        with suppress(Exception), Alone(), sandbox(keep_attributes(module, hooks)):
            is_whole = is_fixed or group.world.rank % 2 == 0
            first = _run_first(passes, (0, cuts[-1]) if is_whole else cuts)
            passed = first.passed
            changes: list[Any] = [passed.written, first.changed, list_changed(module, passed)]
            has_more = first.counters.have_advanced() or find_late_hook(module)
            if not any(changes) and not has_more:
                own = flatten(passed)
        count = 0 if own is None or not own[0].isfinite().all() else len(own[0])
        most = group.max(count, -count)
        if own is None or not count or most[0] != -most[1]:
            return None
        numbers, result_of = own
        most = group.max(*torch.cat([numbers, -numbers]).tolist())
        high, low = torch.tensor(most, dtype=numbers.dtype).split(count)
        limit = self._limit_of(passes, result_of(numbers).dtype)
        mismatch = compare(result_of(high), result_of(-low), limit)
        return CheckResult(rows=cuts[-1], limit=limit) if mismatch is None else None

    def _is_narrow(self, passes: SlicedPasses) -> bool:
        return self._parts.precision.is_narrow and passes.wide is None

    def _limit_of(self, passes: SlicedPasses, dtype: torch.dtype) -> float:
        return ROWS.narrower if self._is_narrow(passes) else ROWS.of(dtype)

    def _compare(self, passes: SlicedPasses, every: Cuts, is_fixed: bool) -> CheckResult:
        """Compare all rows with those between cuts, or only with themselves if that `is_fixed`."""
        cuts = (0, every[-1]) if is_fixed else every
        pair = self._run_both(passes, every, cuts)
        result = self._judge(passes, pair, every, is_fixed)
        limit = max(result.limit, OF_RANKS, self._limit_of(passes, pair.first.passed.dtype))
        return replace(result, digests=pair.first.passed.digest(), limit=limit)

    def _judge(self, passes: SlicedPasses, pair: Pair, every: Cuts, is_fixed: bool) -> CheckResult:
        """Return what a pair of passes says of the rows between cuts."""
        subject = passes.subject
        cuts = (0, every[-1]) if is_fixed else every
        whole, parts = pair.first.passed, pair.parts
        if whole.written and self._parts.strategy.mesh.shard != 1:
            return CheckResult(explain_written(next(iter(whole.written)), "which sharding undoes"))
        limit = self._limit_of(passes, whole.dtype)
        mismatch = compare(whole, parts, limit)
        # such as a cache that the first micro-batch fills
        if mismatch is None and pair.first.changed:
            parts = passes.run(cuts)
            mismatch = compare(whole, parts, limit)
        if mismatch is not None and not self._is_narrow(passes):
            types = NarrowestDtype()
            passes.run((0, cuts[-1]), types=types)
            limit = max(limit, types.limit)
            mismatch = compare(whole, parts, limit)
        if mismatch is not None and whole.has_drawn and not subject.draws.is_by_example:
            return CheckResult(unproved="left out: draws are by micro-batch with run.dropout=torch")
        if mismatch is not None and subject.rows.prepared:
            together = replace(subject, rows=replace(subject.rows, prepared={}))
            sliced = SlicedPasses(together, passes.wide, passes.depth)
            if subject.rows.has_rows and compare(whole, sliced.run(cuts), limit) is None:
                return CheckResult(MIXED_IN_PREPARATION if subject.rows.is_mixed else PADDED)
        if mismatch is not None:
            try:
                return self._name(passes, pair, cuts, limit)
            except Exception:  # a model may not take the hooks of a trace
                return CheckResult(explain_untraced(mismatch, find_written(whole, parts, limit)))
        if pair.counted.names:
            line = explain_counters(pair.counted, dict(subject.module.named_buffers()))
            return CheckResult(
                line, ("micro-batches" if pair.counted.is_of_passes and not is_fixed else "")
            )
        return self._find_changes(passes, every, is_fixed, whole, limit)

    def _name(self, passes: SlicedPasses, pair: Pair, cuts: Cuts, limit: float) -> CheckResult:
        """Name where parts differ from the whole, from one more pass over each, with traces."""
        subject = passes.subject
        whole = passes.run((0, cuts[-1]), is_traced=True)
        # run.buffers=per_step would give each micro-batch the buffers of the step's start: try that
        if not subject.rewinds:
            rewound = compare(whole, passes.run(cuts, rewinds=True), limit)
            buffers = list_changed(subject.module, whole)
            if rewound is None and buffers:
                return CheckResult(explain_buffers(buffers, can_rewind=True), "micro-batches")
            if rewound is not None and rewound.kind == "buffer":
                return CheckResult(explain_buffers(buffers, can_rewind=False))
        parts = passes.run(cuts, is_traced=True)
        is_keyed = bool(subject.draws.traces.used.get(subject.name))
        left = pair.first.before.changed(state_of(subject.module, subject.hooks))
        changed, left = (list(dict.fromkeys(each)) for each in (pair.first.changed, left))
        passed = (pair.first.passed, pair.parts, whole, parts)
        return CheckResult(explain(RecordedPasses(*passed, changed, left, limit, is_keyed)))

    def _run_both(self, passes: SlicedPasses, every: Cuts, cuts: Cuts) -> Pair:
        """Run all rows, then their parts between cuts from the state that these leave."""
        subject = passes.subject
        rows = (0, cuts[-1])
        with sandbox(keep_attributes(subject.module, subject.hooks)):
            first = _run_first(passes, rows)
            whole = first.passed
            run = partial(passes.run, rows, keeps_state=True)
            run_few = partial(passes.run, every[:2], keeps_state=True)
            limit = ROWS.of(whole.dtype)
            of_counters = CounterPasses(whole, run, run_few, subject.rewinds, limit)
            counted = first.counters.find(of_counters)
            parts = passes.run(cuts, keeps_state=True)
            return Pair(first, parts, counted)

    def _find_changes(
        self, passes: SlicedPasses, every: Cuts, is_fixed: bool, whole: PassResult, limit: float
    ) -> CheckResult:
        """Look for what passes change although their results agree: buffers and parameters."""
        subject = passes.subject
        cuts = (0, every[-1]) if is_fixed else every
        changed = list_changed(subject.module, whole)
        if changed and not subject.rewinds:  # as ranks, whose buffers are combined
            rewound = compare(whole, passes.run(cuts, rewinds=True), limit)
            if rewound is not None:
                return CheckResult(explain_buffers(changed, can_rewind=False), "ranks")
        for some in (every, *pairwise(every)) if whole.written else ():
            if name := find_written(whole, passes.run(some), limit):
                return CheckResult(explain_written(name), "" if is_fixed else "ranks")
        if name := find_late_hook(subject.module):
            why = "has a hook on its accumulated gradient, which is that of some rows only"
            return CheckResult(
                f"the parameter {name} {why}; change gradients in train_step, or clip"
            )
        return CheckResult(limit=limit)


def _run_first(passes: SlicedPasses, cuts: Cuts) -> FirstPass:
    """Run rows, and keep the state that they leave."""
    module, hooks = passes.subject.module, passes.subject.hooks
    counters = Counters(module, hooks)
    snapshot = AttributeSnapshot(state_of(module, hooks), constants_of(module))
    passed = passes.run(cuts, keeps_state=True)
    return FirstPass(passed, snapshot.changed(state_of(module, hooks)), snapshot, counters)


def _prepare_modes(subject: CheckedUpdate) -> None:
    """Leave out what is not checked: plain BatchNorm, and draws by micro-batch."""
    look_behind_batchnorm(subject.module)
    if not subject.draws.is_by_example:
        subject.module.eval()


def _list_trials(
    cuts: Sequence[Cuts], wide: Sequence[torch.dtype], deepest: Depth
) -> Iterator[Attempt]:
    """Yield what to try in turn: a wide type or the run's own (None), cuts of rows, depth.

    The last trial has no graph: a reentrant recomputation takes no gradients of chosen inputs.
    """
    for dtype in (*wide, None):
        yield from ((dtype, each, deepest) for each in cuts)
    yield None, cuts[-1], "forward"
