"""Passes of the proof: forward, loss and backward on a few rows, whole or cut in two.

A pass has copies of the model's tensors, so it leaves no trace in the model or its gradients. Where
the model can compute in fp64 it does, so that a difference is no rounding.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_map_only

from trainer.data.preparation import MicroBatch
from trainer.engine.means import Values, weigh
from trainer.engine.proof.gathering import Gathering
from trainer.engine.proof.trace import CallTrace
from trainer.hook_errors import call
from trainer.micro_batch import count_rows
from trainer.rng.forward import Draws
from trainer.rng.philox import coins
from trainer.strategy.modules.batchnorm import GroupBatchNorm
from trainer.strategy.modules.dry_run import stir
from trainer.strategy.shards import replace_tensors

Loss = Callable[[Any, Any], Values]
Tensors = dict[str, torch.Tensor]


@dataclass
class Passed:
    """The results of a pass over rows: sums over them, so that those of parts can be added.

    `sums` has the weighted values, their sizes and the weights. `buffers` are those after the pass.
    """

    sums: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: Tensors
    written: Tensors  # parameters that the first micro-batch's forward pass has changed
    dtype: torch.dtype  # of the values
    has_coins: bool = False  # drew from numpy's or Python's generator, which no update seeds
    traces: list[CallTrace] = field(default_factory=list)


@dataclass(frozen=True)
class Subject:
    """The subject of a proof: a model and the loss of an update, on a few rows.

    `is_plain` is False for a model whose tensors must stay in their places, as FSDP's. `unit` is
    the number of rows that no layout separates.
    """

    module: nn.Module
    loss: Loss
    name: str
    batch: MicroBatch
    indices: torch.Tensor
    unit: int
    draws: Draws
    autocast: Callable[[], AbstractContextManager]
    is_plain: bool
    rewinds: bool  # each micro-batch starts with the buffers from the start of the step
    gathering: Gathering

    def take(self, first: int, last: int) -> MicroBatch:
        return tree_map_only(torch.Tensor, lambda t: t[first:last] if t.dim() else t, self.batch)


class ProofPasses:
    """Passes over a subject in fp64, or `in_own` precision."""

    def __init__(self, subject: Subject, in_own: bool, with_gradients: bool = True):
        self._subject = subject
        self._in_own = in_own or not subject.is_plain
        self._with_gradients = with_gradients

    @property
    def is_exact(self) -> bool:
        return not self._in_own

    def run(
        self, cuts: Sequence[int], is_traced: bool = False, rewinds: bool | None = None
    ) -> Passed:
        """Run the rows between neighbouring cuts, each a micro-batch, and add the results.

        `rewinds` takes the place of the subject's.
        """
        subject = self._subject
        rewinds = subject.rewinds if rewinds is None else rewinds
        with self._borrowed() as leaves, _drawing(subject.indices.device):
            bounds = list(pairwise(cuts))
            before = _buffers(subject.module)
            passed: list[Passed] = []
            buffers: list[Tensors] = []
            with subject.gathering.over(len(bounds)) as gathering:
                if len(bounds) > 1 and gathering.is_used:
                    return self._run_together(bounds, leaves)
                for number, (first, last) in enumerate(bounds):
                    if number and rewinds:
                        _restore(subject.module, before)
                    passed.append(self._run(first, last, number, leaves, is_traced))
                    buffers.append(passed[-1].buffers)
            weights = [(last - first) / cuts[-1] for first, last in bounds]
            return _joined(passed, weights if rewinds else None)

    def _run(self, first: int, last: int, number: int, leaves: Tensors, is_traced: bool) -> Passed:
        trace = CallTrace(self._subject.module, self._subject.draws, last - first)
        before = _totals(leaves)
        subject = self._subject
        of_coins = coins()
        with trace if is_traced else nullcontext():
            total, sums = self._forward(first, last, number)
        has_coins = coins() != of_coins and not subject.draws.rehearsals.has_coins
        after = _totals(leaves)
        written = {n: p.detach().clone() for n, p in leaves.items() if after[n] != before[n]}
        gradients = self._differentiate(total, leaves)
        buffers = _buffers(self._subject.module)
        return Passed(sums, gradients, buffers, written, total.dtype, has_coins, [trace])

    def _run_together(self, bounds: list[tuple[int, int]], leaves: Tensors) -> Passed:
        """Run micro-batches whose loss gathers the rows of all of them, as `gather_rows` does."""
        subject = self._subject
        outputs = []
        for number, (first, last) in enumerate(bounds):
            inputs, targets = self._cast(subject.take(first, last))
            outputs.append((*self._outputs(inputs, first, last, number), targets))
        for number, (made, targets) in enumerate(outputs):
            subject.gathering.begin(number)
            subject.loss(made, targets)
        subject.gathering.join()
        found = []
        for number, (made, targets) in enumerate(outputs):
            subject.gathering.begin(number)
            found.append(_sum(subject.loss(made, targets), targets, made, subject.name))
        total = torch.stack([each for each, _ in found]).sum()
        sums = torch.stack([sums for _, sums in found]).sum(0)
        gradients = self._differentiate(total, leaves)
        return Passed(sums, gradients, _buffers(subject.module), {}, total.dtype)

    def _outputs(self, inputs: Any, first: int, last: int, number: int) -> tuple[Any]:
        subject = self._subject
        with subject.draws.update(subject.name), self._autocast():
            subject.draws.begin(0, number, subject.indices[first:last])
            return (call(subject.module, inputs),)

    def _forward(self, first: int, last: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        subject = self._subject
        inputs, targets = self._cast(subject.take(first, last))
        subject.gathering.begin(number)
        with subject.draws.update(subject.name), self._autocast():
            subject.draws.begin(0, number, subject.indices[first:last])
            outputs = call(subject.module, inputs)
            return _sum(subject.loss(outputs, targets), targets, outputs, subject.name)

    def _autocast(self) -> AbstractContextManager:
        return self._subject.autocast() if self._in_own else nullcontext()

    def _cast(self, tree: Any) -> Any:
        if self._in_own:
            return tree
        return tree_map_only(torch.Tensor, _widened, tree)

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
        with _modes_kept(module), torch.set_grad_enabled(self._with_gradients):
            _look_behind_batchnorm(module)
            if not self._subject.is_plain:
                yield {n: p for n, p in module.named_parameters() if p.requires_grad}
                return
            stirred = torch.Generator().manual_seed(0)
            with _tensors_kept(module):
                replace_tensors(module, lambda _, tensor: self._copy(tensor, stirred))
                yield {n: p for n, p in module.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def _copy(self, tensor: torch.Tensor, stirred: torch.Generator) -> torch.Tensor:
        if is_lazy(tensor):
            return tensor
        values = tensor.detach().clone() if self._in_own else _widened(tensor.detach().clone())
        if not isinstance(tensor, nn.Parameter):
            return values
        if self._with_gradients:
            stir(values, stirred)
        copied = nn.Parameter(values, tensor.requires_grad)
        vars(copied).update(vars(tensor))
        for hook in (tensor._backward_hooks or {}).values():  # on its gradient
            copied.register_hook(hook)
        return copied


def _sum(
    returned: Values, targets: Any, outputs: Any, name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sum to differentiate, and (3,) sums of values, of their sizes, of weights."""
    values, weights = weigh(name, returned, count_rows(targets, outputs))
    weights = torch.ones_like(values) if weights is None else weights
    weighted = values * weights
    wide = weighted.detach().double()
    return weighted.sum(), torch.stack([wide.sum(), wide.abs().sum(), weights.double().sum()])


