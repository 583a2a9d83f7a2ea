"""Passes of the checks at the start: forward, loss and backward on a few rows, whole or cut in two.

A pass has copies of the model's tensors, so it leaves no trace in the model or its gradients; those
that train are perturbed, unless it is forward only. Where the model can compute in fp64 it does, or
in fp32, so that a difference is no rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from trainer.core.engine.context import Hooks, Parts
from trainer.core.engine.recording import Loss
from trainer.core.engine.trial import Trial
from trainer.core.engine.values import Values, sum_up, weigh_all
from trainer.core.hook_calls import call
from trainer.core.micro_batch import MicroBatch, count_rows
from trainer.core.rng.forward import ExampleRng
from trainer.core.state.sandbox import keep_attributes, keep_generators, keep_tensors, sandbox
from trainer.core.strategy.modules.dry_run import perturb
from trainer.core.strategy.tensor_shards import replace_tensors
from trainer.startup_checks.rank_agreement import CallDigest, TrialRows, digest
from trainer.startup_checks.trace import LOSS_NAME, CallTrace, Gathering, describe

Tensors = dict[str, torch.Tensor]
Depth = Literal["forward", "graph", "backward"]


@dataclass
class PassResult:
    """The results of a pass over rows: sums over them, so that those of parts can be added.

    `sums` (3,) has the sums of values x weights, of their absolute values, and of the weights.
    `buffers` are those after the pass.
    """

    sums: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: Tensors
    written: Tensors  # parameters that a forward pass has changed
    dtype: torch.dtype  # of the values
    recorded: Tensors = field(default_factory=dict)  # sums of what the loss records, by name
    has_drawn: bool = False  # from torch's generator
    traces: list[CallTrace] = field(default_factory=list)

    def digest(self) -> list[float]:
        """Return DIGESTS numbers that change with the sums or the gradients."""
        norms = [float(g.double().norm()) for g in self.gradients.values() if g is not None]
        return [*self.sums.tolist(), sum(norm * norm for norm in norms) ** 0.5]

    def digest_calls(self) -> list[CallDigest]:
        """Return numbers that change with what modules got and returned, the loss and gradients.

        The gradients that are next to the loss come first.
        """
        digests = [
            (describe(key, call), digest(call.inputs.values()), digest(call.outputs.values()))
            for trace in self.traces
            for key, call in trace.calls.items()
        ]
        digests.append((LOSS_NAME, [], digest([self.sums])))
        for name, gradient in reversed(self.gradients.items()):
            tensors = [] if gradient is None else [gradient]
            digests.append((f"the gradient of {name}", [], digest(tensors)))
        return digests


@dataclass(frozen=True)
class CheckedUpdate:
    """The subject of the checks: a model and the loss of an update, on a few rows."""

    module: nn.Module
    loss: Loss
    name: str
    parts: Parts
    rows: TrialRows
    gathering: Gathering
    opened: Trial

    @property
    def hooks(self) -> Hooks:
        return self.parts.hooks

    @property
    def draws(self) -> ExampleRng:
        return self.parts.draws

    @property
    def rewinds(self) -> bool:
        """True if each micro-batch starts with the buffers from the start of the step."""
        return self.parts.strategy.statistics.rows is not None


class SlicedPasses:
    """Passes over a subject in a `wide` dtype, or in the run's own precision if that is None.

    A pass ends with its `depth`: forward alone, with a graph for a backward, or the backward too.
    """

    def __init__(
        self,
        subject: CheckedUpdate,
        wide: torch.dtype | None,
        depth: Depth = "backward",
    ):
        self.wide = wide
        self.subject = subject
        self.depth: Depth = depth

    def run(
        self,
        cuts: Sequence[int],
        is_traced: bool = False,
        rewinds: bool | None = None,
        types: AbstractContextManager[Any] | None = None,
        keeps_state: bool = False,
    ) -> PassResult:
        """Run the rows between neighbouring cuts, each a micro-batch, and add the results.

        `rewinds` takes the place of the subject's. `types` is entered around model and loss. A pass
        leaves attributes as they were, unless it `keeps_state`.
        """
        subject = self.subject
        rewinds = subject.rewinds if rewinds is None else rewinds
        bounds = list(pairwise(cuts))
        weights = [(last - first) / cuts[-1] for first, last in bounds] if rewinds else None
        restores = [] if keeps_state else [keep_attributes(subject.module, subject.hooks)]
        restores.append(keep_generators(subject.parts.strategy.world.devices))
        with (
            sandbox(*restores),
            self._borrowed() as leaves,
            nullcontext() if self.wide is None else _without_tf32(),
            subject.gathering.over(len(bounds)),
        ):
            before = _buffers(subject.module)
            if len(bounds) > 1 and subject.gathering.is_used:
                return self._run_together(bounds, leaves, before, weights)
            passed: list[PassResult] = []
            for batch_number, (first, last) in enumerate(bounds):
                if batch_number and rewinds:
                    restore_buffers(subject.module, before)
                passed.append(self._run(first, last, batch_number, leaves, is_traced, types))
            return replace(joined(passed, weights), gradients=self._gradients(leaves))

    @contextmanager
    def _draws(self, first: int, last: int, batch_number: int) -> Iterator[None]:
        """Draw for these rows, in backward too, where a model may compute again."""
        subject = self.subject
        indices = subject.rows.indices[first:last]
        with subject.draws.update(subject.name):
            subject.draws.begin(0, batch_number, indices)
            subject.gathering.begin(batch_number)
            yield

    def _run(
        self,
        first: int,
        last: int,
        batch_number: int,
        leaves: Tensors,
        is_traced: bool,
        types: AbstractContextManager[Any] | None,
    ) -> PassResult:
        subject = self.subject
        trace = CallTrace(subject.module, subject.draws, last - first)
        every: Tensors = dict(subject.module.named_parameters())  # the frozen ones too
        totals = _totals(every)
        inputs, targets = self._cast(subject.rows.take(first, last))
        with self._draws(first, last, batch_number):
            of_torch = torch.default_generator.get_state()
            recording = subject.opened.collecting()
            traced = trace if is_traced else nullcontext()
            with traced, self._autocast(), recording as recorded, types or nullcontext():
                outputs = call(subject.module, inputs)
                returned = trace.of_loss(subject.loss, outputs, targets)
                total, sums = _sum(returned, targets, outputs, subject.name)
            has_drawn = not torch.equal(of_torch, torch.default_generator.get_state())
            after = _totals(every)
            self._differentiate(total, leaves)
        written = {n: p.detach().clone() for n, p in every.items() if after.get(n) != totals.get(n)}
        gradients: dict[str, torch.Tensor | None] = {}  # the leaves keep them
        fields = (sums, gradients, _buffers(subject.module), written, total.dtype)
        return PassResult(*fields, recorded, has_drawn, [trace])

    def _run_together(
        self,
        bounds: list[tuple[int, int]],
        leaves: Tensors,
        before: Tensors,
        weights: Sequence[float] | None,
    ) -> PassResult:
        """Run micro-batches whose loss gathers the rows of all of them, as `gather_rows` does."""
        subject = self.subject
        forwards: list[tuple[Any, Any, int]] = []
        buffers: list[Tensors] = []
        for batch_number, (first, last) in enumerate(bounds):
            if batch_number and weights is not None:
                restore_buffers(subject.module, before)
            inputs, targets = self._cast(subject.rows.take(first, last))
            with self._draws(first, last, batch_number), self._autocast():
                outputs = call(subject.module, inputs)
                forwards.append((outputs, targets, subject.draws.position()))
                buffers.append(_buffers(subject.module))
                subject.loss(outputs, targets)
        subject.gathering.join()
        loss_sums = []
        every: list[Tensors] = []
        for batch_number, (first, last) in enumerate(bounds):
            outputs, targets, position = forwards[batch_number]
            recording = subject.opened.collecting()
            with self._draws(first, last, batch_number), self._autocast(), recording as recorded:
                subject.draws.advance(position)
                with subject.gathering.alone():
                    returned = subject.loss(outputs, targets)
                loss_sums.append(_sum(returned, targets, outputs, subject.name))
                every.append(recorded)
        total = torch.stack([each for each, _ in loss_sums]).sum()
        self._differentiate(total, leaves)
        parts = [
            PassResult(sums, {}, own, {}, total.dtype, recorded)
            for (_, sums), own, recorded in zip(loss_sums, buffers, every, strict=True)
        ]
        return replace(joined(parts, weights), gradients=self._gradients(leaves))

    def _autocast(self) -> AbstractContextManager:
        return self.subject.parts.precision.autocast() if self.wide is None else nullcontext()

    def _cast(self, tree: Any) -> Any:
        return tree if self.wide is None else tree_map_only(torch.Tensor, self._widened, tree)

    def _widened(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.wide) if tensor.is_floating_point() else tensor

    def _differentiate(self, total: torch.Tensor, leaves: Tensors) -> None:
        """Add the gradients to those that the leaves keep: two sets of a large model are many."""
        if self.depth == "backward":
            torch.autograd.backward(total, inputs=list(leaves.values()))

    def _gradients(self, leaves: Tensors) -> dict[str, torch.Tensor | None]:
        return {n: leaf.grad for n, leaf in leaves.items()} if self.depth == "backward" else {}

    @contextmanager
    def _borrowed(self) -> Iterator[Tensors]:
        """Give the model copies of its tensors; perturb and yield the weights that are trained.

        Those that are frozen have the values that they keep, and may be most of a large model: they
        are not copied unless the dry run has written them, and one that a later pass writes is
        told by `RowIndependenceCheck.examine`.
        """
        module = self.subject.module
        has_graph = self.depth != "forward"
        untouched = {id(frozen) for frozen in self.subject.parts.strategy.untouched}
        with torch.set_grad_enabled(has_graph):
            perturbed = torch.Generator().manual_seed(0)

            def copy(tensor: torch.Tensor) -> torch.Tensor:
                is_shared = id(tensor) in untouched and not tensor.requires_grad
                values = self._widened(tensor.detach() if is_shared else tensor.detach().clone())
                if has_graph and isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                    perturb(values, perturbed)
                return values

            with sandbox(keep_tensors(module)):
                borrow_tensors(module, copy)
                yield {n: p for n, p in module.named_parameters() if p.requires_grad}


def borrow_tensors(
    module: nn.Module, copy: Callable[[torch.Tensor], torch.Tensor] = torch.clone
) -> None:
    """Give a model copies of its tensors, with the hooks on their gradients."""

    @torch.no_grad()
    def make(_: str, tensor: torch.Tensor) -> torch.Tensor:
        if is_lazy(tensor):
            return tensor
        values = copy(tensor).detach()
        if not isinstance(tensor, nn.Parameter):
            return values
        copied = nn.Parameter(values, tensor.requires_grad)
        vars(copied).update(vars(tensor))
        for hook in (tensor._backward_hooks or {}).values():
            copied.register_hook(hook)
        return copied

    replace_tensors(module, make)


def run_pass(
    module: nn.Module,
    batch: MicroBatch,
    loss: Loss,
    name: str,
    leaves: Tensors,
    autocast: Callable[[], AbstractContextManager[Any]],
) -> PassResult:
    """Run a micro-batch in a model as it is; return only sums and gradients."""
    inputs, targets = batch
    with autocast():
        outputs = call(module, inputs)
        total, sums = _sum(loss(outputs, targets), targets, outputs, name)
    total.backward()  # not torch.autograd.grad, which reentrant recomputation refuses
    gradients = {key: leaf.grad for key, leaf in leaves.items()}
    for leaf in leaves.values():
        leaf.grad = None
    return PassResult(sums, gradients, {}, {}, total.dtype)


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


def joined(passed: Sequence[PassResult], weights: Sequence[float] | None) -> PassResult:
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
    fields = (sums, gradients, buffers, written, first.dtype)
    return PassResult(*fields, recorded, first.has_drawn, traces)


def _mean(name: str, passed: Sequence[PassResult], weights: Sequence[float]) -> torch.Tensor:
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
    totals = {}
    with torch.no_grad():
        for name, parameter in parameters.items():
            with suppress(RuntimeError, TypeError):  # frozen weights may be float8
                totals[name] = repr(float(parameter.sum()))
    return totals


def _buffers(module: nn.Module) -> Tensors:
    return {n: b.detach().clone() for n, b in module.named_buffers() if not is_lazy(b)}


@torch.no_grad()
def restore_buffers(module: nn.Module, before: Tensors) -> None:
    for name, buffer in module.named_buffers():
        if name in before and buffer.shape == before[name].shape:
            buffer.data.copy_(before[name])
