"""Diagnosis: which example made a step bad, and which rank's state has drifted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from trainer.data.batches import LocalBatch, count_rows
from trainer.distributed.group import Group
from trainer.distributed.watch.watcher import name_ranks
from trainer.engine.engine import Engine
from trainer.engine.means import weigh
from trainer.engine.parts import Hooks
from trainer.errors import RunError
from trainer.strategy.base import call
from trainer.strategy.batchnorm import has_batchnorm
from trainer.strategy.rehearsal import untouched

MOST_RANKS_TOLD = 8
CHUNK = 2**22  # elements digested at once: the copies are of 64 bits
_SPREAD = 0x1E3779B97F4A7C15


@dataclass(frozen=True)
class Example:
    """One row of a step, recomputed: its loss is the mean over its values."""

    index: int
    loss: float
    is_finite: bool
    has_finite_gradient: bool

    @property
    def is_bad(self) -> bool:
        return not (self.is_finite and self.has_finite_gradient)


def name_bad_examples(engine: Engine, hooks: Hooks, batch: LocalBatch, group: Group) -> str:
    """Name the examples that made a batch not finite, and their ranks, by recomputation.

    The weights may have taken one more update since. The same on every rank. A collective.
    """
    try:
        line = _name_bad([e for e in examine(engine, hooks, batch) if e.is_bad])
    except Exception as error:  # a train_step of its own may have other losses
        line = f"recomputing it failed ({type(error).__name__})"
    lines = [(rank, line) for rank, line in enumerate(group.collect_text(line)) if line]
    told = [f"{line}, on rank {rank}" for rank, line in lines[:MOST_RANKS_TOLD]]
    if len(lines) > len(told):
        told.append(f"and more on {name_ranks(rank for rank, _ in lines[len(told) :])}")
    named = group.tell_all("; ".join(told))
    nothing = "the gradient is not finite, and recomputing finds no example that makes it so"
    return named or nothing


def _name_bad(bad: list[Example]) -> str:
    parts = []
    for e in bad[:3]:
        what = f"loss of example {e.index} is not finite ({e.loss})"
        parts.append(
            f"the gradient of example {e.index} is not finite" if e.is_finite else f"the {what}"
        )
    more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    return ", ".join(parts) + more


def examine(engine: Engine, hooks: Hooks, batch: LocalBatch) -> list[Example]:
    """This rank's examples of a batch. The model, its buffers and gradients stay as they are.

    With BatchNorm by its running statistics: one bad example would spoil all others.
    """
    module = engine.model
    found: list[Example] = []
    module.train(not has_batchnorm(module))
    try:
        with untouched(module), engine.draws.update("loss"):
            for indices, (inputs, targets) in zip(batch.indices, batch, strict=True):
                losses = _losses(engine, hooks, inputs, targets).detach()
                finite = losses.isfinite()
                bad: list[int] = []
                if finite.all():  # else every gradient of the micro-batch is spoiled
                    bad = _find_bad_gradients(engine, hooks, inputs, targets, len(losses))
                rows = zip(indices.tolist(), losses.tolist(), finite.tolist(), strict=True)
                found += [Example(*row, number not in bad) for number, row in enumerate(rows)]
    finally:
        module.train()
    return found


def _losses(engine: Engine, hooks: Hooks, inputs: Any, targets: Any) -> torch.Tensor:
    """(rows,): each example's mean over its values."""
    with engine.precision.autocast():
        outputs = call(engine.model, inputs)
        rows = count_rows(targets, outputs)
        values, weights = weigh("loss", hooks.loss(outputs, targets), rows)
    values = values if weights is None else values * weights
    return values.reshape(len(values), -1).mean(1)


def _find_bad_gradients(
    engine: Engine, hooks: Hooks, inputs: Any, targets: Any, num_rows: int
) -> list[int]:
    """By halving, so that it takes few passes. Examples apart, since inf x 0 is not 0."""
    found: list[int] = []
    pending = [(0, num_rows)]
    parameters = [local.parameter for local in engine.strategy.local_parameters()]
    while pending:
        first, last = pending.pop()
        part = partial(tree_map_only, torch.Tensor, lambda t, rows=slice(first, last): t[rows])
        engine.draws.begin_again(first, last)
        total = _losses(engine, hooks, part(inputs), part(targets)).sum()
        gradients: Any = ()
        if total.requires_grad:
            gradients = torch.autograd.grad(total, parameters, allow_unused=True)
        if all(bool(g.isfinite().all()) for g in gradients if g is not None):
            continue
        if last - first == 1:
            found.append(first)
            continue
        half = (first + last) // 2
        pending += [(half, last), (first, half)]
    return found


def check_drift(group: Group, step: int, state: Mapping[str, Any]) -> None:
    """Compare weights, buffers and optimizer state over the ranks, by digest. A collective.

    Tensors of whole numbers are left out: a buffer may count a rank's own rows.
    Raises RunError, alike on every rank, naming the first tensor that differs and where.
    """
    named = dict(_tensors(state))
    digests = torch.tensor([_digest(tensor) for tensor in named.values()], dtype=torch.int64)
    unequal = group.find_unequal(digests).nonzero().flatten().tolist()
    if not unequal:
        return
    first = unequal[0]
    column = group.gather_text(str(int(digests[first])))
    usual = Counter(column).most_common(1)[0][0]  # the ranks' majority; of two, rank 0
    astray = name_ranks(rank for rank, digest in enumerate(column) if digest != usual)
    why = "a rank changed its own copy, or memory failed"
    advice = "go on from a checkpoint before it with run.resume"
    line = f"{list(named)[first]} on {astray} is not what the other ranks have"
    raise RunError(f"step {step}: {line}; {why}; {advice}")


def _tensors(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        if tree.is_floating_point():
            yield name, tree
    elif isinstance(tree, (Mapping, list, tuple)):
        pairs = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        for key, value in pairs:
            yield from _tensors(value, f"{name}.{key}" if name else str(key))


def _digest(tensor: torch.Tensor) -> int:
    """64 bits of a tensor's bits and their places, by integer arithmetic modulo 2**64."""
    kinds = {1: torch.uint8, 2: torch.int16}
    kind = kinds.get(tensor.element_size(), torch.int32)
    bits = tensor.detach().contiguous().reshape(-1).view(kind)
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, len(bits), CHUNK):
        part = bits[first : first + CHUNK].long()
        last = first + 1 + len(part)
        places = torch.arange(first + 1, last, device=bits.device) * _SPREAD
        total += (part * (places | 1)).sum()
    return int(total)
