"""Cost of a strategy besides a rank's tensors: messages, memory, and what its optimizers step.

A plan asks for it on one process. An all-gather or a reduce-scatter over n ranks sends (n - 1) / n
of the whole, an all-reduce twice that, as rings do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from trainer.core.config.schema import Config
from trainer.core.strategy.mesh_sizes import Mesh

MEASURED = "measured"  # by running it without values, or exact arithmetic
ESTIMATED = "estimated"
AGREED = 2  # values that ranks agree on with the gradients: weight of the batch, stop requests
Parts = Mapping[nn.Parameter, nn.Parameter]  # of the model's parameters: a rank's part of each


@dataclass(frozen=True)
class Message:
    """Collectives of one kind: their number, and the bytes that a rank sends in all.

    `axis` names the axes of the mesh along which the ranks differ, or "world".
    """

    axis: str
    kind: str
    count: int
    num_bytes: float
    source: str = MEASURED
    note: str = ""


@dataclass(frozen=True)
class MemoryRow:
    """A row of the table of memory; `num_bytes` is None if it is not known."""

    name: str
    num_bytes: int | None
    source: str = MEASURED
    note: str = ""


@dataclass(frozen=True)
class PlannedRank:
    """A rank of a planned run. Its tensors may have no values.

    `parts` are its parameters by name, `units` those of each unit of FSDP, of which the first
    `num_blocks` are blocks. `stages` are the stages that use a parameter, by default the first one.
    `partial` are the parameters whose gradients the tensor axis has in parts. `gradients` are their
    sizes in the order of backward. `sent` is what a micro-batch's layers and stages send.
    """

    config: Config
    mesh: Mesh
    rows: int  # of a micro-batch
    accumulation: int  # micro-batches of a step
    itemsize: int  # bytes of an element of the weights
    num_statistics: int  # elements of running statistics
    parts: Mapping[str, nn.Parameter]
    units: Sequence[Sequence[nn.Parameter]]
    num_blocks: int
    stages: Mapping[str, tuple[int, ...]]
    partial: Collection[str]
    gradients: Sequence[int]
    sent: Sequence[Message]

    @property
    def trained(self) -> list[nn.Parameter]:
        return [part for part in self.parts.values() if part.requires_grad]


class Cost:
    """The cost of a strategy whose ranks exchange nothing and keep nothing more."""

    divides_state = False  # of the optimizers, though each rank has all parameters

    @classmethod
    def messages(cls, rank: PlannedRank) -> list[Message]:
        """Return the messages of a step of a rank."""
        return []

    @classmethod
    def memory(cls, rank: PlannedRank) -> list[MemoryRow]:
        """Return what a rank needs besides parameters, gradients, states and activations."""
        return []

    @classmethod
    def stepped(
        cls, optimizer: Optimizer, parts: Parts, whole: Parts, mesh: Mesh
    ) -> tuple[Parts, int]:
        """Return what an optimizer steps on rank 0 for each of its parameters, and the bytes that
        it gathers for this. `whole` are the undivided parameters."""
        every = [p for group in optimizer.param_groups for p in group["params"]]
        return {p: parts[p] for p in every if p in parts}, 0


def reduced(num_bytes: float, size: int) -> float:
    """Return the bytes that a rank sends in an all-reduce."""
    return 2 * (size - 1) / size * num_bytes


def size_of(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


class AllReduceCost(Cost):
    """The cost of one all-reduce of the gradients, a bucket at a time, and of the extras."""

    @classmethod
    def messages(cls, rank: PlannedRank) -> list[Message]:
        sizes = [p.nbytes for p in rank.trained]
        extras = (AGREED + rank.num_statistics) * max(4, rank.itemsize)
        block = rank.config.strategy
        count = count_buckets([extras, *(rank.gradients or sizes[::-1])], block.bucket_mb)
        is_plain = block.comm_hook == "none"
        note = "" if is_plain else f"before strategy.comm_hook={block.comm_hook}"
        source = MEASURED if is_plain else ESTIMATED
        sent = reduced(sum(sizes) + extras, rank.mesh.replicate)
        return [Message("replicate", "all-reduce of gradients", count, sent, source, note)]

    @classmethod
    def memory(cls, rank: PlannedRank) -> list[MemoryRow]:
        buckets = MemoryRow("buckets of ddp", 0, note="the same memory as the gradients")
        return [buckets] if rank.mesh.data_size > 1 else []


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
