"""Trials of whole steps: `train_step` on all rows, and on a rank's or a micro-batch's part of them.

What a step makes of its rank's rows beside its updates, such as a queue of keys or a running mean
of the loss, differs from rank to rank. It matters if a later step depends on it. So each trial runs
three steps: the first on all rows or on a part of them, the others on all rows. The updates of a
first step on a part end with the weights of the step on all rows, as reduced gradients would.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    nullcontext,
    redirect_stdout,
)
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.base.process.streams import MutedStream
from trainer.base.python_code import names_in, owner_of
from trainer.core.data.batches import LocalBatch
from trainer.core.engine.context import Parts
from trainer.core.engine.engine import Engine
from trainer.core.engine.recording import Loss
from trainer.core.engine.step import Outcome
from trainer.core.engine.trial import Trial
from trainer.core.micro_batch import copied
from trainer.core.rng import seed_step
from trainer.core.state.sandbox import (
    keep_attributes,
    keep_generators,
    keep_hooks,
    keep_modes,
    keep_optimizers,
    keep_passes,
    keep_tensors,
    sandbox,
)
from trainer.core.strategy.modules.batchnorm import batchnorm_in_evaluation
from trainer.startup_checks.mismatch import are_sums_equal, compare
from trainer.startup_checks.passes import (
    PassResult,
    Tensors,
    borrow_tensors,
    joined,
    restore_buffers,
    run_pass,
)
from trainer.startup_checks.snapshots import Snapshot, find_different, take_snapshot

RATE = 0.01  # of a trial's update: the part of the weights' norm that it changes
# Functions that need the rows of all ranks, which a trial has not.
COLLECTIVE_NAMES = {
    *("gather_rows", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce"),
    *("all_to_all", "all_to_all_single", "reduce_scatter", "reduce_scatter_tensor", "broadcast"),
}
KEEPS = "train_step keeps {} of its rank's rows, on which the next step depends"
FILL = "make it of the rows of all ranks, in loss with gather_rows or by torch.distributed"
USES = "train_step computes something of its rank's rows on which its own update depends"
OTHER_UPDATES = (
    "train_step makes other updates if its rank has other rows; decide in loss, row by row"
)
UNSUMMED_RECORD = (
    "what train_step records as {!r} is not the sum over the rows: it depends on the other rows of"
    " its rank; record a value of each row"
)


@dataclass
class StepTrial:
    """The results of steps: of their updates, by step, and what was kept after the first.

    `states` are the weights, and the buffers that forward passes changed, after each update of the
    first step.
    """

    updates: list[list[tuple[str, PassResult]]] = field(default_factory=list)
    recorded: list[dict[str, torch.Tensor]] = field(default_factory=list)
    states: list[Tensors] = field(default_factory=list)
    kept: Snapshot = field(default_factory=dict)


@dataclass(frozen=True)
class TriedStep:
    """A step of a trial: its `number` from 0, and how its updates are made.

    They end with the `states` of another trial, if given. `types` is entered around model and loss.
    """

    trial: StepTrial
    number: int
    states: Sequence[Tensors] | None
    types: AbstractContextManager[Any]


class StepTrials:
    """Runs trials of `train_step` in the model `module`, which is whole on this rank."""

    def __init__(
        self,
        parts: Parts,
        engine: Engine,
        opened: Trial,
        module: nn.Module,
        autocast: Callable[[], AbstractContextManager[Any]],
    ):
        self._parts = parts
        self._engine = engine
        self._opened = opened
        self._module = module
        self._autocast = autocast
        self._names = parts.strategy.tensors.names()

    def run(
        self,
        first: LocalBatch,
        later: LocalBatch,
        step: int,
        reference: StepTrial | None = None,
        change: Callable[[], None] | None = None,
        types: AbstractContextManager[Any] | None = None,
    ) -> StepTrial:
        """Return a trial of a first and two later steps, all as the 0-based `step`.

        With `reference`, the updates of the first step end with the states of that trial. `change`
        is called before the steps, and undone after them. `types` is entered around model and loss.
        """
        trial = StepTrial()
        config, device = self._parts.config, self._parts.strategy.world.device
        with (
            self._sandbox(),
            redirect_stdout(MutedStream(sys.stdout)),  # a step may print
            batchnorm_in_evaluation(self._module),
            sandbox(keep_tensors(self._module)),
        ):
            borrow_tensors(self._module)
            if change is not None:
                change()
            for trial_step, batch in enumerate((first, later, later)):
                states = reference.states if reference and not trial_step else None
                tried = TriedStep(trial, trial_step, states, types or nullcontext())
                trial.updates.append([])
                seed_step(config.run.seed, step, device)
                update = partial(self._update, tried)
                with self._opened.updating_by(update), self._opened.collecting() as recorded:
                    self._parts.hooks.train_step(batch)
                trial.recorded.append(recorded)
                if not trial_step:
                    trial.kept.update(take_snapshot(self._module, self._parts.hooks))
        return trial

    def _sandbox(self) -> AbstractContextManager[None]:
        """Leave no trace of a trial: tensors, attributes, hooks, generators, rates."""
        return sandbox(
            keep_passes(self._module),
            keep_attributes(self._module, self._parts.hooks),
            keep_modes(self._module),
            keep_hooks(self._module),
            keep_generators(self._parts.strategy.world.devices),
            keep_optimizers(self._engine.optimizers),
        )

    def _update(
        self,
        tried: TriedStep,
        batch: Any,
        loss: Loss,
        optimizers: Sequence[Optimizer] | None = None,
        name: str = "loss",
    ) -> Outcome:
        """Make an update of a trial."""
        draws = self._parts.draws
        if not draws.is_known(name):
            self._engine.trace_draws(name, loss)
        before = {key: buffer.clone() for key, buffer in self._module.named_buffers()}
        rewinds = self._parts.strategy.statistics.rows is not None
        leaves: Tensors = {n: p for n, p in self._module.named_parameters() if p.requires_grad}
        passed = []
        with draws.update(name), torch.enable_grad():
            for batch_number, micro_batch in enumerate(batch):
                if batch_number and rewinds:
                    restore_buffers(self._module, before)
                # a model may change it, and the next trial reads it again
                own = copied(micro_batch)
                with tried.types:
                    passed.append(run_pass(self._module, own, loss, name, leaves, self._autocast))
        whole = joined(passed, None)
        tried.trial.updates[tried.number].append((name, whole))
        chosen = leaves
        if optimizers is not None:
            some = {p for each in optimizers for g in each.param_groups for p in g["params"]}
            names = {self._names[p] for p in some if p in self._names}
            chosen = {n: p for n, p in leaves.items() if n in names}
        _step(tried, self._module, chosen, whole, before)
        totals = torch.stack([whole.sums[2], torch.zeros_like(whole.sums[2])])
        return Outcome(((totals, torch.zeros((), device=totals.device)),))


@torch.no_grad()
def _step(
    tried: TriedStep, module: nn.Module, chosen: Tensors, whole: PassResult, before: Tensors
) -> None:
    """Change the weights a little against their gradients, or to those of a given state."""
    tensors = {**dict(module.named_buffers()), **chosen}
    if tried.states is not None:
        index = len(tried.trial.updates[0]) - 1
        for name, value in tried.states[index].items() if index < len(tried.states) else ():
            if tensors[name].shape == value.shape:
                tensors[name].copy_(value)
        return
    gradients = {n: g for n in chosen if (g := whole.gradients[n]) is not None}
    size = sum(float(chosen[n].detach().double().square().sum()) for n in gradients) ** 0.5
    norm = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
    for name, gradient in gradients.items():
        chosen[name].sub_(gradient, alpha=RATE * size / max(norm, 1e-30))
    if not tried.number:
        buffer_names = before.keys() & tensors.keys()
        changed = {n for n in buffer_names if not torch.equal(tensors[n], before[n])}
        names = {*chosen, *changed}
        tried.trial.states.append({n: tensors[n].detach().clone() for n in names})


def explain_trials(whole: StepTrial, parts: Sequence[StepTrial], limit: float) -> str:
    """Return a line if steps on parts of the rows have other results than one on all, else ""."""
    names = [name for name, _ in whole.updates[0]]
    for part in parts:
        if [name for name, _ in part.updates[0]] != names:
            return OTHER_UPDATES
    for update_number, (name, of_all) in enumerate(whole.updates[0]):
        own = joined([part.updates[0][update_number][1] for part in parts], None)
        if compare(of_all, own, limit) is not None:
            of = f" (update {name!r})" if name != "loss" else ""
            return f"{USES}{of}; compute it in loss for each row, or {FILL}"
    for name, sums in whole.recorded[0].items():
        added = sum(part.recorded[0].get(name, torch.zeros_like(sums)) for part in parts)
        if not are_sums_equal(sums, torch.as_tensor(added), limit):
            return UNSUMMED_RECORD.format(name)
    for part in parts:
        different_names = find_different(whole.kept, part.kept, limit)
        later = (chain(*trial.updates[1:]) for trial in (whole, part))
        for (_, of_all), (_, own) in zip(*later, strict=False):
            if compare(of_all, own, limit) is not None:
                return f"{KEEPS.format(', '.join(different_names[:3]) or 'something')}; {FILL}"
    return ""


def have_other_results(one: StepTrial, other: StepTrial, limit: float) -> bool:
    """Return True if the updates of two trials have other losses or gradients."""
    for updates, others in zip(one.updates, other.updates, strict=True):
        if [name for name, _ in updates] != [name for name, _ in others]:
            return True
        pairs = zip(updates, others, strict=True)
        if any(compare(passed, again, limit) is not None for (_, passed), (_, again) in pairs):
            return True
    return False


def digest_trial(trial: StepTrial) -> list[float]:
    """Return numbers that change with the results of the later steps."""
    digests = [passed.digest() for _, passed in chain(*trial.updates[1:])]
    return [sum(each) for each in zip(*digests, strict=True)]


def needs_all_ranks(hooks: Any, model: nn.Module) -> bool:
    """Return True if code of a task or a model calls for the rows of all ranks."""
    kinds = {type(hooks), *map(type, model.modules())}
    functions = [each for kind in kinds for each in _functions_of(kind)]
    seen: set[Any] = set()
    while functions:
        function = functions.pop()
        if function in seen:
            continue
        seen.add(function)
        names = set(names_in(function.__code__))
        if names & COLLECTIVE_NAMES:
            return True
        called = (function.__globals__.get(name) for name in names)
        functions += [each for each in called if isinstance(each, FunctionType) and _is_read(each)]
    return False


def _functions_of(kind: type) -> Iterator[FunctionType]:
    """Yield the functions of a user's class."""
    for base in kind.__mro__:
        if _is_read(base):
            yield from (each for each in vars(base).values() if isinstance(each, FunctionType))


def _is_read(definition: Any) -> bool:
    return owner_of(definition) in ("user", "installed")
