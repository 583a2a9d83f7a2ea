"""Passes of the proof: forward, loss and backward on a few rows, whole or cut in two.

A pass has copies of the model's tensors, so it leaves no trace in the model or its gradients. Where
the model can compute in fp64 it does, or in fp32, so that a difference is no rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer.data.preparation import MicroBatch
from trainer.engine.means import Values, sum_up, weigh_all
from trainer.engine.proof.gathering import Gathering
from trainer.engine.proof.holders import tensors_borrowed
from trainer.engine.proof.trace import CallTrace
from trainer.engine.recording import Loss, Recorder
from trainer.hook_errors import call
from trainer.micro_batch import copied, count_rows
from trainer.rng.forward import Draws
from trainer.rng.philox import generators_kept
from trainer.strategy.modules.batchnorm import GroupBatchNorm
from trainer.strategy.modules.dry_run import stir

Tensors = dict[str, torch.Tensor]


@dataclass
class Passed:
    """The results of a pass over rows: sums over them, so that those of parts can be added.

    `sums` has the weighted values, their sizes and the weights. `buffers` are those after the pass.
    """

    sums: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: Tensors
    written: Tensors  # parameters that a forward pass has changed
    dtype: torch.dtype  # of the values
    recorded: Tensors = field(default_factory=dict)  # sums of what the loss records, by name
    has_drawn: bool = False  # from torch's generator
    traces: list[CallTrace] = field(default_factory=list)


@dataclass(frozen=True)
class Subject:
    """The subject of a proof: a model and the loss of an update, on a few rows.

    `unit` is the number of rows that no layout separates. Without `keeps_writes` a parameter that
    is written in a forward pass has its old values afterwards, as under FSDP.
    """

    module: nn.Module
    loss: Loss
    name: str
    batch: MicroBatch
    indices: torch.Tensor
    unit: int
    draws: Draws
    autocast: Callable[[], AbstractContextManager]
    keeps_writes: bool
    rewinds: bool  # each micro-batch starts with the buffers from the start of the step
    gathering: Gathering
    recorder: Recorder
    devices: Sequence[torch.device]
    prepared: Mapping[tuple[int, int], MicroBatch]  # as in ProofRows
    is_mixed: bool
    has_rows: bool

    def take(self, first: int, last: int) -> MicroBatch:
        """Return a copy of some rows, which a model may change in place."""
        if (first, last) in self.prepared:
            return copied(self.prepared[first, last])

        def take(tensor: torch.Tensor) -> torch.Tensor:
            return (tensor[first:last] if tensor.dim() else tensor).clone()

        return tree_map_only(torch.Tensor, take, self.batch)


class ProofPasses:
    """Passes over a subject in a `wide` dtype, or in the run's own precision if that is None."""

    def __init__(self, subject: Subject, wide: torch.dtype | None, with_gradients: bool = True):
        self.wide = wide
        self._subject = subject
        self._with_gradients = with_gradients
        self._types: AbstractContextManager[Any] = nullcontext()

    def run(
        self,
        cuts: Sequence[int],
        is_traced: bool = False,
        rewinds: bool | None = None,
        types: AbstractContextManager[Any] | None = None,
    ) -> Passed:
        """Run the rows between neighbouring cuts, each a micro-batch, and add the results.

        `rewinds` takes the place of the subject's. `types` is entered around model and loss.
        """
        self._types = types or nullcontext()
        subject = self._subject
        rewinds = subject.rewinds if rewinds is None else rewinds
        bounds = list(pairwise(cuts))
        weights = [(last - first) / cuts[-1] for first, last in bounds] if rewinds else None
        with (
            self._borrowed() as leaves,
            nullcontext() if self.wide is None else _without_tf32(),
            generators_kept(subject.devices),
            subject.gathering.over(len(bounds)),
        ):
            before = _buffers(subject.module)
            if len(bounds) > 1 and subject.gathering.is_used:
                return self._run_together(bounds, leaves, before, weights)
            passed: list[Passed] = []
            for number, (first, last) in enumerate(bounds):
                if number and rewinds:
                    restore_buffers(subject.module, before)
                passed.append(self._run(first, last, number, leaves, is_traced))
            return joined(passed, weights)

    @contextmanager
    def _drawing(self, first: int, last: int, number: int) -> Iterator[None]:
        """Draw for these rows, in backward too, where a model may compute again."""
        subject = self._subject
        with subject.draws.update(subject.name):
            subject.draws.begin(0, number, subject.indices[first:last])
            subject.gathering.begin(number)
            yield

    def _run(self, first: int, last: int, number: int, leaves: Tensors, is_traced: bool) -> Passed:
        subject = self._subject
        trace = CallTrace(subject.module, subject.draws, last - first)
        every: Tensors = dict(subject.module.named_parameters())  # the frozen ones too
        totals = _totals(every)
        inputs, targets = self._cast(subject.take(first, last))
        with self._drawing(first, last, number):
            of_torch = torch.default_generator.get_state()
            recording = subject.recorder.collecting()
            traced = trace if is_traced else nullcontext()
            with traced, self._autocast(), recording as recorded, self._types:
                outputs = call(subject.module, inputs)
                returned = subject.loss(outputs, targets)
                total, sums = _sum(returned, targets, outputs, subject.name)
            has_drawn = not torch.equal(of_torch, torch.default_generator.get_state())
            after = _totals(every)
            gradients = self._differentiate(total, leaves)
        written = {n: p.detach().clone() for n, p in every.items() if after.get(n) != totals.get(n)}
        found = (sums, gradients, _buffers(subject.module), written, total.dtype)
        return Passed(*found, recorded, has_drawn, [trace])

    def _run_together(
        self,
        bounds: list[tuple[int, int]],
        leaves: Tensors,
        before: Tensors,
        weights: Sequence[float] | None,
    ) -> Passed:
        """Run micro-batches whose loss gathers the rows of all of them, as `gather_rows` does."""
        subject = self._subject
        made: list[tuple[Any, Any, int]] = []
        buffers: list[Tensors] = []
        for number, (first, last) in enumerate(bounds):
            if number and weights is not None:
                restore_buffers(subject.module, before)
            inputs, targets = self._cast(subject.take(first, last))
            with self._drawing(first, last, number), self._autocast():
                outputs = call(subject.module, inputs)
                made.append((outputs, targets, subject.draws.position()))
                buffers.append(_buffers(subject.module))
                subject.loss(outputs, targets)
        subject.gathering.join()
        found = []
        every: list[Tensors] = []
        for number, (first, last) in enumerate(bounds):
            outputs, targets, position = made[number]
            recording = subject.recorder.collecting()
            with self._drawing(first, last, number), self._autocast(), recording as recorded:
                subject.draws.advance(position)
                with subject.gathering.alone():
                    returned = subject.loss(outputs, targets)
                found.append(_sum(returned, targets, outputs, subject.name))
                every.append(recorded)
        total = torch.stack([each for each, _ in found]).sum()
        gradients = self._differentiate(total, leaves)
        parts = [
            Passed(sums, {}, own, {}, total.dtype, recorded)
            for (_, sums), own, recorded in zip(found, buffers, every, strict=True)
        ]
        return replace(joined(parts, weights), gradients=gradients)

    def _autocast(self) -> AbstractContextManager:
        return self._subject.autocast() if self.wide is None else nullcontext()

    def _cast(self, tree: Any) -> Any:
        return tree if self.wide is None else tree_map_only(torch.Tensor, self._widened, tree)

    def _widened(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.wide) if tensor.is_floating_point() else tensor

    def _differentiate(
        self, total: torch.Tensor, leaves: Tensors
    ) -> dict[str, torch.Tensor | None]:
        if not self._with_gradients:
            return {}
        found = torch.autograd.grad(total, list(leaves.values()), allow_unused=True)
        return dict(zip(leaves, found, strict=True))

    @contextmanager
    def _borrowed(self) -> Iterator[Tensors]:
        """Give the model copies of its tensors, with stirred weights; yield those to be trained."""
        module = self._subject.module
        with torch.set_grad_enabled(self._with_gradients):
            stirred = torch.Generator().manual_seed(0)

            def copy(tensor: torch.Tensor) -> torch.Tensor:
                values = self._widened(tensor.detach().clone())
                if isinstance(tensor, nn.Parameter) and self._with_gradients:
                    stir(values, stirred)
                return values

            with tensors_borrowed(module, copy):
                yield {n: p for n, p in module.named_parameters() if p.requires_grad}


