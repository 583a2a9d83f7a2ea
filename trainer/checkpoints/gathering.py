"""Gathering: shards of all ranks as whole tensors on rank 0, whose disk the others do not see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from trainer.distributed.group import Group
from trainer.strategy.shards import Shard, join_boxes, list_boxes
from trainer.strategy.tensors import Tensors


def gather(shards: Mapping[str, Shard], group: Group) -> dict[str, Shard]:
    """Return whole tensors in host memory on rank 0, and nothing on other ranks. A collective."""
    rank = group.world.rank

    def move(box: torch.Tensor, source: int) -> torch.Tensor | None:
        part = group.send_to_rank_0(box, source)
        return None if rank else part.cpu()

    wholes = join_boxes(group.gather(list_boxes(shards)), shards, rank, move)
    return {name: Shard.whole(tensor, True) for name, tensor in wholes.items()}


def whole_parameters(tensors: Tensors, group: Group) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and all values of each parameter on rank 0. A collective, as is each item."""
    shards = tensors.shards()
    is_divided = len(tensors.writers()) > 1
    for name, _ in tensors.structure.named_parameters():
        own = {name: shards[name]} if name in shards else {}
        if is_divided:
            own = gather(own, group)
        for shard in own.values():
            yield name, shard.tensor
