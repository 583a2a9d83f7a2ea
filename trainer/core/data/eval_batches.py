"""Batches of evaluation: this rank's shard of the data, every example in exactly one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trainer.core.config.schema import Config
from trainer.core.data.loaders import ExampleSource
from trainer.core.data.order import BatchSplit, IndexSampler, Leaves, check_batch
from trainer.core.data.preparation import Preparation
from trainer.core.distributed import accelerator


class ShardSampler(IndexSampler):
    """One rank's contiguous shard of the evaluation data, in micro-batches.

    Shards are padded to equal length, so that every rank calls the model equally often. A padding
    row is example 0 at the end of a micro-batch, and is cut off before anything is counted.
    """

    def __init__(
        self,
        num_examples: int,
        micro_batch: int,
        rank: int,
        ranks: int,
        device: torch.device,
        is_fixed: bool = False,
    ):
        """Split `num_examples` over `ranks`.

        With `is_fixed`, every micro-batch has `micro_batch` rows; the last ones are padded.
        """
        length = -(-num_examples // ranks)
        self.leaves: Leaves | None = None
        if is_fixed:
            each = -(-length // micro_batch)
            length = each * micro_batch
            self.leaves = Leaves(rank * each, each, ranks * each)
        self.first = rank * -(-length // micro_batch)  # number of this rank's first micro-batch
        self._num_examples = num_examples
        self._micro_batch = micro_batch
        self._start = rank * length
        self._end = self._start + length
        self._device = device

    def __len__(self) -> int:
        return -(-(self._end - self._start) // self._micro_batch)

    @property
    def is_padding(self) -> bool:
        """Return True if this shard is padding only."""
        return self._start >= self._num_examples

    def rows(self) -> Iterator[int]:
        """Iterate over the number of real rows in each micro-batch."""
        for first, last in self._parts():
            yield min(last, self._num_examples) - min(first, self._num_examples)

    def __iter__(self) -> Iterator[torch.Tensor]:
        for first, last in self._parts():
            positions = torch.arange(first, last)
            yield accelerator.send(
                torch.where(positions < self._num_examples, positions, 0), self._device
            )

    def _parts(self) -> Iterator[tuple[int, int]]:
        for first in range(self._start, self._end, self._micro_batch):
            yield first, min(first + self._micro_batch, self._end)


class EvalBatches:
    """This rank's shard of the evaluation data; every example is in exactly one shard."""

    def __init__(
        self,
        dataset: Any,
        config: Config,
        batch_split: BatchSplit,
        rank: int,
        size: int,
        prepare: Preparation,
        split: str = "eval",
    ):
        """Shard a data set. Random draws of training examples are not those of training."""
        data = config.data
        self.split = "eval" if split == "train" else split
        source = ExampleSource(
            dataset, self.split, data, prepare.seed, prepare.device, prepare.collate
        )
        rows = config.eval.micro_batch or check_batch(data.global_batch, batch_split, size)
        device = source.index_device
        self._shard = ShardSampler(len(dataset), rows, rank, size, device, batch_split.is_fixed)
        self._prepare = prepare
        self._loader = source.open(self._shard)

    @property
    def leaves(self) -> Leaves | None:
        return self._shard.leaves

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches, the same on every rank."""
        return len(self._shard)

    @property
    def is_padding(self) -> bool:
        """Return True if this shard is padding only."""
        return self._shard.is_padding

    def __iter__(self) -> Iterator[tuple[Any, Any, int]]:
        """Iterate over (inputs, targets, number of real rows); padding rows come last."""
        pairs = zip(self._loader, self._shard.rows(), strict=False)
        for micro_batch_index, (piece, rows) in enumerate(pairs, self._shard.first):
            inputs, targets = self._prepare(piece, self.split, 0, -1, micro_batch_index)
            yield inputs, targets, rows
