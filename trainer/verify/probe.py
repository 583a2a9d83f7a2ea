"""The probe: how model and loss treat a few examples, which explains a difference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer.data.batches import MicroBatch, count_rows
from trainer.data.order import Order
from trainer.engine.means import weigh
from trainer.engine.parts import Hooks
from trainer.run import Run
from trainer.strategy.base import call
from trainer.strategy.rehearsal import untouched
from trainer.verify.evidence import Probe, Tensors

PROBED = 8  # examples, the same on every rank


def probe(run: Run, hooks: Hooks) -> Probe:
    """Run model and loss on a few examples: twice with one seed, and the last half by itself.

    Nothing in the model changes. Every rank does it at once: a layer may have collectives.
    """
    config = run.config
    count = min(PROBED, config.data.global_batch)
    order = Order(config.run.seed, 0, run.batches.plan.num_examples)
    indices = order(torch.arange(count))
    batch = next(iter(run.batches.of_examples(indices)))
    module = run.engine.model
    layers = list(module.modules())
    dropouts = [layer for layer in layers if isinstance(layer, _DropoutNd) and layer.p > 0]
    with torch.no_grad(), untouched(module):
        first = _evaluate(run, hooks, batch, indices)
        second = _evaluate(run, hooks, batch, indices)
        with _disabled(dropouts):
            other_seed = _evaluate(run, hooks, batch, indices, 1)
            draws = not _are_equal(
                other_seed, _evaluate(run, hooks, batch, indices)
            )  # such as F.dropout
            module.train(not draws)  # else the rows would differ by what they draw
            whole = _evaluate(run, hooks, batch, indices)
            part = _evaluate(run, hooks, _rows_from(count // 2, batch), indices[count // 2 :])
            module.train()
    return Probe(
        indices=indices.tolist(),
        digests=digest_rows(batch),
        has_batchnorm=any(_is_plain_batchnorm(layer) for layer in layers),
        has_max_pooling=any("MaxPool" in type(layer).__name__ for layer in layers),
        num_dropouts=len(dropouts),
        optimizers=[type(optimizer).__name__ for optimizer in run.engine.optimizers],
        first=first,
        second=second,
        draws=draws,
        mixes={name: not _is_close(whole[name][count // 2 :], part[name]) for name in whole},
    )


@contextmanager
def _disabled(dropouts: Sequence[_DropoutNd]) -> Iterator[None]:
    """The layers with a rate of 0 while a block runs; one of a user's may ignore `training`."""
    rates = [layer.p for layer in dropouts]
    for layer in dropouts:
        layer.p = 0.0
    try:
        yield
    finally:
        for layer, rate in zip(dropouts, rates, strict=True):
            layer.p = rate


def _evaluate(
    run: Run, hooks: Hooks, batch: MicroBatch, indices: torch.Tensor, seed: int = 0
) -> Tensors:
    """{"outputs": (rows, n) of the model, "values": (rows, n) of the loss and its weights}."""
    inputs, targets = batch
    draws = run.engine.draws
    with draws.update("loss"), run.engine.precision.autocast():
        draws.begin(seed, 0, indices)
        outputs = call(run.engine.model, inputs)
        rows = count_rows(targets, outputs)
        values, weights = weigh("loss", hooks.loss(outputs, targets), rows)
    columns = [values] if weights is None else [values, weights]
    loss = torch.cat([_flatten(column, rows) for column in columns], 1)
    leaves = [_flatten(leaf, rows) for leaf in tree_leaves(outputs) if _has_rows(leaf, rows)]
    return {"outputs": torch.cat(leaves, 1) if leaves else loss, "values": loss}


def _flatten(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    return tensor.reshape(rows, -1).double().cpu()


def _has_rows(leaf: Any, rows: int) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 0 and len(leaf) == rows


def _rows_from(first: int, batch: MicroBatch) -> MicroBatch:
    return tree_map_only(torch.Tensor, lambda tensor: tensor[first:], batch)


def _are_equal(one: Tensors, other: Tensors) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-3, atol=1e-6)


def _is_plain_batchnorm(layer: nn.Module) -> bool:
    is_batchnorm = isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
    return is_batchnorm and type(layer).__module__.startswith("torch.")


def digest_rows(tree: Any) -> list[float]:
    """A number per example that a change of its tensors changes.

    Equal to rounding wherever it is computed; empty where no tensor has a batch axis.
    """
    leaves = [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not leaves:
        return []
    total = torch.zeros(len(leaves[0]), dtype=torch.float64, device=leaves[0].device)
    for leaf in leaves:
        flat = leaf.detach().reshape(len(leaf), -1).double()
        places = torch.arange(1, flat.shape[1] + 1, device=flat.device, dtype=torch.float64)
        total = total + (flat * torch.cos(places)).sum(1) + 3 * flat.sum(1)
    return total.tolist()
