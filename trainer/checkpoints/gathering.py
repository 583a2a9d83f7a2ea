"""Gathering: shards of all ranks as whole tensors on rank 0, whose disk the others do not see."""

from __future__ import annotations

import json
from collections.abc import Mapping

import torch

from trainer.checkpoints.sources import slices
from trainer.distributed.group import Group
from trainer.strategy.shards import Shard


@torch.no_grad()
def gather(shards: Mapping[str, Mapping[str, Shard]], group: Group) -> dict[str, dict[str, Shard]]:
    """Return whole tensors in host memory on rank 0, and nothing on other ranks. A collective."""
    own = [
        [kind, name, str(shard.tensor.dtype), *map(list, shard[1:3]), list(shard.tensor.shape)]
        for kind, named in shards.items()
        for name, shard in named.items()
        if shard.is_written
    ]
    wholes: dict[str, dict[str, Shard]] = {kind: {} for kind in shards}
    for rank, text in enumerate(group.gather_text(json.dumps(own))):
        for kind, name, dtype, shape, offset, size in json.loads(text):
            is_mine = rank == group.world.rank
            made = torch.empty(size, dtype=getattr(torch, dtype.removeprefix("torch.")))
            part = group.send_to_rank_0(shards[kind][name].tensor if is_mine else made, rank)
            if group.world.rank == 0:
                new = Shard.whole(torch.empty(shape, dtype=part.dtype), True)
                whole = wholes[kind].setdefault(name, new)
                whole.tensor[slices(offset, size)] = part
    return wholes
