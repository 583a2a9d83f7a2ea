"""Cost of a model on a mesh: messages of each axis, and units of FSDP that are gathered."""

from __future__ import annotations

import torch
from torch.optim import Optimizer

from trainer.base.errors import counted
from trainer.core.strategy.collectives import buckets
from trainer.core.strategy.cost import (
    AGREED,
    ESTIMATED,
    Cost,
    MemoryRow,
    Message,
    Parts,
    PlannedRank,
    reduced,
    size_of,
)
from trainer.core.strategy.mesh_sizes import COPY_AXES, Mesh
from trainer.core.strategy.optimizer_trial import is_elementwise
from trainer.core.strategy.tensor_shards import find_owners

GRADIENT_SUMS = "all-reduce of gradients"
AGREEMENTS = "all-reduce of agreed values"


class MeshCost(Cost):
    """The cost of MeshParallel."""

    @classmethod
    def messages(cls, rank: PlannedRank) -> list[Message]:
        sharded = _sharded(rank) if rank.mesh.shard > 1 else []
        return [*_within(rank), *sharded, *_sums(rank), *_agreements(rank)]

    @classmethod
    def memory(cls, rank: PlannedRank) -> list[MemoryRow]:
        """Return the rows for units of FSDP that are whole for a while."""
        if rank.mesh.shard == 1:
            return []
        num_shards = rank.mesh.num_parts("shard", "context")
        sizes = [num_shards * size_of(unit) for unit in rank.units]
        trained = [size_of(p for p in unit if p.requires_grad) for unit in rank.units]
        rest = sum(sizes[rank.num_blocks :])
        largest = max(sizes[: rank.num_blocks], default=0)
        reshard = rank.config.strategy.reshard
        resident_bytes = rest + largest if reshard else sum(sizes)
        gathered = max(resident_bytes + largest, 2 * rest)  # a unit in flight is there twice
        name = "the rest of the model, a block" if largest else "the model"
        if not reshard:
            name = f"all {len(sizes)} units"
        gradients = sum(trained[rank.num_blocks :]) + max(trained[: rank.num_blocks], default=0)
        note = "of the rest and of a block, before they are summed into shards"
        return [
            MemoryRow("gathered parameters", gathered, ESTIMATED, f"{name}, one in flight"),
            MemoryRow("whole gradients", gradients, ESTIMATED, note),
        ]

    @classmethod
    def stepped(
        cls, optimizer: Optimizer, parts: Parts, whole: Parts, mesh: Mesh
    ) -> tuple[Parts, int]:
        """Return the parts, or for an optimizer of whole matrices those that rank 0 owns."""
        every, _ = super().stepped(optimizer, parts, whole, mesh)
        if is_elementwise(optimizer):
            return every, 0
        divided = [p for p, part in every.items() if part is not whole[p]]
        num_ranks = mesh.num_parts("shard", "context", "tensor")
        owners = find_owners((whole[p].numel() for p in divided), num_ranks)
        owned = {p: whole[p] for p, owner in zip(divided, owners, strict=True) if owner == 0}
        undivided = {p: part for p, part in every.items() if part is whole[p]}
        return undivided | owned, size_of(owned.values())


def _name_axes(mesh: Mesh, *axes: str) -> str:
    """Return the names of several axes, without those of size 1."""
    return " x ".join(axis for axis in axes if mesh.sizes[axis] > 1)


def _within(rank: PlannedRank) -> list[Message]:
    """Return the messages of the divided layers and of the stages."""
    count = rank.accumulation
    each = counted(count, "micro-batch", "es")
    return [
        Message(
            sent.axis,
            sent.kind,
            count * sent.count,
            count * sent.num_bytes,
            note=f"{sent.count} x {each}",
        )
        for sent in rank.sent
    ]


def _sharded(rank: PlannedRank) -> list[Message]:
    axis = _name_axes(rank.mesh, "shard", "context")
    passes = rank.accumulation
    gathers = passes * (2 if rank.config.strategy.reshard else 1)
    padded = sum(map(size_of, rank.units))
    trained_units = [[p for p in unit if p.requires_grad] for unit in rank.units]
    trained = [size_of(unit) for unit in trained_units if unit]
    others = rank.mesh.num_parts("shard", "context") - 1
    each = counted(passes, "micro-batch", "es")
    count, sums = gathers * len(rank.units), passes * len(trained)
    gathered, summed = gathers * others * padded, passes * others * sum(trained)
    note = f"{len(rank.units)} units x {gathers // passes} x {each}"
    summing = f"{len(trained)} units x {each}"
    rows = [
        Message(axis, "all-gather of parameters", count, gathered, note=note),
        Message(axis, "reduce-scatter of gradients", sums, summed, note=summing),
    ]
    if rank.mesh.replicate > 1:
        sent = reduced(sum(trained), rank.mesh.replicate)
        rows.append(Message("replicate", GRADIENT_SUMS, len(trained), sent))
    return rows


def _sums(rank: PlannedRank) -> list[Message]:
    """Return the sums of gradients at the end of a step, as GradientSums takes them."""
    mesh = rank.mesh
    members: dict[tuple[int, str, int], list[torch.Tensor]] = {}
    for name, part in rank.parts.items():
        if not part.requires_grad:
            continue
        stages = len(rank.stages.get(name, (0,)))
        if not (mesh.shard > 1 and part.dim()):
            key = (0, _name_axes(mesh, *COPY_AXES), mesh.num_parts(*COPY_AXES))
            members.setdefault(key, []).append(part)
        if name in rank.partial:
            members.setdefault((1, "tensor", mesh.tensor), []).append(part)
        members.setdefault((2, "pipeline", stages), []).append(part)
    rows = []
    most = int(rank.config.strategy.bucket_mb * 2**20)
    for (_, axis, size), tensors in sorted(members.items()):
        if size > 1:
            count = sum(1 for _ in buckets(tensors, most))
            widened = sum(t.numel() * max(4, t.itemsize) for t in tensors)
            rows.append(Message(axis, GRADIENT_SUMS, count, reduced(widened, size)))
    return rows


def _agreements(rank: PlannedRank) -> list[Message]:
    mesh = rank.mesh
    checked = 2 * rank.config.strategy.find_unused_parameters
    others = checked + rank.num_statistics
    copies = mesh.num_parts(*COPY_AXES)
    whole = (AGREED + 2 + others * (copies == mesh.size)) * torch.float64.itemsize
    rows = [Message("world", AGREEMENTS, 2, reduced(whole, mesh.size))]
    if others and 1 < copies < mesh.size:
        size = reduced(others * torch.float64.itemsize, copies)
        rows.append(Message(_name_axes(mesh, *COPY_AXES), AGREEMENTS, 1, size))
    return rows
