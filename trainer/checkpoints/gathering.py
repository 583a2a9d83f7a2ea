"""Gathering: shards of all ranks as whole tensors on rank 0, whose disk the others do not see."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import torch

from trainer.distributed.group import Group
from trainer.strategy.shards import Shard, slices
from trainer.strategy.tensors import Tensors


@torch.no_grad()
def gather(shards: Mapping[str, Mapping[str, Shard]], group: Group) -> dict[str, dict[str, Shard]]:
    """Return whole tensors in host memory on rank 0, and nothing on other ranks. A collective."""
    own = [
        [kind, name, number, str(box.dtype), list(shard.shape), list(offset), list(box.shape)]
        for kind, named in shards.items()
        for name, shard in named.items()
        if shard.is_written
        for number, (box, offset) in enumerate(shard.boxes())
    ]
    wholes: dict[str, dict[str, Shard]] = {kind: {} for kind in shards}
    for rank, text in enumerate(group.gather_text(json.dumps(own))):
        for kind, name, number, dtype, shape, offset, size in json.loads(text):
            if rank == group.world.rank:
                box = list(shards[kind][name].boxes())[number][0]
            else:
                box = torch.empty(size, dtype=getattr(torch, dtype.removeprefix("torch.")))
            part = group.send_to_rank_0(box, rank)
            if group.world.rank == 0:
                new = Shard.whole(torch.empty(shape, dtype=part.dtype), True)
                whole = wholes[kind].setdefault(name, new)
                whole.tensor[slices(offset, size)] = part
    return wholes


def whole_parameters(tensors: Tensors, group: Group) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the name and all values of each parameter on rank 0. A collective, as is each item."""
    shards = tensors.shards()
    is_divided = len(tensors.writers()) > 1
    for name, _ in tensors.structure.named_parameters():
        own = {name: shards[name]} if name in shards else {}
        if is_divided:
            own = gather({"model": own}, group)["model"]
        for shard in own.values():
            yield name, shard.tensor
