"""Probe: run model and loss on a few examples, to explain a difference between layouts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_leaves

from trainer.data.order import Order
from trainer.data.preparation import MicroBatch
from trainer.engine.means import weigh
from trainer.engine.parts import Hooks
from trainer.engine.proof.holders import Holders, of_dataset
from trainer.engine.proof.ranks import digest_rows
from trainer.micro_batch import count_rows
from trainer.run import Run
from trainer.strategy.base import call
from trainer.strategy.modules.dry_run import untouched
from trainer.verify.evidence import Probe, Tensors

PROBED = 8  # examples, the same on every rank


def probe(run: Run, task: Any) -> Probe:
    """Run model and loss on a few examples, and prove them as the start of a run does.

    The model does not change. A collective: a layer of the model may contain collectives.
    """
    config = run.config
    unit = config.norm_rows or 1
    rows = unit * -(-min(PROBED, config.data.global_batch) // unit)
    order = Order(config.run.seed, 0, run.batches.plan.num_examples)
    indices = order(torch.arange(rows) % run.batches.plan.num_examples)
    dataset = run.batches.dataset
    reading = Holders(of_dataset(dataset))
    batch = next(iter(run.batches.of_examples(indices)))
    changed_by_reading = reading.changed(of_dataset(dataset))
    with run.engine.tensors.whole() as module, torch.no_grad(), untouched(module):
        layers = list(module.modules())
        results = _evaluate(run, task, module, batch, indices)
    proof = run.engine.proof
    proof.open(run.batches, print)
    verdict = proof.examine("loss", task.loss)
    proof.close()
    return Probe(
        indices=indices.tolist(),
        digests=digest_rows(batch),
        changed_by_reading=changed_by_reading,
        is_torchs_dropout=config.run.dropout == "torch",
        has_batchnorm=any(_is_plain_batchnorm(layer) for layer in layers),
        has_max_pooling=any("MaxPool" in type(layer).__name__ for layer in layers),
        optimizers=[type(optimizer).__name__ for optimizer in run.engine.optimizers],
        results=results,
        finding=verdict.line or run.engine.strategy.finding,
    )


def _evaluate(
    run: Run, hooks: Hooks, module: nn.Module, batch: MicroBatch, indices: torch.Tensor
) -> Tensors:
    """Return {"outputs": (rows, n) of the model, "values": (rows, n) of loss and its weights}."""
    inputs, targets = batch
    draws = run.engine.draws
    with draws.update("loss"), run.engine.precision.autocast():
        draws.begin(0, 0, indices)
        outputs = call(module, inputs)
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


def _is_plain_batchnorm(layer: nn.Module) -> bool:
    is_batchnorm = isinstance(layer, _BatchNorm) and not isinstance(layer, nn.SyncBatchNorm)
    return is_batchnorm and type(layer).__module__.startswith("torch.")
