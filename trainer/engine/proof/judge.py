"""The judge of a proof: passes over a few rows, whole and in parts, and what differs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import nn

from trainer.data.preparation import MicroBatch
from trainer.distributed import accelerator
from trainer.engine.parts import Parts
from trainer.engine.proof.finding import (
    compare,
    explain,
    explain_buffers,
    explain_written,
    find_written,
    list_changed,
)
from trainer.engine.proof.gathering import Gathering
from trainer.engine.proof.holders import Holders, of_model, of_task, undone
from trainer.engine.proof.limits import NARROW, OF_RANKS, NarrowestDtype, limit_of_type
from trainer.engine.proof.passes import (
    Passed,
    ProofPasses,
    Subject,
    has_batch_statistics,
    look_behind_batchnorm,
    modes_kept,
    tensors_with_axes,
)
from trainer.engine.proof.ranks import digest_pass
from trainer.engine.proof.rows import (
    FP64_FLOPS,
    Costs,
    Cuts,
    ProofRows,
    count_rows_to_try,
    list_cuts,
)
from trainer.engine.proof.trace import describe, find_module
from trainer.engine.recording import Loss, Recorder
from trainer.errors import one_line
from trainer.hook_errors import is_out_of_memory
from trainer.micro_batch import count_rows, take_rows
from trainer.strategy.mesh_model.full_model import PROVED_BYTES

MOST_FLOPS = 2e13  # of a proof: a minute or more on a CPU
FASTER = 50  # times are accelerators: a second where fp64 has a 64th of the speed of fp32
FP64_BYTES = 2**27  # of a model that is copied in fp64
MIXED = (
    "a row is prepared otherwise with other rows beside it, by __getitems__, collate, split_batch"
    " or augment; prepare each row from itself, and draw with the `random` that augment gets"
)
PADDED = (
    "the loss of a row depends on its padding, which is as long as the longest row beside it;"
    " divide by its own tokens, as a loss of (values, weights) does, or pad all rows to one length"
)
VERIFY = "use python -m trainer.verify"
Trial = tuple[torch.dtype | None, Cuts, bool]
Running = AbstractContextManager[None]


@dataclass(frozen=True)
class Verdict:
    """The result of a proof: a line about the first dependence on the layout, else an empty one.

    `among` tells where it shows: among "ranks", among the "micro-batches" of a rank, or both.
    `unproved` says why nothing could be found out. `results` are digests of a pass, which agree on
    all ranks up to `limit`. `rows` were tried.
    """

    line: str = ""
    among: str = ""
    unproved: str = ""
    results: Sequence[float] = ()
    limit: float = 0.0
    rows: int = 0


class Judge:
    """Compares whole rows with parts of them, in a model and a loss."""

    def __init__(self, parts: Parts, recorder: Recorder, batch: MicroBatch):
        """`batch` is a micro-batch of the run."""
        self.gathering = Gathering()
        self.few_rows = take_rows(batch, 3 * (parts.config.norm_rows or 1))
        self._row_bytes = sum(t.nbytes for t in tensors_with_axes(batch)) / count_rows(batch)
        self._parts = parts
        self._recorder = recorder
        self._flops = 0.0  # of norm_rows rows, on any rank

    def list_cuts(self, is_resident: bool) -> list[Cuts]:
        """Return the cuts of rows to try, in units of run.norm_rows. A collective.

        Rows may differ in length, so the ranks agree on what one costs.
        """
        unit = self._parts.config.norm_rows or 1
        is_fast = accelerator.is_used(self._parts.strategy.world.device)
        flops = unit * self._parts.strategy.flops / (FASTER if is_fast else 1)
        self._flops, size = self._parts.ranks.group.max(flops, unit * self._row_bytes)
        costs = Costs(self._flops, int(size), is_resident)
        count = count_rows_to_try(costs, self._parts.config.data.global_batch // unit)
        return list_cuts(count, self._flops)

    def examine(self, name: str, loss: Loss, rows: ProofRows, running: Running) -> Verdict:
        """Compare whole rows with parts of them. A collective."""
        strategy = self._parts.strategy
        size = sum(p.nbytes for p in strategy.tensors.structure.parameters())
        is_fixed = type(strategy).cut(self._parts.config).is_fixed
        if size > PROVED_BYTES:
            return Verdict(unproved=f"left out for a model of {size / 1e9:.1f} GB; {VERIFY}")
        if 6 * self._flops > MOST_FLOPS:
            return Verdict(unproved=f"left out, since a few rows would take too long; {VERIFY}")
        with (
            strategy.tensors.whole() as module,
            strategy.standing_in(module),
            undone(module, self._parts.hooks),
            modes_kept(module),
            running,
        ):
            subject = self._subject(module, name, loss, rows)
            is_large = 6 * self._flops > FP64_FLOPS or size > FP64_BYTES
            wide = [torch.float64] * (not is_large)
            wide += [torch.float32] * self._parts.precision.is_rounded
            verdict = self._judge(subject, _list_trials(rows.cuts, wide), is_fixed)
        strategy.tensors.refresh()
        return verdict

    def _subject(self, module: nn.Module, name: str, loss: Loss, rows: ProofRows) -> Subject:
        parts = self._parts
        strategy = parts.strategy
        return Subject(
            module=module,
            loss=loss,
            name=name,
            batch=rows.batch,
            indices=rows.indices,
            unit=parts.config.norm_rows or 1,
            draws=parts.draws,
            autocast=parts.precision.autocast,
            keeps_writes=strategy.mesh.shard == 1,
            rewinds=strategy.statistics.rows is not None,
            gathering=self.gathering,
            recorder=self._recorder,
            devices=strategy.world.devices,
            prepared=rows.prepared,
            is_mixed=rows.is_mixed,
            has_rows=rows.has_rows,
        )

    def _judge(self, subject: Subject, trials: Iterable[Trial], is_fixed: bool) -> Verdict:
        """Compare by the first trial that no rank fails. A collective."""
        if has_batch_statistics(subject.module):
            why = "which normalises the rows of a micro-batch, in evaluation too"
            changes = "ranks and eval.micro_batch change the result"
            line = f"left out for BatchNorm without running statistics, {why}: {changes}"
            return Verdict(unproved=line)
        look_behind_batchnorm(subject.module)
        if not subject.draws.is_by_example:
            subject.module.eval()
        why = ""
        too_many = None
        for wide, cuts, differentiates in trials:
            if too_many is not None and cuts[-1] >= too_many:
                continue
            passes = ProofPasses(subject, wide, differentiates)
            verdict = None
            has_room = True
            try:
                verdict = self._compare(subject, passes, cuts, is_fixed)
            except Exception as error:
                has_room = not is_out_of_memory(error)
                why = one_line(error)
            failed, is_full = self._parts.ranks.group.max(verdict is None, not has_room)
            if verdict is not None and not failed:
                return replace(verdict, rows=cuts[-1])
            if is_full:
                too_many = cuts[-1]
        if too_many is not None:
            return Verdict(unproved="left out: memory is not enough for a few rows more")
        return Verdict(unproved=f"{subject.name} cannot run on a few rows: {why}")

    def _compare(
        self, subject: Subject, passes: ProofPasses, every: Cuts, is_fixed: bool
    ) -> Verdict:
        """Compare all rows with those between cuts, or only with themselves if that `is_fixed`."""
        cuts = (0, every[-1]) if is_fixed else every
        whole = passes.run((0, cuts[-1]))
        if whole.written and not subject.keeps_writes:
            return Verdict(explain_written(next(iter(whole.written)), "which sharding undoes"))
        parts = passes.run(cuts)
        is_narrow = self._parts.precision.is_narrow and passes.wide is None
        limit = NARROW if is_narrow else limit_of_type(whole.dtype)
        found = compare(whole, parts, limit)
        if found is not None and not is_narrow:
            types = NarrowestDtype()
            passes.run((0, cuts[-1]), types=types)
            limit = max(limit, types.limit)
            found = compare(whole, parts, limit)
        if found is not None and whole.has_drawn and not subject.draws.is_by_example:
            return Verdict(unproved="left out: draws are by micro-batch with run.dropout=torch")
        if found is not None and subject.prepared:
            together = replace(subject, prepared={})
            sliced = ProofPasses(together, passes.wide)
            if subject.has_rows and compare(whole, sliced.run(cuts), limit) is None:
                return Verdict(MIXED if subject.is_mixed else PADDED)
        if found is not None:
            try:
                return self._name(subject, passes, cuts, limit)
            except Exception:  # a model may not take the hooks of a trace
                return Verdict(explain(found, whole, parts, limit))
        return self._find_changes(subject, passes, every, is_fixed, whole, limit)

    def _find_changes(
        self,
        subject: Subject,
        passes: ProofPasses,
        every: Cuts,
        is_fixed: bool,
        whole: Passed,
        limit: float,
    ) -> Verdict:
        """Look for what passes change although their results agree: buffers and parameters."""
        cuts = (0, every[-1]) if is_fixed else every
        changed = list_changed(subject.module, whole)
        if changed and not subject.rewinds:  # as ranks, whose buffers are combined
            rewound = compare(whole, passes.run(cuts, rewinds=True), limit)
            if rewound is not None:
                return Verdict(explain_buffers(changed, can_rewind=False), "ranks")
        for some in (every, *pairwise(every)) if whole.written else ():
            if name := find_written(whole, passes.run(some), limit):
                return Verdict(explain_written(name), "" if is_fixed else "ranks")
        if name := _find_late_hook(subject.module):
            why = "has a hook on its accumulated gradient, which is that of some rows only"
            return Verdict(f"the parameter {name} {why}; change gradients in train_step, or clip")
        return Verdict(results=digest_pass(whole), limit=max(limit, OF_RANKS))

    def _name(
        self, subject: Subject, passes: ProofPasses, cuts: Sequence[int], limit: float
    ) -> Verdict:
        """Return a line about a difference, by a few more passes with traces."""
        rows = (0, cuts[-1])
        holders = Holders([*of_model(subject.module), *of_task(self._parts.hooks)])
        first = passes.run(rows, is_traced=True)
        changed = holders.changed([*of_model(subject.module), *of_task(self._parts.hooks)])
        again = passes.run(rows, is_traced=True)
        if line := _name_draws(first, again, limit, changed):
            return Verdict(line)
        if not subject.rewinds:
            rewound = compare(first, passes.run(cuts, rewinds=True), limit)
            names = list_changed(subject.module, first)
            if rewound is None and names:
                return Verdict(explain_buffers(names, can_rewind=True), "micro-batches")
            if rewound is not None and rewound.kind == "buffer":
                return Verdict(explain_buffers(names, can_rewind=False))
        parts = passes.run(cuts, is_traced=True)
        found = compare(first, parts, limit)
        if found is None:
            why = "model or loss give other results from time to time"
            advice = "look for what starts with the first batch, rare draws of numpy, and threads"
            return Verdict(f"{why}; {advice}")
        return Verdict(explain(found, first, parts, limit))


def _find_late_hook(module: nn.Module) -> str:
    """Return a parameter with a hook of the user's that no pass here can call, or ""."""
    for name, parameter in module.named_parameters():
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        own = ("trainer.", "torch.")
        if any(not str(getattr(h, "__module__", "")).startswith(own) for h in hooks.values()):
            return name
    return ""


def _list_trials(cuts: Sequence[Cuts], wide: Sequence[torch.dtype]) -> Iterator[Trial]:
    """Yield what to try in turn: a wide type or the run's own (None), cuts of rows, gradients.

    The last trial is without gradients: a reentrant recomputation has none.
    """
    for dtype in (*wide, None):
        yield from ((dtype, each, True) for each in cuts)
    yield None, cuts[-1], False


def _name_draws(first: Passed, again: Passed, limit: float, changed: Sequence[str]) -> str:
    """Return a line if the same rows gave two results, else an empty one."""
    if compare(first, again, limit) is None:
        return ""
    where = _place(first, again, limit)
    if name := find_written(first, again, limit):
        return explain_written(name)
    if changed:
        why = f"depends on {', '.join(changed)}, which it changes and no buffer holds"
        return f"{where} {why}; make it a buffer, or a function of self.step"
    return f"{where} draws unseeded random numbers; use torch.rand"


def _place(first: Passed, other: Passed, limit: float) -> str:
    found = None
    if first.traces and other.traces:
        found = find_module(first.traces[0], other.traces, limit)
    return "the loss" if found is None else describe(*found)
