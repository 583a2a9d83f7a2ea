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

from trainer.data.order import counted, split
from trainer.plan.counting import ALL_GATHER, ALL_REDUCE, reduced
from trainer.plan.held import StageTensors
from trainer.plan.memory import ESTIMATED, MEASURED
from trainer.plan.passes import Passes
from trainer.plan.trial import Trial
from trainer.strategy.exact_tree import nodes_of
from trainer.strategy.mesh import COPIES, Mesh
from trainer.strategy.mesh_model.gradient_sums import buckets

AGREED = 2  # values that ranks agree on with the gradients: weight of the batch, stop requests


@dataclass(frozen=True)
class Message:
    """Collectives of one kind in a step: their number, and the bytes that a rank sends in all.

    `axis` names the axes of the mesh along which the ranks differ, or "world".
    """

    axis: str
    kind: str
    count: int
    num_bytes: float
    source: str = MEASURED
    note: str = ""


def list_messages(trial: Trial, held: StageTensors, passes: Passes) -> list[Message]:
    """Return the messages of a step of a rank."""
    if trial.mesh.size == 1:
        return []
    if trial.config.strategy.name == "exact":
        return _exact(trial, held)
    if not trial.mesh.is_divided:
        return _replicated(trial, held, passes)
    rows = _within(trial, passes)
    if trial.is_sharded:
        rows += _sharded(trial, held)
    return [*rows, *_sums(trial, held), *_agreements(trial, held)]


def name_axes(mesh: Mesh, *axes: str) -> str:
    """Return the names of several axes, without those of size 1."""
    return " x ".join(axis for axis in axes if mesh.sizes[axis] > 1)


def _within(trial: Trial, passes: Passes) -> list[Message]:
    """Return the messages of the divided layers and of the stages."""
    count = trial.plan.accumulation
    rows = []
    for sent in passes.sent:
        kind = sent.kind
        if kind in (ALL_REDUCE, ALL_GATHER):
            kind += " of keys and values" if sent.axis == "context" else " of activations"
        note = f"{sent.count} x {counted(count, 'micro-batch', 'es')}"
        rows.append(Message(sent.axis, kind, count * sent.count, count * sent.num_bytes, note=note))
    return rows


def _replicated(trial: Trial, held: StageTensors, passes: Passes) -> list[Message]:
    size = trial.mesh.replicate
    trained = [p for p in trial.model.parameters() if p.requires_grad]
    itemsize = max(4, trial.precision.dtype.itemsize)
    ride = (AGREED + _count_statistics(trial, held.buffers)) * itemsize
    sizes = [p.nbytes for p in trained]
    sent = reduced(sum(sizes) + ride, size)
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


def _sharded(trial: Trial, held: StageTensors) -> list[Message]:
    parts = held.parts
    axis = name_axes(trial.mesh, "shard", "context")
    passes = trial.plan.accumulation
    gathers = passes * (2 if trial.config.strategy.reshard else 1)
    padded = sum(parts[p].nbytes for unit in held.units for p in unit)
    kept = [[p for p in unit if p.requires_grad] for unit in held.units]
    trained = [sum(parts[p].nbytes for p in unit) for unit in kept if unit]
    others = trial.num_shards - 1
    each = counted(passes, "micro-batch", "es")
    count, sums = gathers * len(held.units), passes * len(trained)
    gathered, summed = gathers * others * padded, passes * others * sum(trained)
    note = f"{len(held.units)} units x {gathers // passes} x {each}"
    rows = [
        Message(axis, "all-gather of parameters", count, gathered, note=note),
        Message(
            axis,
            "reduce-scatter of gradients",
            sums,
            summed,
            note=f"{len(trained)} units x {each}",
        ),
    ]
    if trial.mesh.replicate > 1:
        sent = reduced(sum(trained), trial.mesh.replicate)
        rows.append(Message("replicate", "all-reduce of gradients", len(trained), sent))
    return rows


def _sums(trial: Trial, held: StageTensors) -> list[Message]:
    """Return the sums of gradients at the end of a step, as GradientSums takes them."""
    mesh = trial.mesh
    partial = trial.partial
    members: dict[tuple[int, str, int], list[torch.Tensor]] = {}
    for name, parameter in trial.model.named_parameters():
        part = held.parts.get(parameter)
        if part is None or not part.requires_grad:
            continue
        stages = len(trial.partition.stages.get(name, (0,)))
        if not (trial.is_sharded and part.dim()):
            key = (0, name_axes(mesh, *COPIES), mesh.num_parts(*COPIES))
            members.setdefault(key, []).append(part)
        if name in partial:
            members.setdefault((1, "tensor", mesh.tensor), []).append(part)
        members.setdefault((2, "pipeline", stages), []).append(part)
    rows = []
    most = int(trial.config.strategy.bucket_mb * 2**20)
    for (_, axis, size), tensors in sorted(members.items()):
        if size > 1:
            count = sum(1 for _ in buckets(tensors, most))
            widened = sum(t.numel() * max(4, t.itemsize) for t in tensors)
            sent = reduced(widened, size)
            rows.append(Message(axis, "all-reduce of gradients", count, sent))
    return rows


def _agreements(trial: Trial, held: StageTensors) -> list[Message]:
    mesh = trial.mesh
    checked = 2 * trial.config.strategy.find_unused_parameters
    others = checked + _count_statistics(trial, held.buffers)
    copies = mesh.num_parts(*COPIES)
    apart = bool(others) and 1 < copies < mesh.size
    whole = (AGREED + 2 + others * (copies == mesh.size)) * torch.float64.itemsize
    sent = reduced(whole, mesh.size)
    rows = [Message("world", "all-reduce of agreed values", 2, sent)]
    if apart:
        size = reduced(others * torch.float64.itemsize, copies)
        rows.append(Message(name_axes(mesh, *COPIES), "all-reduce of agreed values", 1, size))
    return rows


def _exact(trial: Trial, held: StageTensors) -> list[Message]:
    size = trial.mesh.replicate
    leaves = trial.config.data.global_batch // trial.rows
    vectors = len(nodes_of(*split((0, leaves), size, 0)))
    trained: list[nn.Parameter] = [p for p in trial.model.parameters() if p.requires_grad]
    itemsize = max(4, trial.precision.dtype.itemsize)
    length = sum(p.numel() for p in trained) + AGREED + _count_statistics(trial, held.buffers)
    each = -(-length // size) * itemsize * (size - 1)
    return [
        Message("replicate", "all-to-all of gradients", 1, vectors * each),
        Message("replicate", "all-gather of gradients", 1, each),
    ]


def _count_statistics(trial: Trial, buffers: Sequence[torch.Tensor]) -> int:
    """Return the number of running statistics among buffers: of BatchNorm, as the usual ones."""
    known = set(buffers)
    layers = [module for module in trial.model.modules() if isinstance(module, _BatchNorm)]
    means = [layer.running_mean for layer in layers if layer.running_mean is not None]
    return 2 * sum(mean.numel() for mean in means if mean in known)
