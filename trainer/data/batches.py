"""Batches: this rank's rows of every step, and its shard of the evaluation data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import default_collate

from trainer.config.schema import Config
from trainer.data.examples import find_flaw, length_of
from trainer.data.ledger import Ledger
from trainer.data.loaders import Collate, ExampleSource, Piece
from trainer.data.order import (
    BatchPlan,
    Cut,
    EpochSampler,
    Leaves,
    ShardSampler,
    check_batch,
    counted,
)
from trainer.distributed.ranks import Ranks
from trainer.distributed.watch.heartbeat import Heartbeat, Phase
from trainer.errors import ConfigError, RunError
from trainer.micro_batch import count_rows
from trainer.rng.forward import Draws
from trainer.rng.philox import Random

MicroBatch = tuple[Any, Any]
MOST_UNREADABLE = 10  # training examples; 1 % of the data, where that is more


@dataclass(frozen=True)
class Preparation:
    """Turn a batch of the dataset into a micro-batch, with the task's `split_batch` and `augment`.

    `convert` casts it to the dtype and memory format of the model.
    """

    split_batch: Callable[[Any], tuple[Any, Any]]
    augment: Callable[[Any, Any, Random, bool], tuple[Any, Any]]
    convert: Callable[[Any, Any], MicroBatch]
    seed: int
    device: torch.device
    draws: Draws
    collate: Collate = default_collate
    checked: set[str] = field(default_factory=set)  # splits of which one micro-batch was checked

    def __call__(self, piece: Piece, split: str, epoch: int, step: int, number: int) -> MicroBatch:
        """Return the `number`-th micro-batch of `step`, and begin the random draws of its rows."""
        self.draws.end()  # augment draws from its own Random
        batch, indices = piece
        inputs, targets = _pair("split_batch", self.split_batch(batch))
        random = Random(self.seed, split, epoch, indices)
        augmented = self.augment(inputs, targets, random, split == "train")
        inputs, targets = _pair("augment", augmented)
        if split not in self.checked:
            for tree in (inputs, targets):
                _check_not_text(tree, split, int(indices[0]))
            if flaw := find_flaw((inputs, targets), allows_gradient=True):
                raise ConfigError(f"the {split} batches contain {flaw[0]}; {flaw[1]}")
            self.checked.add(split)
        if (rows := count_rows(targets, inputs)) != len(indices):
            became = f"{len(indices)} examples of {split} became {rows} rows"
            must = "collate, split_batch and augment must keep a row for each; give it weight 0"
            raise ConfigError(f"{became}: {must}")
        prepared = self.convert(inputs, targets)
        self.draws.begin(step, number, indices, split)
        return prepared


def _pair(hook: str, returned: Any) -> MicroBatch:
    """Return what a hook returned. Raise ConfigError unless it is (inputs, targets)."""
    if isinstance(returned, (tuple, list)) and len(returned) == 2:
        return returned[0], returned[1]
    given = f"a {type(returned).__name__}"
    if isinstance(returned, (tuple, list)):
        given += f" of {len(returned)}"
    raise ConfigError(f"{hook} returned {given}: must return (inputs, targets)")


def _check_not_text(tree: Any, split: str, index: int) -> None:
    """Raise ConfigError if a tree contains text and no tensor: torch's own error is unclear.

    Text next to tensors is allowed, and is left to the task.
    """
    leaves = tree_leaves(tree)
    text = next((leaf for leaf in leaves if isinstance(leaf, (str, bytes))), None)
    if text is not None and not any(isinstance(leaf, torch.Tensor) for leaf in leaves):
        example = f"{split} example {index} is {text!r:.40}"
        advice = "convert it in the dataset, in split_batch or in augment"
        raise ConfigError(f"{example}: must be a tensor; {advice}")


@dataclass(eq=False, slots=True)
class LocalBatch:
    """This rank's rows of one global batch, in micro-batches.

    Iterating augments a micro-batch and seeds dropout for it, so run it before taking the next.
    It can be iterated several times, with the same random numbers. `first` is the number of this
    rank's first micro-batch among those of the global batch.
    """

    pieces: Sequence[Piece]
    first: int
    step: int
    epoch: int
    prepare: Preparation
    heartbeat: Heartbeat

    @property
    def indices(self) -> list[torch.Tensor]:
        """The example indices of each micro-batch."""
        return [indices for _, indices in self.pieces]

    def __len__(self) -> int:
        return len(self.pieces)

    def __iter__(self) -> Iterator[MicroBatch]:
        for number, piece in enumerate(self.pieces, self.first):
            if number > self.first:  # Batches.epoch entered the phase for the first one
                self.heartbeat.enter(Phase.COMPUTE)
            yield self.prepare(piece, "train", self.epoch, self.step, number)

    def again(self, number: int) -> None:
        """Begin the random draws of the `number`-th of these micro-batches once more."""
        self.prepare.draws.begin(self.step, self.first + number, self.pieces[number][1])


class Batches:
    """The training data in the order of the run, as one LocalBatch per step."""

    def __init__(
        self,
        dataset: Any,
        config: Config,
        cut: Cut,
        rank: int,
        size: int,
        prepare: Preparation,
        ranks: Ranks,
        is_counted: bool = True,
    ):
        """Open the data for rank `rank` of `size` data-parallel ranks.

        `is_counted` is True on one of the ranks that share these rows, which enters them in the
        ledger.
        Raises ConfigError if the data has fewer examples than a global batch, or if a micro-batch
        would be empty.
        """
        data = config.data
        num_examples = len(dataset)
        if data.global_batch > num_examples:
            most = f"must be at most the {num_examples} training examples"
            raise ConfigError(f"data.global_batch={data.global_batch}: {most}")
        micro_batch = check_batch(data.global_batch, cut, size)
        source = ExampleSource(
            dataset, "train", data, prepare.seed, prepare.device, prepare.collate
        )
        self.plan = BatchPlan(num_examples, data.global_batch, micro_batch, size, cut.unit)
        self.steps_per_epoch = self.plan.steps_per_epoch
        self.ledger = Ledger(self.plan, rank, is_counted)
        self.replaced: dict[str, int] = {}
        self.dataset = dataset
        self.is_streamed = not source.is_resident
        self._first = self.plan.first(rank)
        self._may_replace = data.on_error == "skip"
        self._prepare = prepare
        self._ranks = ranks
        self._sampler = EpochSampler(self.plan, prepare.seed, rank, source.index_device)
        self._loaders = [source.open(self._sampler)]

    def epoch(self, epoch: int, first: int = 0) -> Iterator[LocalBatch]:
        """Iterate over the batches of an epoch, from its 0-based step `first`."""
        self.check_length()
        self._sampler.set_epoch(epoch, first)
        pieces = iter(self._loaders[0])
        heartbeat = self._ranks.heartbeat
        begin = epoch * self.steps_per_epoch
        for step in range(begin + first, begin + self.steps_per_epoch):
            heartbeat.begin_step(step)
            batch = self._local(list(islice(pieces, len(self._sampler.pieces))), step, epoch)
            self.ledger.note(batch.indices, self._ranks.group)
            heartbeat.enter(Phase.COMPUTE)
            yield batch

    def of_step(self, step: int) -> LocalBatch:
        """Return the batch of any 0-based step, read in this process and kept out of the ledger."""
        epoch, first = divmod(step, self.steps_per_epoch)
        sampler = copy.copy(self._sampler)
        sampler.set_epoch(epoch, first)
        wanted = islice(sampler, len(sampler.pieces))
        pieces = [self._loaders[0].read(indices, epoch) for indices in wanted]
        return self._local(pieces, step, epoch)

    def of_examples(self, indices: torch.Tensor) -> LocalBatch:
        """Return these examples as one micro-batch, read in this process as in epoch 0."""
        piece = self._loaders[0].read(indices.to(self._sampler.device))
        return LocalBatch([piece], 0, 0, 0, self._prepare, self._ranks.heartbeat)

    def check_length(self) -> None:
        """Raise RunError if the number of training examples has changed since the start."""
        length, original = length_of(self.dataset, "the train data"), self.plan.num_examples
        if length != original:
            why = "must not change, because the sample order depends on it"
            advice = "fix the length of the dataset, or start a new run"
            had = f"has {length:,} examples and had {original:,}"
            raise RunError(f"the train data {had} at the start: {why}; {advice}")

    def _local(self, pieces: Sequence[Piece], step: int, epoch: int) -> LocalBatch:
        return LocalBatch(pieces, self._first, step, epoch, self._prepare, self._ranks.heartbeat)

    def gather_replaced(self) -> list[int]:
        """Gather the training examples that any rank could not read since the last call.

        Returns the indices that are new to the run. Collective: every rank must call it.
        Raises RunError if the whole run has more than 10 of them, or 1 % of the data where that
        is more.
        """
        if not self._may_replace:
            return []
        known = _examples(self.replaced)
        for replaced in self._ranks.group.gather(self._loaders[0].take_replaced()):
            self.replaced |= replaced
        unreadable = _examples(self.replaced)
        most = max(MOST_UNREADABLE, self.plan.num_examples // 100)
        if len(unreadable) > most:
            read = f"{counted(len(unreadable), 'train example')} cannot be read"
            raise RunError(f"data.on_error=skip: {read}; must be at most {most}; repair the data")
        return sorted(unreadable - known)

    def restore(self, step: int, chain: str, replaced: dict[str, int]) -> None:
        """Restore the ledger after `step`, and the replaced examples, from a checkpoint."""
        self.ledger.restore(step, chain)
        self.replaced = dict(replaced)

    def close(self) -> None:
        """Stop the data workers immediately: garbage collection would wait 5 s for each."""
        self._loaders.clear()


def _examples(replaced: dict[str, int]) -> set[int]:
    """Return the indices in "<epoch>/<index>" keys."""
    return {int(key.split("/")[1]) for key in replaced}


class EvalBatches:
    """This rank's shard of the evaluation data; every example is in exactly one shard."""

    def __init__(
        self,
        dataset: Any,
        config: Config,
        cut: Cut,
        rank: int,
        size: int,
        prepare: Preparation,
        split: str = "eval",
    ):
        """Shard a data set. Random draws of training examples are not those of training."""
        data = config.data
        self.split = "eval" if split == "train" else split
        own = (prepare.seed, prepare.device, prepare.collate)
        source = ExampleSource(dataset, self.split, data, *own)
        rows = config.eval.micro_batch or check_batch(data.global_batch, cut, size)
        place = (rank, size, source.index_device, cut.is_fixed)
        self._shard = ShardSampler(len(dataset), rows, *place)
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
        for number, (piece, rows) in enumerate(pairs, self._shard.first):
            inputs, targets = self._prepare(piece, self.split, 0, -1, number)
            yield inputs, targets, rows
