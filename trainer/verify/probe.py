"""Probe: facts about data and model, to explain a difference between layouts."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.engine.proof.holders import Holders, of_dataset
from trainer.engine.proof.ranks import digest_rows
from trainer.run import Run
from trainer.strategy.modules.batchnorm import GroupBatchNorm, SyncBatchNorm
from trainer.verify.evidence import Probe
from trainer.verify.rows import OF_A_PROBE, rows_of

PROBED = 8  # examples, the same on every rank


def probe(run: Run) -> Probe:
    """Read a few examples, to compare them between ranks, and note what amplifies rounding."""
    config = run.config
    unit = config.norm_rows or 1
    rows = unit * -(-min(PROBED, config.data.global_batch) // unit)
    indices = run.batches.first_examples(0, rows)
    dataset = run.batches.dataset
    reading = Holders(of_dataset(dataset))
    batch = next(iter(run.batches.of_examples(indices)))
    changed_by_reading = reading.changed(of_dataset(dataset))
    layers = list(run.engine.tensors.structure.modules())
    return Probe(
        indices=indices.tolist(),
        digests=digest_rows(batch),
        rows=rows_of(*batch, OF_A_PROBE),
        changed_by_reading=changed_by_reading,
        is_torchs_dropout=config.run.dropout == "torch",
        has_batchnorm=any(_is_plain_batchnorm(layer) for layer in layers),
        has_max_pooling=any("MaxPool" in type(layer).__name__ for layer in layers),
        optimizers=[type(optimizer).__name__ for optimizer in run.engine.optimizers],
    )


def _is_plain_batchnorm(layer: nn.Module) -> bool:
    known = (GroupBatchNorm, SyncBatchNorm, nn.SyncBatchNorm)
    return isinstance(layer, _BatchNorm) and not isinstance(layer, known)