def run_pass(
    module: nn.Module,
    batch: MicroBatch,
    loss: Loss,
    name: str,
    leaves: Tensors,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> Passed:
    """Run a micro-batch in a model as it is; return only sums and gradients."""
    inputs, targets = batch
    with autocast():
        outputs = call(module, inputs)
        total, sums = _sum(loss(outputs, targets), targets, outputs, name)
    total.backward()  # not torch.autograd.grad, which reentrant recomputation refuses
    gradients = {key: leaf.grad for key, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    return Passed(sums, gradients, {}, {}, total.dtype)


@contextmanager
def _without_tf32() -> Iterator[None]:
    """Compute fp32 in fp32 on CUDA for the duration of the block."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def _sum(
    returned: Values, targets: Any, outputs: Any, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum to differentiate, and what `sum_up` returns."""
    values, weights = weigh_all(name, returned, count_rows(targets, outputs))
    return (values * weights).sum(), sum_up(values, weights)


def joined(passed: Sequence[Passed], weights: Sequence[float] | None) -> Passed:
    """Add the results of micro-batches; buffers are the last ones, or the mean by `weights`."""
    first = passed[0]
    gradients = dict(first.gradients)
    written = dict(first.written)
    recorded = dict(first.recorded)
    for other in passed[1:]:
        written |= other.written
        for name, added in other.recorded.items():
            recorded[name] = recorded.get(name, 0) + added
        for name, gradient in other.gradients.items():
            own = gradients[name]
            if own is None or gradient is None:
                gradients[name] = gradient if own is None else own
            else:
                gradients[name] = own + gradient
    buffers = passed[-1].buffers
    if weights is not None and len(passed) > 1:
        buffers = {name: _mean(name, passed, weights) for name in first.buffers}
    traces = [trace for each in passed for trace in each.traces]
    sums = torch.stack([each.sums for each in passed]).sum(0)
    found = (sums, gradients, buffers, written, first.dtype)
    return Passed(*found, recorded, first.has_drawn, traces)


def _mean(name: str, passed: Sequence[Passed], weights: Sequence[float]) -> torch.Tensor:
    every = [each.buffers[name] for each in passed if name in each.buffers]
    last = every[-1]
    shapes = {each.shape for each in every}
    if len(every) < len(passed) or len(shapes) > 1 or not last.is_floating_point():
        return last
    return torch.stack([each * w for each, w in zip(every, weights, strict=True)]).sum(0)


def _totals(parameters: Tensors) -> dict[str, str]:
    """Return sums that tell whether a parameter was written; of types that have none, nothing.

    As texts: NaN is equal to itself.
    """
    found = {}
    with torch.no_grad():
        for name, parameter in parameters.items():
            with suppress(RuntimeError, TypeError):  # frozen weights may be float8
                found[name] = repr(float(parameter.sum()))
    return found


def tensors_with_axes(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_leaves(tree) if isinstance(t, torch.Tensor) and t.dim()]


def _buffers(module: nn.Module) -> Tensors:
    return {n: b.detach().clone() for n, b in module.named_buffers() if not is_lazy(b)}


@torch.no_grad()
def restore_buffers(module: nn.Module, before: Tensors) -> None:
    for name, buffer in module.named_buffers():
        if name in before and buffer.shape == before[name].shape:
            buffer.data.copy_(before[name])


@contextmanager
def modes_kept(module: nn.Module) -> Iterator[None]:
    modes = [(each, each.training) for each in module.modules()]
    try:
        yield
    finally:
        for each, mode in modes:  # outer modules first
            each.train(mode)


def look_behind_batchnorm(module: nn.Module) -> None:
    """Let plain BatchNorm, which the start names anyway, use its running statistics."""
    for each in module.modules():
        if _is_plain(each):
            each.eval()


@contextmanager
def batchnorm_in_evaluation(module: nn.Module) -> Iterator[None]:
    """Let plain BatchNorm use its running statistics in the block, whatever a task says."""
    plain = [each for each in module.modules() if _is_plain(each)]
    look_behind_batchnorm(module)
    for each in plain:
        vars(each)["train"] = lambda mode=True, each=each: each
    try:
        yield
    finally:
        for each in plain:
            del vars(each)["train"]


def has_batch_statistics(module: nn.Module) -> bool:
    """Return True if plain BatchNorm has no running statistics to use instead of the rows'."""
    every = [each for each in module.modules() if _is_plain(each)]
    return any(each.running_mean is None for each in every)


def _is_plain(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and not isinstance(layer, GroupBatchNorm)
