"""The proof of an update: its rows, draws and buffers do not depend on the layout (law 14)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainer.data.batches import Batches
from trainer.data.preparation import MicroBatch
from trainer.engine.parts import Parts
from trainer.engine.proof.finding import (
    compare,
    explain,
    explain_buffers,
    limit_of,
    list_changed,
)
from trainer.engine.proof.gathering import Gathering
from trainer.engine.proof.holders import Holders, attributes_kept, of_model, of_task
from trainer.engine.proof.passes import (
    Loss,
    Passed,
    ProofPasses,
    Subject,
    has_batch_statistics,
)
from trainer.engine.proof.ranks import (
    CLOSE,
    RESULTS,
    digest_pass,
    digest_rows,
    explain_results,
    explain_rows,
    find_rank,
    is_alike,
    padded,
)
from trainer.engine.proof.trace import find_module
from trainer.engine.recording import Recorder
from trainer.errors import ConfigError, one_line
from trainer.hook_errors import is_out_of_memory
from trainer.micro_batch import take_rows
from trainer.strategy.mesh_model.full_model import PROVED_BYTES
from trainer.strategy.modules.dry_run import untouched

LATE = (1, 9, 99, 999)  # steps, 0-based, before which forward and loss are proved again
# Of rows, times run.norm_rows: more rows see more; the second ones if one row is too few.
MANY_CUTS = ((0, 3, 8),)
CUTS = ((0, 1, 3), (0, 2, 4))
MOST_FLOPS = 2e13  # of a proof: a minute or more on a CPU
FP64_FLOPS = 2e10  # more of them are computed in the run's precision, on fewer rows
FEW_CUTS = ((0, 1, 2), (0, 2, 4))
MANY = 8  # rows that are read


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


class Proof:
    """Proves each update of a run at its first step, and its values at a few later ones.

    A collective: every rank must make the same updates.
    """

    def __init__(self, parts: Parts, recorder: Recorder, batch: MicroBatch):
        """`batch` is a micro-batch, on a few rows of which draws are rehearsed."""
        self.gathering = Gathering()
        self._parts = parts
        self._recorder = recorder
        self._few_rows = take_rows(batch, 3 * (parts.config.norm_rows or 1))
        self._batches: Batches | None = None
        self._rows: tuple[MicroBatch, torch.Tensor] | None = None  # and their indices
        self._say: Callable[[str], None] = print
        self._step = 0
        self._proved: set[tuple[str, int]] = set()
        self.found: list[str] = []  # lines, each told once

    def open(self, batches: Batches, say: Callable[[str], None]) -> None:
        """Prove updates from now on, on the first rows of these batches; `say` tells a line."""
        self._batches = batches
        self._say = say
        self._read(0)

    def _read(self, first: int) -> None:
        """Read a few rows, the same on every rank: those from the `first` one of the run."""
        assert self._batches is not None
        rows = MANY * (self._parts.config.norm_rows or 1)
        indices = self._batches.first_examples(first, rows)
        self._rows = next(iter(self._batches.of_examples(indices))), indices

    @property
    def is_running(self) -> bool:
        return self.gathering.is_on

    def close(self) -> None:
        """Prove nothing from now on."""
        self._rows = self._batches = None

    def begin_step(self, step: int) -> None:
        self._step = step
        if self._batches is not None and step in LATE and not self.found:
            self._read(MANY * step)

    def of(self, name: str, loss: Loss) -> None:
        """Rehearse the draws of an update at its first step, and prove it if that is due.

        Raises ConfigError for one that is wrong in this layout.
        """
        if not self._parts.draws.is_known(name):
            self.rehearse(name, loss)
        is_first = (name, -1) not in self._proved
        key = (name, -1 if is_first else self._step)
        is_due = is_first or (self._step in LATE and not self.found)
        if self._rows is None or key in self._proved or not is_due:
            return
        self._proved |= {key, (name, self._step)}
        begun = time.monotonic()
        verdict = self._agreed(self.examine(name, loss, is_late=not is_first), is_first)
        self._tell(verdict, name, time.monotonic() - begun, is_first)

    def rehearse(self, name: str, loss: Loss) -> None:
        """Find the random draws of an update by a rehearsal, which leaves the model unchanged."""
        parts = self._parts
        strategy, draws = parts.strategy, parts.draws

        def compute(inputs: Any, targets: Any) -> None:
            strategy.compute(inputs, targets, loss)

        with self._eagerly(), untouched(strategy.module), self._recorder.closed():
            draws.rehearse(name, compute, self._few_rows, parts.config.norm_rows or 1)
        if strategy.mesh.divides_model:
            draws.agree(name, parts.ranks.group.max)
        strategy.tensors.refresh()

    def _eagerly(self) -> AbstractContextManager:
        is_compiled = self._parts.config.run.compile
        return torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()

    def _tell(self, verdict: Verdict, name: str, seconds: float, is_first: bool) -> None:
        line = verdict.line
        if not line:
            what = f"proof of {name}: " if name != "loss" else "proof: "
            if verdict.unproved and is_first:
                self._say(f"{what}{verdict.unproved} ({seconds:.2f} s)")
            elif is_first:
                self._say(f"{what}rows, draws and buffers agree ({seconds:.2f} s)")
            return
        if line in self.found:
            return
        self.found.append(line)
        assert self._batches is not None
        parts = {"ranks": self._parts.strategy.mesh.data_size}
        parts["micro-batches"] = self._batches.plan.accumulation
        if verdict.among:
            parts = {verdict.among: parts[verdict.among]}
        if max(parts.values()) == 1:
            where = verdict.among or "ranks or micro-batches"
            self._say(f"with more {where} this run would differ: {line}")
        elif self._parts.config.run.prove == "warn":
            self._say(f"warning: this run differs from one of one micro-batch: {line}")
        else:
            self._recorder.end_step()  # nothing is updated yet, so the state is complete
            raise ConfigError(f"run.prove=true: {line}; set run.prove=warn to go on all the same")

    def _agreed(self, verdict: Verdict, is_first: bool) -> Verdict:
        """Return the first verdict of any rank with a line, or that ranks differ. A collective.

        First by a reduction, which fails soon where a rank has ended.
        """
        assert self._rows is not None
        batch, indices = self._rows
        group = self._parts.ranks.group
        facts = [*padded(digest_rows(batch), len(indices)), *padded(verdict.results, RESULTS)]
        facts = facts if is_first else []
        most = group.max(bool(verdict.line or verdict.unproved), *facts, *(-f for f in facts))
        if not most[0] and is_alike(most[1 : len(facts) + 1], most[len(facts) + 1 :]):
            return verdict
        own = [verdict.line, verdict.among, verdict.unproved]
        every = group.gather([*own, digest_rows(batch), list(verdict.results)])
        found = next((each for each in every if each[0]), every[0])
        if is_first and (other := find_rank([each[3] for each in every], CLOSE)):
            rank, number = other
            return Verdict(explain_rows(rank, int(indices[number])))
        is_judged = is_first and not found[0] and not found[2]
        if is_judged and (other := find_rank([each[4] for each in every], verdict.limit)):
            return Verdict(explain_results(other[0]))
        return Verdict(*found[:3])

    def examine(self, name: str, loss: Loss, is_late: bool = False) -> Verdict:
        """Compare whole rows with parts of them. A collective."""
        strategy = self._parts.strategy
        size = sum(p.nbytes for p in strategy.tensors.structure.parameters())
        flops = 2 * CUTS[0][-1] * (self._parts.config.norm_rows or 1) * strategy.flops
        if size > PROVED_BYTES or flops > MOST_FLOPS:
            what = f"a model of {size / 1e9:.1f} GB" if size > PROVED_BYTES else "so large rows"
            return Verdict(unproved=f"left out for {what}; use python -m trainer.verify")
        with (
            strategy.tensors.whole() as module,
            untouched(module),
            attributes_kept(module, self._parts.hooks),
            self._recorder.closed(),
            self._eagerly(),
        ):
            subject = self._subject(module, name, loss)
            verdict = self._judge(subject, flops, is_late)
        strategy.tensors.refresh()
        return verdict

    def _subject(self, module: nn.Module, name: str, loss: Loss) -> Subject:
        assert self._rows is not None
        batch, indices = self._rows
        parts = self._parts
        strategy = parts.strategy
        is_sharded = strategy.mesh.shard > 1 and not strategy.mesh.divides_model
        return Subject(
            module=module,
            loss=loss,
            name=name,
            batch=batch,
            indices=indices,
            unit=parts.config.norm_rows or 1,
            draws=parts.draws,
            autocast=parts.precision.autocast,
            is_plain=not is_sharded,
            rewinds=strategy.statistics.rows is not None,
            gathering=self.gathering,
        )

    def _judge(self, subject: Subject, flops: float, is_late: bool) -> Verdict:
        is_fixed = type(self._parts.strategy).cut(self._parts.config).is_fixed
        module = subject.module
        if has_batch_statistics(module):
            why = "left out for BatchNorm without running statistics, which normalises the rows"
            return Verdict(unproved=why)
        if self._parts.config.run.dropout == "torch":
            module.eval()
        why = ""
        try:
            for own, every, differentiates in _list_trials(flops):
                cuts = (*every[:1], *every[-1:]) if is_fixed else every
                scaled = [cut * subject.unit for cut in cuts]
                passes = ProofPasses(subject, own, differentiates and not is_late)
                try:
                    return self._compare(subject, passes, scaled)
                except Exception as error:
                    why = f"{subject.name} cannot run on a few rows: {one_line(error)}"
                    if is_out_of_memory(error):
                        why = "left out for so large rows"
        finally:
            module.train()
        return Verdict(unproved=why)

    def _compare(self, subject: Subject, passes: ProofPasses, cuts: Sequence[int]) -> Verdict:
        whole = passes.run((0, cuts[-1]))
        parts = passes.run(cuts)
        limit = limit_of(whole, self._parts.precision.is_narrow and not passes.is_exact)
        found = compare(whole, parts, limit)
        if found is not None or whole.has_coins:
            return self._name(subject, passes, cuts, limit)
        changed = list_changed(subject.module, whole)
        if changed and not subject.rewinds:  # as ranks, whose buffers are combined
            rewound = compare(whole, passes.run(cuts, rewinds=True), limit)
            if rewound is not None:
                return Verdict(explain_buffers(changed, can_rewind=False), "ranks")
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
        if first.has_coins:
            why = "draws from numpy's or Python's generator, which each process has for itself"
            return Verdict(f"{_place(first, again, limit)} {why}; use torch.rand")
        if line := _name_draws(first, again, limit, changed):
            return Verdict(line)
        if not subject.rewinds:
            rewound = compare(first, passes.run(cuts, rewinds=True), limit)
            names = list_changed(subject.module, first)
            if rewound is None:
                return Verdict(explain_buffers(names, can_rewind=True), "micro-batches")
            if rewound.kind == "buffer":
                return Verdict(explain_buffers(names, can_rewind=False))
        parts = passes.run(cuts, is_traced=True)
        found = compare(first, parts, limit)
        if found is None:
            return Verdict("model or loss give other results from time to time; look for threads")
        return Verdict(explain(found, first, parts, limit))


def _list_trials(flops: float) -> Iterator[tuple[bool, Sequence[int], bool]]:
    """Yield what to try in turn: in the run's precision or in fp64, cuts of rows, with gradients.

    The last one is without, as a recomputation that is reentrant has none.
    """
    cuts: Sequence[Sequence[int]] = FEW_CUTS if flops > FP64_FLOPS else CUTS
    if flops * MANY / CUTS[0][-1] < FP64_FLOPS:
        cuts = MANY_CUTS
    for own in (True,) if flops > FP64_FLOPS else (False, True):
        yield from ((own, each, True) for each in cuts)
    yield True, cuts[-1], False


def _name_draws(first: Passed, again: Passed, limit: float, changed: Sequence[str]) -> str:
    """Return a line if the same rows gave two results, else an empty one."""
    if compare(first, again, limit) is None:
        return ""
    where = _place(first, again, limit)
    if changed:
        why = f"depends on {', '.join(changed)}, which it changes and no buffer holds"
        return f"{where} {why}; make it a buffer, or a function of self.step"
    return f"{where} draws unseeded random numbers; use torch.rand"


def _place(first: Passed, other: Passed, limit: float) -> str:
    found = None
    if first.traces and other.traces:
        found = find_module(first.traces[0], other.traces, limit)
    if found is None:
        return "the loss"
    name, call = found
    kind = type(call.module).__name__
    return f"{name} ({kind})" if name else f"the model ({kind})"
