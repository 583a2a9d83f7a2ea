"""Batches: this rank's rows of every step, and its shard of the evaluation data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves

from trainer.config.schema import Config
from trainer.data.ledger import Ledger
from trainer.data.order import (
    BatchPlan,
    EpochSampler,
    FixedSampler,
    ShardSampler,
    check_batch,
    counted,
)
from trainer.data.randomness import Random, seed_layers
from trainer.data.sources import ResidentLoader, index_device, open_loader
from trainer.distributed.group import Group
from trainer.distributed.watch.heartbeat import Heartbeat, Phase
from trainer.errors import ConfigError, RunError

MicroBatch = tuple[Any, Any]
Piece = tuple[Any, torch.Tensor]  # what the dataset gives, and the example indices
MOST_UNREADABLE = 10  # training examples, or 1 % of them


class Share(Protocol):
    """Which part of the data this rank takes."""

    @property
    def data_rank(self) -> int: ...
    @property
    def data_size(self) -> int: ...


class Hooks(Protocol):
    """The methods of a task that turn what its dataset gives into a micro-batch."""

    def split_batch(self, batch: Any) -> tuple[Any, Any]: ...
    def augment(
        self, inputs: Any, targets: Any, random: Random, train: bool
    ) -> tuple[Any, Any]: ...


def count_rows(*trees: Any) -> int:
    """The length of the first axis of the first tensor found: every tensor is batch-first."""
    for tree in trees:
        for leaf in [tree] if isinstance(tree, torch.Tensor) else tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                return leaf.shape[0]
    raise ConfigError("neither targets nor outputs hold a tensor with a batch axis")


class Preparation:
    """Split, augmented, and in the dtype and layout of the model: a micro-batch as it is used."""

    def __init__(
        self,
        hooks: Hooks,
        convert: Callable[[Any, Any], MicroBatch],
        seed: int,
        device: torch.device,
    ):
        self.seed = seed
        self.device = device
        self._hooks = hooks
        self._convert = convert

    def __call__(self, batch: Any, indices: torch.Tensor, split: str, epoch: int) -> MicroBatch:
        inputs, targets = self._hooks.split_batch(batch)
        random = Random(self.seed, split, epoch, indices)
        inputs, targets = self._hooks.augment(inputs, targets, random, split == "train")
        return self._convert(inputs, targets)


class LocalBatch:
    """This rank's rows of one global batch, in micro-batches.

    Iterating augments a micro-batch and seeds dropout for it, so run it before taking the next.
    It may be iterated several times, with the same numbers.
    """

    def __init__(
        self,
        prepare: Preparation,
        heartbeat: Heartbeat,
        pieces: Sequence[Piece],
        first: int,
        step: int,
        epoch: int,
    ):
        """`first` is the number of the first micro-batch in the global batch."""
        self.pieces = pieces
        self._prepare = prepare
        self._heartbeat = heartbeat
        self._first = first
        self._step = step
        self._epoch = epoch

    @property
    def indices(self) -> list[torch.Tensor]:
        """The example indices of each micro-batch."""
        return [indices for _, indices in self.pieces]

    def __len__(self) -> int:
        return len(self.pieces)

    def __iter__(self) -> Iterator[MicroBatch]:
        prepare = self._prepare
        for number, (batch, indices) in enumerate(self.pieces, self._first):
            if number > self._first:  # Batches entered the phase for the first one
                self._heartbeat.enter(Phase.COMPUTE)
            prepared = prepare(batch, indices, "train", self._epoch)
            seed_layers(prepare.seed, self._step, number, prepare.device)
            yield prepared


class Batches:
    """The training data in the order of the run, as one LocalBatch per step."""

    def __init__(
        self,
        dataset: Any,
        config: Config,
        share: Share,
        prepare: Preparation,
        group: Group,
        heartbeat: Heartbeat,
    ):
        """Raises ConfigError for data with too few examples."""
        data = config.data
        num_examples = len(dataset)
        if data.global_batch > num_examples:
            most = f"must be at most the {num_examples} training examples"
            raise ConfigError(f"data.global_batch={data.global_batch}: {most}")
        micro_batch = check_batch(data.global_batch, data.micro_batch, share.data_size)
        self.plan = BatchPlan(num_examples, data.global_batch, micro_batch, share.data_size)
        self.ledger = Ledger(self.plan, share.data_rank)
        self.replaced: dict[str, int] = {}
        self._dataset = dataset
        self._config = config
        self._rank = share.data_rank
        self._prepare = prepare
        self._group = group
        self._heartbeat = heartbeat
        self._device = index_device(dataset, data.path, prepare.device)
        self._sampler = EpochSampler(self.plan, prepare.seed, self._rank, self._device)
        loader = open_loader(dataset, self._sampler, data, prepare.seed, "train", prepare.device)
        self._loaders = [loader]

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.steps_per_epoch

    def epoch(self, epoch: int, first: int = 0) -> Iterator[LocalBatch]:
        """The batches of an epoch, from its 0-based step `first` on."""
        self._sampler.set_epoch(epoch, first)
        pieces = iter(self._loaders[0])
        begin = epoch * self.steps_per_epoch
        for step in range(begin + first, begin + self.steps_per_epoch):
            self._heartbeat.begin_step(step)
            taken = list(islice(pieces, self.plan.accumulation))
            batch = self._local(taken, step, epoch)
            self.ledger.note(batch.indices, self._group)
            self._heartbeat.enter(Phase.COMPUTE)
            yield batch

    def of_step(self, step: int) -> LocalBatch:
        """The batch of any 0-based step, read in this process and not entered in the ledger."""
        epoch, first = divmod(step, self.steps_per_epoch)
        sampler = EpochSampler(self.plan, self._prepare.seed, self._rank, self._device)
        sampler.set_epoch(epoch, first)
        wanted = list(islice(sampler, self.plan.accumulation))
        return self._local(self.read(FixedSampler(wanted, epoch)), step, epoch)

    def of_examples(self, indices: torch.Tensor) -> LocalBatch:
        """Given examples as one micro-batch, read in this process and as of epoch 0."""
        pieces = self.read(FixedSampler([indices.to(self._device)]))
        return LocalBatch(self._prepare, self._heartbeat, pieces, 0, 0, 0)

    def read(self, sampler: FixedSampler) -> list[Piece]:
        """Given examples, read in this process."""
        loader = self._loaders[0]
        if isinstance(loader, ResidentLoader):
            return list(loader.over(sampler))
        data = replace(self._config.data, workers=0)
        prepare = self._prepare
        opened = open_loader(self._dataset, sampler, data, prepare.seed, "train", prepare.device)
        return list(opened)

    def _local(self, pieces: Sequence[Piece], step: int, epoch: int) -> LocalBatch:
        first = self._rank * self.plan.accumulation
        return LocalBatch(self._prepare, self._heartbeat, pieces, first, step, epoch)

    def gather_replaced(self) -> list[int]:
        """Exchange which training examples could not be read; the new ones. A collective.

        Raises RunError for more than 10 of them, or 1 % of the data.
        """
        if self._config.data.on_error != "skip":
            return []
        here = getattr(self._loaders[0], "replaced", {})
        found: dict[str, int] = {}
        for line in self._group.gather_text(json.dumps(here)):
            found |= json.loads(line)
        known = {int(place.split("/")[1]) for place in self.replaced}
        unreadable = {int(place.split("/")[1]) for place in found}
        self.replaced |= found
        count = len(known | unreadable)
        most = max(MOST_UNREADABLE, self.plan.num_examples // 100)
        if count > most:
            read = f"{counted(count, 'train example')} cannot be read"
            raise RunError(f"data.on_error=skip: {read}; at most {most} may")
        return sorted(unreadable - known)

    def restore(self, step: int, chain: str, replaced: dict[str, int]) -> None:
        """Continue the ledger after `step` with what a checkpoint holds."""
        self.ledger.restore(step, chain)
        self.replaced = dict(replaced)

    def close(self) -> None:
        """End the data workers now: the garbage collector would wait 5 s for each."""
        self._loaders.clear()


class EvalBatches:
    """This rank's shard of the evaluation data: every example in exactly one shard."""

    def __init__(self, dataset: Any, config: Config, share: Share, prepare: Preparation):
        data = config.data
        size = share.data_size
        default = check_batch(data.global_batch, data.micro_batch, size)
        rows = config.eval.micro_batch or default
        device = index_device(dataset, data.path, prepare.device)
        self._shard = ShardSampler(len(dataset), rows, share.data_rank, size, device)
        self._prepare = prepare
        self._loader = open_loader(dataset, self._shard, data, prepare.seed, "eval", prepare.device)

    @property
    def is_padding(self) -> bool:
        """Is this a shard of padding alone?"""
        return not any(self._shard.rows)

    def __iter__(self) -> Iterator[tuple[Any, Any, int]]:
        """(inputs, targets, number of rows that are no padding); padding comes last."""
        prepare = self._prepare
        pairs = zip(self._loader, self._shard.rows, strict=False)
        for number, ((batch, indices), rows) in enumerate(pairs, 1):
            inputs, targets = prepare(batch, indices, "eval", 0)
            seed_layers(prepare.seed, -1, number, prepare.device)
            yield inputs, targets, rows
