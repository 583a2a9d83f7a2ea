"""Bytes and messages that a rank sends in a step, by axis of the mesh.

An all-gather or a reduce-scatter over n ranks sends (n - 1) / n of the whole, an all-reduce twice
that, as rings do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.data.order import split
from trainer.plan.memory import ESTIMATED, MEASURED, Parts, size_of
from trainer.plan.passes import Passes
from trainer.plan.trial import Trial
from trainer.strategy.tree import nodes_of

AGREED = 2  # values that ranks agree on with the gradients: weight of the batch, stop requests


@dataclass(frozen=True)
class Message:
    """Collectives of one kind in a step: their number, and the bytes that a rank sends in all."""

    axis: str
    kind: str
    count: int
    num_bytes: float
    source: str = MEASURED
    note: str = ""


def list_messages(trial: Trial, parts: Parts, passes: Passes) -> list[Message]:
    """Return the collectives of a step."""
    if trial.mesh.data_size == 1:
        return []
    if trial.is_sharded:
        return [*_sharded(trial, parts), *_agreements(trial)]
    if trial.config.strategy.name == "exact":
        return _exact(trial)
    return _replicated(trial, passes)


def _replicated(trial: Trial, passes: Passes) -> list[Message]:
    size = trial.mesh.replicate
    trained = [p for p in trial.model.parameters() if p.requires_grad]
    itemsize = max(4, trial.precision.dtype.itemsize)
    ride = (AGREED + _count_statistics(trial)) * itemsize
    sizes = [p.nbytes for p in trained]
    sent = 2 * (size - 1) / size * (sum(sizes) + ride)
    order = passes.gradients or sizes[::-1]
    buckets = count_buckets([ride, *order], trial.config.strategy.bucket_mb)
    hook = trial.config.strategy.comm_hook
    is_plain = hook == "none"
    note = "" if is_plain else f"before strategy.comm_hook={hook}"
    source = MEASURED if is_plain else ESTIMATED
    return [Message("replicate", "all-reduce of gradients", buckets, sent, source, note)]


def count_buckets(sizes: Sequence[int], bucket_mb: float) -> int:
    """Return the number of DDP's buckets: each is closed by the tensor that fills it."""
    count = 0
    filled = 0
    for size in sizes:
        count += filled == 0
        filled += size
        if filled >= bucket_mb * 2**20:
            filled = 0
    return count


def _sharded(trial: Trial, parts: Parts) -> list[Message]:
    shard = trial.mesh.shard
    passes = trial.plan.accumulation
    gathers = passes * (2 if trial.config.strategy.reshard else 1)
    units = trial.units
    padded = [sum(parts[p].nbytes * shard for p in unit) for unit in units]
    kept = [[p for p in unit if p.requires_grad] for unit in units]
    trained = [sum(parts[p].nbytes * shard for p in unit) for unit in kept if unit]
    factor = (shard - 1) / shard
    note = f"{len(units)} units x {gathers // passes} x {passes} micro-batches"
    rows = [
        Message(
            "shard",
            "all-gather of parameters",
            gathers * len(units),
            gathers * factor * sum(padded),
            note=note,
        ),
        Message(
            "shard",
            "reduce-scatter of gradients",
            passes * len(trained),
            passes * factor * sum(trained),
            note=f"{len(trained)} units x {passes} micro-batches",
        ),
    ]
    copies = trial.mesh.replicate
    if copies > 1:
        local = size_of(parts[p] for unit in kept for p in unit)
        sent = 2 * (copies - 1) / copies * local
        rows.append(Message("replicate", "all-reduce of gradients", len(trained), sent))
    return rows


def _agreements(trial: Trial) -> list[Message]:
    size = trial.mesh.data_size
    config = trial.config
    scalars = [p for p in trial.model.parameters() if p.requires_grad and not p.dim()]
    checked = 2 * config.strategy.find_unused_parameters
    values = AGREED + checked + _count_statistics(trial) + 2
    whole = values * torch.float64.itemsize + size_of(scalars)
    count = 2 + bool(scalars)
    sent = 2 * (size - 1) / size * whole
    return [Message("world", "all-reduce of agreed values", count, sent)]


def _exact(trial: Trial) -> list[Message]:
    size = trial.mesh.replicate
    leaves = trial.config.data.global_batch // trial.rows
    vectors = len(nodes_of(*split((0, leaves), size, 0)))
    trained: list[nn.Parameter] = [p for p in trial.model.parameters() if p.requires_grad]
    itemsize = max(4, trial.precision.dtype.itemsize)
    length = sum(p.numel() for p in trained) + AGREED + _count_statistics(trial)
    each = -(-length // size) * itemsize * (size - 1)
    return [
        Message("replicate", "all-to-all of gradients", 1, vectors * each),
        Message("replicate", "all-gather of gradients", 1, each),
    ]


def _count_statistics(trial: Trial) -> int:
    """Return the number of running statistics: of BatchNorm, as the usual ones."""
    layers = [module for module in trial.model.modules() if isinstance(module, _BatchNorm)]
    means = [layer.running_mean for layer in layers if layer.running_mean is not None]
    return 2 * sum(mean.numel() for mean in means)
