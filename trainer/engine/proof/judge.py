"""The judge of a proof: passes over a few rows, whole and in parts, and what differs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, pairwise
from typing import NamedTuple

import torch
from torch import nn

from trainer.data.preparation import MicroBatch
from trainer.distributed import accelerator
from trainer.engine.parts import Parts
from trainer.engine.proof.finding import (
    Mismatch,
    compare,
    explain,
    explain_buffers,
    find_advancing,
    limit_of,
    list_changed,
)
from trainer.engine.proof.gathering import Gathering
from trainer.engine.proof.holders import Holders, of_model, of_task, undone
from trainer.engine.proof.passes import (
    Loss,
    Passed,
    ProofPasses,
    Subject,
    has_batch_statistics,
    look_behind_batchnorm,
    modes_kept,
    tensors_with_axes,
)
from trainer.engine.proof.ranks import digest_pass
from trainer.engine.proof.trace import describe, find_module
from trainer.errors import one_line
from trainer.hook_errors import is_out_of_memory
from trainer.micro_batch import count_rows, take_rows
from trainer.strategy.mesh_model.full_model import PROVED_BYTES

# Of rows, times run.norm_rows: more rows see more; the second ones if one row is too few.
MANY_CUTS = ((0, 3, 6, 8),)  # two of one size: a model may keep state as long as that stays
CUTS = ((0, 1, 3), (0, 2, 4))
MOST_FLOPS = 2e13  # of a proof: a minute or more on a CPU
FP64_FLOPS = 2e10  # more of them are computed in fewer bits, on fewer rows
FASTER = 50  # times are accelerators: a second where fp64 has a 64th of the speed of fp32
FEW_CUTS = ((0, 1, 2), (0, 2, 4))
MANY = 8  # rows that are read
EVERY = (*MANY_CUTS, *CUTS, *FEW_CUTS)
# All that is taken of them, between neighbouring cuts or whole.
TAKEN = {*chain(*map(pairwise, EVERY)), *((0, cuts[-1]) for cuts in EVERY)}
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
Trial = tuple[torch.dtype | None, Sequence[int], bool]


class ProofRows(NamedTuple):
    """Rows of the run, prepared together.

    `prepared` has some of them prepared alone, by first and last, if the others change their sizes.
    If they are `mixed`, the others change their values.
    """

    batch: MicroBatch
    indices: torch.Tensor
    prepared: Mapping[tuple[int, int], MicroBatch]
    is_mixed: bool


Running = AbstractContextManager[None]


@dataclass(frozen=True)
class Verdict:
    """The result of a proof: a line about the first dependence on the layout, else an empty one.

    `among` tells where it shows: among "ranks", among the "micro-batches" of a rank, or both.
    `unproved` says why nothing could be found out. `results` are digests of a pass, which agree on
    all ranks up to `limit`.
    """

    line: str = ""
    among: str = ""
    unproved: str = ""
    results: Sequence[float] = ()
    limit: float = 0.0


class Judge:
    """Compares whole rows with parts of them, in a model and a loss."""

    def __init__(self, parts: Parts, batch: MicroBatch):
        """`batch` is a micro-batch of the run: so many rows fit into memory."""
        self.gathering = Gathering()
        self.few_rows = take_rows(batch, 3 * (parts.config.norm_rows or 1))
        self._most_rows = count_rows(batch)
        self._is_fast = accelerator.is_used(parts.strategy.world.device)
        self._parts = parts

    def examine(
        self, name: str, loss: Loss, rows: ProofRows, is_late: bool, running: Running
    ) -> Verdict:
        """Compare whole rows with parts of them. A collective."""
        strategy = self._parts.strategy
        size = sum(p.nbytes for p in strategy.tensors.structure.parameters())
        passed = 2 * CUTS[0][-1] * (self._parts.config.norm_rows or 1)
        # rows may differ in length and number
        work = passed * strategy.flops / (FASTER if self._is_fast else 1)
        flops, least = self._parts.ranks.group.max(work, -self._most_rows)
        is_fixed = type(strategy).cut(self._parts.config).is_fixed
        if rows.is_mixed and not is_fixed:
            return Verdict(MIXED)
        if size > PROVED_BYTES:
            return Verdict(unproved=f"left out for a model of {size / 1e9:.1f} GB; {VERIFY}")
        if flops > MOST_FLOPS:
            return Verdict(unproved=f"left out, since a few rows would take too long; {VERIFY}")
        with (
            strategy.tensors.whole() as module,
            undone(module, self._parts.hooks),
            modes_kept(module),
            running,
        ):
            subject = self._subject(module, name, loss, rows)
            fp32 = [torch.float32] * self._parts.precision.is_rounded
            trials = _list_trials(flops, size, -int(least) // subject.unit, fp32)
            verdict = self._judge(subject, trials, is_late, is_fixed)
        strategy.tensors.refresh()
        return verdict

    def _subject(self, module: nn.Module, name: str, loss: Loss, rows: ProofRows) -> Subject:
        parts = self._parts
        strategy = parts.strategy
        is_sharded = strategy.mesh.shard > 1 and not strategy.mesh.divides_model
        return Subject(
            module=module,
            loss=loss,
            name=name,
            batch=rows.batch,
            indices=rows.indices,
            unit=parts.config.norm_rows or 1,
            draws=parts.draws,
            autocast=parts.precision.autocast,
            is_plain=not is_sharded,
            rewinds=strategy.statistics.rows is not None,
            gathering=self.gathering,
            devices=strategy.world.devices,
            prepared=rows.prepared,
        )

    def _judge(
        self, subject: Subject, trials: Iterable[Trial], is_late: bool, is_fixed: bool
    ) -> Verdict:
        """Compare by the first trial that no rank fails. A collective."""
        if has_batch_statistics(subject.module):
            why = "which normalises the rows of a micro-batch, in evaluation too"
            changes = "ranks and eval.micro_batch change the result"
            line = f"left out for BatchNorm without running statistics, {why}: {changes}"
            return Verdict(unproved=line)
        lengths = {len(leaf) for leaf in tensors_with_axes(subject.batch)}
        (is_odd,) = self._parts.ranks.group.max(lengths != {len(subject.indices)})
        if is_odd:
            return Verdict(unproved="left out for tensors in the batch that have no axis of rows")
        look_behind_batchnorm(subject.module)
        if not subject.draws.is_by_example:
            subject.module.eval()
        why = ""
        for wide, every, differentiates in trials:
            cuts = (*every[:1], *every[-1:]) if is_fixed else every
            scaled = [cut * subject.unit for cut in cuts]
            passes = ProofPasses(subject, wide, differentiates and not is_late)
            verdict = None
            has_room = True
            try:
                verdict = self._compare(subject, passes, scaled)
            except Exception as error:
                has_room = not is_out_of_memory(error)
                why = one_line(error)
            failed, is_full = self._parts.ranks.group.max(verdict is None, not has_room)
            if verdict is not None and not failed:
                return verdict
            if is_full:
                return Verdict(unproved="left out: memory is not enough for a few rows more")
        return Verdict(unproved=f"{subject.name} cannot run on a few rows: {why}")

    def _compare(self, subject: Subject, passes: ProofPasses, cuts: Sequence[int]) -> Verdict:
        whole = passes.run((0, cuts[-1]))
        parts = passes.run(cuts)
        limit = limit_of(whole, self._parts.precision.is_narrow and passes.wide is None)
        found = compare(whole, parts, limit)
        if found is not None and whole.has_drawn and not subject.draws.is_by_example:
            return Verdict(unproved="left out: draws are by micro-batch with run.dropout=torch")
        if found is not None and subject.prepared:
            subject = replace(subject, prepared={})
            passes = ProofPasses(subject, passes.wide)
            if compare(whole, passes.run(cuts), limit) is None:
                return Verdict(PADDED)
        if found is not None:
            try:
                return self._name(subject, passes, cuts, limit)
            except Exception:  # a model may not take the hooks of a trace
                return Verdict(explain(found, whole, parts, limit))
        if len(cuts) == 2:  # of a fixed tree, whose micro-batches are not cut
            again = partial(passes.run, cuts)
            resets = self._parts.config.run.buffers == "per_step"
            if line := find_advancing(subject.module, whole, again, limit, resets):
                return Verdict(line)
        changed = list_changed(subject.module, whole)
        if changed and not subject.rewinds:  # as ranks, whose buffers are combined
            rewound = compare(whole, passes.run(cuts, rewinds=True), limit)
            if rewound is not None:
                return Verdict(explain_buffers(changed, can_rewind=False), "ranks")
        if name := _find_late_hook(subject.module):
            why = "has a hook on its accumulated gradient, which is that of some rows only"
            return Verdict(f"the parameter {name} {why}; change gradients in train_step, or clip")
        return Verdict(results=digest_pass(whole), limit=limit)

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


def _list_trials(
    flops: float, size: int, most_rows: int, fp32: Sequence[torch.dtype]
) -> Iterator[Trial]:
    """Yield what to try in turn: fp64, fp32 or the run's precision (None), cuts of rows, gradients.

    `size` is that of the model in bytes, `most_rows` the units of a micro-batch, which fit into
    memory. The last trial is without gradients: a reentrant recomputation has none.
    """
    cuts: Sequence[Sequence[int]] = FEW_CUTS if flops > FP64_FLOPS else CUTS
    if flops * MANY / CUTS[0][-1] < FP64_FLOPS:
        cuts = MANY_CUTS
    fitting = [each for each in cuts if each[-1] <= max(2, most_rows)] or FEW_CUTS[:1]
    is_large = flops > FP64_FLOPS or size > FP64_BYTES
    for wide in (*[torch.float64] * (not is_large), *fp32, None):
        yield from ((wide, each, True) for each in fitting)
    yield None, fitting[-1], False


def _name_draws(first: Passed, again: Passed, limit: float, changed: Sequence[str]) -> str:
    """Return a line if the same rows gave two results, else an empty one."""
    if compare(first, again, limit) is None:
        return ""
    where = _place(first, again, limit)
    if first.written:
        return explain(Mismatch("parameter"), first, again, limit)
    if changed:
        why = f"depends on {', '.join(changed)}, which it changes and no buffer holds"
        return f"{where} {why}; make it a buffer, or a function of self.step"
    return f"{where} draws unseeded random numbers; use torch.rand"


def _place(first: Passed, other: Passed, limit: float) -> str:
    found = None
    if first.traces and other.traces:
        found = find_module(first.traces[0], other.traces, limit)
    return "the loss" if found is None else describe(*found)
