"""What is looked into only once something is wrong: which example made a step bad, and which rank went astray."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from trainer.distributed.group import Group
from trainer.engine.means import count_rows, weigh
from trainer.errors import RunError
from trainer.run import Session
from trainer.strategy.base import call, untouched
from trainer.strategy.batchnorm import has_batchnorm

CHUNK = 2**22  # elements digested at once: the copies are of 64 bits


@dataclass(frozen=True)
class Example:
    """One row of a step, recomputed: its loss (the mean over its values), and whether loss and gradient are finite."""

    index: int
    loss: float
    is_finite: bool
    has_finite_gradient: bool


def name_bad_examples(session: Session, step: int) -> str:
    """Which examples made a 0-based step not finite, and on which rank; by recomputation, on every rank alike.

    The weights may have taken one more update since. A collective.
    """
    try:
        bad = [e for e in examine(session, step) if not (e.is_finite and e.has_finite_gradient)]
        told = ", ".join(
            f"the gradient of example {e.index} is not finite"
            if e.is_finite
            else f"the loss of example {e.index} is not finite ({e.loss})"
            for e in bad[:3]
        )
        told += f" and {len(bad) - 3} more" if len(bad) > 3 else ""
    except Exception as error:  # a train_step of its own may have other losses
        told = f"recomputing it failed ({type(error).__name__})"
    lines = session.group.gather_text(told)
    named = "; ".join(f"{line}, on rank {rank}" for rank, line in enumerate(lines) if line)
    return named or "the gradient is not finite, and recomputing finds no example that makes it so"


def examine(session: Session, step: int) -> list[Example]:
    """This rank's examples of a 0-based step. The model, its buffers and its gradients stay as they are.

    With BatchNorm by its running statistics: in a batch, one bad example would spoil all the others.
    """
    task, module, found = session.task, session.strategy.module, list[Example]()
    now, task.step = task.step, step
    try:
        module.train(not has_batchnorm(module))
        with untouched(module):
            for (_, indices), (inputs, targets) in zip(
                (share := session.share_of(step)).batches, share, strict=True
            ):
                losses = _losses(session, inputs, targets).detach()
                finite, bad = losses.isfinite(), list[int]()
                if (
                    finite.all()
                ):  # else every gradient of the micro-batch is spoiled by those that are not
                    bad = _find_bad_gradients(session, inputs, targets, len(losses))
                rows = zip(indices.tolist(), losses.tolist(), finite.tolist(), strict=True)
                found += [Example(*row, number not in bad) for number, row in enumerate(rows)]
    finally:
        module.train()
        task.step = now
    return found


def _losses(session: Session, inputs: Any, targets: Any) -> torch.Tensor:
    """(rows,): each example's mean over its values."""
    with session.precision.autocast():
        outputs = call(session.strategy.module, inputs)
        values, weights = weigh(
            "loss", session.task.loss(outputs, targets), count_rows(targets, outputs)
        )
    values = values if weights is None else values * weights
    return values.reshape(len(values), -1).mean(1)


def _find_bad_gradients(session: Session, inputs: Any, targets: Any, num_rows: int) -> list[int]:
    """By halving, so that it takes few passes; examples are looked at apart from each other, since inf x 0 is not 0."""
    found, pending = list[int](), [(0, num_rows)]
    parameters = [p for p in session.strategy.module.parameters() if p.requires_grad]
    while pending:
        first, last = pending.pop()
        part = partial(tree_map_only, torch.Tensor, lambda t, rows=slice(first, last): t[rows])
        total = _losses(session, part(inputs), part(targets)).sum()
        gradients = (
            torch.autograd.grad(total, parameters, allow_unused=True) if total.requires_grad else ()
        )
        if all(bool(g.isfinite().all()) for g in gradients if g is not None):
            continue
        half = (first + last) // 2
        found += [first] if last - first == 1 else []
        pending += [(half, last), (first, half)] if last - first > 1 else []
    return found


def check_drift(group: Group, step: int, state: Mapping[str, Any]) -> None:
    """Compare weights, buffers and optimizer state over the data-parallel ranks, by digest. A collective.

    Tensors of whole numbers are left out: a buffer may count a rank's own rows.
    Raises RunError, alike on every rank, naming the first tensor that differs and where.
    """
    named = dict(_tensors(state))
    table = torch.tensor([_digest(tensor) for tensor in named.values()], dtype=torch.int64)
    parts = torch.stack([part.cpu() for part in group.gather(table)])
    for name, column in zip(named, parts.t().tolist(), strict=True):
        usual = max(column, key=column.count)  # the ranks' majority; of two, rank 0
        if astray := [str(rank) for rank, digest in enumerate(column) if digest != usual]:
            which = f"rank {astray[0]}" if len(astray) == 1 else f"ranks {', '.join(astray)}"
            advice = "a rank changed its own copy, or memory failed; go on from a checkpoint before it with run.resume"
            raise RunError(
                f"step {step}: {name} on {which} is not what the other ranks have; {advice}"
            )


def _tensors(tree: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tree, torch.Tensor):
        if tree.is_floating_point():
            yield name, tree
    elif isinstance(tree, (Mapping, list, tuple)):
        for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
            yield from _tensors(value, f"{name}.{key}" if name else str(key))


def _digest(tensor: torch.Tensor) -> int:
    """64 bits of a tensor's bits and their places, by integer arithmetic modulo 2**64."""
    kinds = {1: torch.uint8, 2: torch.int16}
    bits = (
        tensor.detach().contiguous().reshape(-1).view(kinds.get(tensor.element_size(), torch.int32))
    )
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for first in range(0, len(bits), CHUNK):
        part = bits[first : first + CHUNK].long()
        places = (
            torch.arange(first + 1, first + 1 + len(part), device=bits.device) * 0x1E3779B97F4A7C15
        )
        total += (part * (places | 1)).sum()
    return int(total)