def _joined(passed: Sequence[Passed], weights: Sequence[float] | None) -> Passed:
    """Add the results of micro-batches; buffers are the last ones, or the mean by `weights`."""
    first = passed[0]
    gradients = dict(first.gradients)
    for other in passed[1:]:
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
    return Passed(sums, gradients, buffers, first.written, first.dtype, first.has_coins, traces)


def _mean(name: str, passed: Sequence[Passed], weights: Sequence[float]) -> torch.Tensor:
    every = [each.buffers[name] for each in passed if name in each.buffers]
    last = every[-1]
    shapes = {each.shape for each in every}
    if len(every) < len(passed) or len(shapes) > 1 or not last.is_floating_point():
        return last
    return torch.stack([each * w for each, w in zip(every, weights, strict=True)]).sum(0)


def _totals(leaves: Tensors) -> dict[str, float]:
    with torch.no_grad():
        return {name: float(leaf.sum()) for name, leaf in leaves.items()}


def _widened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


@contextmanager
def _tensors_kept(module: nn.Module) -> Iterator[None]:
    """Put the tensors that a model has now back at the end of the block."""
    kept = [(each, dict(each._parameters), dict(each._buffers)) for each in module.modules()]
    try:
        yield
    finally:
        for owner, parameters, buffers in kept:
            _put_back(owner, owner._parameters, parameters)
            _put_back(owner, owner._buffers, buffers)


def _put_back(owner: nn.Module, now: dict[str, Any], before: dict[str, Any]) -> None:
    for key in set(dict(now)) - set(before):
        del now[key]
    for key, tensor in before.items():
        if tensor is None:
            now[key] = None
        elif now.get(key) is not tensor:
            setattr(owner, key, tensor)


def _buffers(module: nn.Module) -> Tensors:
    return {n: b.detach().clone() for n, b in module.named_buffers() if not is_lazy(b)}


@torch.no_grad()
def _restore(module: nn.Module, before: Tensors) -> None:
    for name, buffer in module.named_buffers():
        if name in before and buffer.shape == before[name].shape:
            buffer.data.copy_(before[name])


@contextmanager
def _modes_kept(module: nn.Module) -> Iterator[None]:
    modes = [(each, each.training) for each in module.modules()]
    try:
        yield
    finally:
        for each, mode in modes:  # outer modules first
            each.train(mode)


def _look_behind_batchnorm(module: nn.Module) -> None:
    """Let plain BatchNorm, which the start names anyway, use its running statistics."""
    for each in module.modules():
        if _is_plain(each):
            each.eval()


def has_batch_statistics(module: nn.Module) -> bool:
    """Return True if plain BatchNorm has no running statistics to use instead of the rows'."""
    every = [each for each in module.modules() if _is_plain(each)]
    return any(each.running_mean is None for each in every)


def _is_plain(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and not isinstance(layer, GroupBatchNorm)


@contextmanager
def _drawing(device: torch.device) -> Iterator[None]:
    """Restore the states of all generators at the end of the block."""
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            random.setstate(of_python)
            numpy.random.set_state(of_numpy)
