"""A task whose training data are rows in memory, or the shards at an address."""

import time
from dataclasses import dataclass

import torch.nn.functional as F
from harness.shard_rows import rows
from torch import nn

from trainer import ShardedDataset, Trainer


def without_pad(example):
    return (example["inputs"], example["targets"]) if isinstance(example, dict) else example


class OnShards(Trainer):
    """Trains on the shards at `url`; without it, on the rows that they are written from."""

    @dataclass
    class Options:
        url: str
        cache_bytes: int
        pause_s: float

    def build_model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 8), nn.Dropout(0.1), nn.Linear(8, 5))

    def build_dataset(self, split):
        if split != "train":
            return None
        if not self.options.url:
            return rows()
        options = {"lanes": 4, "window": 2, "cache_bytes": self.options.cache_bytes}
        return ShardedDataset(self.options.url, without_pad, **options)

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="none")

    def train_step(self, batch):
        time.sleep(self.options.pause_s)
        return super().train_step(batch)
