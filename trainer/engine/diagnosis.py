"""Diagnosis: find the example that made a step not finite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from trainer.data.batches import LocalBatch
from trainer.distributed.group import Group
from trainer.distributed.watch.collectives import name_ranks
from trainer.engine.engine import Engine
from trainer.engine.means import weigh_all
from trainer.engine.parts import Hooks
from trainer.hook_errors import call
from trainer.micro_batch import count_rows
from trainer.strategy.modules.batchnorm import has_batchnorm
from trainer.strategy.modules.dry_run import untouched

MOST_RANKS_NAMED = 8


@dataclass(frozen=True)
class Example:
    """A recomputed row of a step; its loss is the weighted mean of its values."""

    index: int
    loss: float
    weight: float
    is_finite: bool
    has_finite_gradient: bool

    @property
    def is_bad(self) -> bool:
        return not (self.is_finite and self.has_finite_gradient)


def name_bad_examples(engine: Engine, hooks: Hooks, batch: LocalBatch, group: Group) -> str:
    """Return a line with the examples that made a batch not finite, and their ranks.

    It recomputes the batch; the weights may have had one more update since. The line is the same on
    every rank. Collective: every rank must call it.
    """
    try:
        bad = [e for e in examine(engine, hooks, batch) if e.is_bad]
        line = _name_bad(bad) if engine.strategy.mesh.is_counted else ""
    except Exception as error:  # a custom train_step may have other losses
        line = f"recomputing it failed ({type(error).__name__})"
    lines = [(rank, line) for rank, line in enumerate(group.collect(line)) if line]
    named = [f"{line}, on rank {rank}" for rank, line in lines[:MOST_RANKS_NAMED]]
    if len(lines) > len(named):
        named.append(f"and more on {name_ranks(rank for rank, _ in lines[len(named) :])}")
    line = group.tell_all("; ".join(named))
    nothing = "the gradient is not finite, and recomputation finds no example as the cause"
    return line or nothing


def _name_bad(bad: list[Example]) -> str:
    parts = []
    for e in bad[:3]:
        loss = f"loss of example {e.index} is not finite ({e.loss})"
        parts.append(
            f"the gradient of example {e.index} is not finite" if e.is_finite else f"the {loss}"
        )
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return ", ".join(parts) + more


def examine(engine: Engine, hooks: Hooks, batch: LocalBatch) -> list[Example]:
    """Recompute this rank's examples of a batch; the model and its buffers do not change.

    Gradients are dropped. BatchNorm uses its running statistics: with batch statistics, one bad
    example would make all others bad.
    """
    with engine.tensors.whole() as module:
        module.train(not has_batchnorm(module))
        try:
            with untouched(module), engine.draws.update("loss"):
                return _examine(engine, hooks, module, batch)
        finally:
            module.train()


def _examine(engine: Engine, hooks: Hooks, module: nn.Module, batch: LocalBatch) -> list[Example]:
    examples: list[Example] = []
    compute = partial(_losses, engine, hooks, module)
    parameters = [p for p in module.parameters() if p.requires_grad]
    for indices, (inputs, targets) in zip(batch.indices, batch, strict=True):
        totals, weights = (each.detach() for each in compute(inputs, targets))
        finite = totals.isfinite()
        bad: list[int] = []
        if finite.all():  # otherwise no gradient of the micro-batch is finite
            bad = _find_bad_gradients(engine, compute, parameters, inputs, targets, len(totals))
        losses = torch.where(weights > 0, totals / weights, totals)
        columns = [each.tolist() for each in (indices, losses, weights, finite)]
        for number, (index, loss, weight, is_finite) in enumerate(zip(*columns, strict=True)):
            examples.append(Example(index, loss, weight, is_finite, number not in bad))
    return examples


def _losses(
    engine: Engine, hooks: Hooks, module: nn.Module, inputs: Any, targets: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (rows,) sums of the weighted loss values of each example, and (rows,) weights."""
    with engine.precision.autocast():
        outputs = call(module, inputs)
        rows = count_rows(targets, outputs)
        values, weights = weigh_all("loss", hooks.loss(outputs, targets), rows)
    rows_of = [each.reshape(len(values), -1).sum(1) for each in (values * weights, weights)]
    return rows_of[0], rows_of[1]


def _find_bad_gradients(
    engine: Engine,
    compute: Callable[[Any, Any], tuple[torch.Tensor, torch.Tensor]],
    parameters: Sequence[nn.Parameter],
    inputs: Any,
    targets: Any,
    num_rows: int,
) -> list[int]:
    """Return the rows whose gradient is not finite, by bisection, so that few passes suffice.

    Rows are recomputed apart from each other, since inf x 0 is not 0.
    """
    bad: list[int] = []
    pending = [(0, num_rows)]
    while pending:
        first, last = pending.pop()
        part = partial(tree_map_only, torch.Tensor, lambda t, rows=slice(first, last): t[rows])
        engine.draws.begin_again(first, last)
        total = compute(part(inputs), part(targets))[0].sum()
        gradients: Any = ()
        if total.requires_grad:
            gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        if all(bool(g.isfinite().all()) for g in gradients if g is not None):
            continue
        if last - first == 1:
            bad.append(first)
            continue
        half = (first + last) // 2
        pending += [(half, last), (first, half)]
    return bad
