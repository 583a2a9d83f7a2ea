"""The bytes that a node fetches, for data in shards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainer.data.shards.dataset import ShardedDataset


@dataclass(frozen=True)
class Fetching:
    """Bytes of the training data, those that a node reads in an epoch, and has to hold at once.

    A node reads the shards of its lanes, and those at their borders. `step_bytes`: of an average
    step.
    """

    total_bytes: int
    epoch_bytes: int
    held_bytes: int
    step_bytes: int
    cache_bytes: int


def measure_fetching(dataset: Any, global_batch: int, num_nodes: int) -> Fetching | None:
    """Return what one of the nodes fetches; None if the data are no shards."""
    if not isinstance(dataset, ShardedDataset):
        return None
    sampling = dataset.sampling
    total = int(dataset.index.sizes.clamp(min=0).sum())
    shards = len(dataset.index)
    lanes = min(sampling.lanes, global_batch, shards)
    own = -(-lanes // num_nodes)
    border = own * total // shards * (num_nodes > 1)
    of_epoch = min(total, total * own // lanes + border)
    held = min(of_epoch, own * (sampling.window + 1) * total // shards)
    steps = sampling.size // global_batch
    return Fetching(total, of_epoch, held, of_epoch // steps, dataset.cache.most_bytes)
