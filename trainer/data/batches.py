"""Batches: this rank's rows of every step, and its shard of the evaluation data."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import torch

from trainer.config.schema import Config
from trainer.data.batch_plan import BatchPlan, Cut, check_batch
from trainer.data.examples import length_of
from trainer.data.ledger import Ledger
from trainer.data.loaders import ExampleSource, Piece
from trainer.data.order import EpochSampler
from trainer.data.preparation import MicroBatch, Preparation
from trainer.data.sampling.base import Sampling
from trainer.data.shards.fetcher import NoFetcher, open_fetcher
from trainer.distributed.ranks import Ranks
from trainer.distributed.watch.heartbeat import Heartbeat, Phase
from trainer.errors import ConfigError, RunError, counted

MOST_UNREADABLE = 10  # training examples; 1 % of the data, where that is more


@dataclass(eq=False, slots=True)
class LocalBatch:
    """This rank's rows of one global batch, in micro-batches.

    Iterating augments a micro-batch and seeds dropout for it, so run it before taking the next.
    It can be iterated several times, with the same random numbers. All pieces are read before the
    step, so that one that cannot be read leaves the state whole; each is copied to the device when
    it is used. `first` is the number of this rank's first micro-batch in the global batch.
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
        _, indices = self.pieces[number]
        self.prepare.begin_draws(self.step, self.first + number, indices)


class Batches:
    """The training data in the order of the run, as one LocalBatch per step."""

    def __init__(
        self,
        dataset: Any,
        sampling: Sampling,
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
        if data.global_batch > sampling.size:
            most = f"must be at most the {sampling.size} training examples"
            raise ConfigError(f"data.global_batch={data.global_batch}: {most}")
        micro_batch = check_batch(data.global_batch, cut, size)
        source = ExampleSource(
            dataset, "train", data, prepare.seed, prepare.device, prepare.collate, sampling
        )
        self.plan = BatchPlan(sampling.size, data.global_batch, micro_batch, size, cut.unit)
        self.ledger = Ledger(self.plan, rank, is_counted)
        self.replaced: dict[str, int] = {}
        self.dataset = dataset
        self.is_streamed = not source.is_resident
        self._first = self.plan.first(rank)
        self._may_replace = data.on_error == "skip"
        self._prepare = prepare
        self._ranks = ranks
        self._sampler = EpochSampler(self.plan, sampling, prepare.seed, rank, source.index_device)
        self._loaders = [source.open(self._sampler)]

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.steps_per_epoch

    def epoch(self, epoch: int, first: int = 0, until: int = 0) -> Iterator[LocalBatch]:
        """Iterate over the batches of an epoch, from its 0-based step `first`.

        Shards are fetched ahead for the steps before the run's step `until`.
        """
        self.check_length()
        self._sampler.set_epoch(epoch, first)
        begin = epoch * self.steps_per_epoch
        fetcher = self._fetcher
        fetcher.begin(begin + first, until)
        pieces = iter(self._loaders[0])
        heartbeat = self._ranks.heartbeat
        for step in range(begin + first, begin + self.steps_per_epoch):
            heartbeat.begin_step(step)
            fetcher.advance(step)
            batch = self._local(list(islice(pieces, len(self._sampler.pieces))), step, epoch)
            self.ledger.note(batch.indices, self._ranks.group)
            heartbeat.enter(Phase.COMPUTE)
            yield batch

    @cached_property
    def _fetcher(self) -> NoFetcher:
        return open_fetcher(self.dataset, self._sampler, self._ranks.group.world)

    def of_step(self, step: int) -> LocalBatch:
        """Return the batch of any 0-based step, read in this process and kept out of the ledger."""
        epoch, first = divmod(step, self.steps_per_epoch)
        sampler = copy.copy(self._sampler)
        sampler.set_epoch(epoch, first)
        wanted = islice(sampler, len(sampler.pieces))
        pieces = [self._loaders[0].read(indices, epoch) for indices in wanted]
        return self._local(pieces, step, epoch)

    def of_examples(self, *indices: torch.Tensor) -> LocalBatch:
        """Return a micro-batch of each of these examples, read in this process as in epoch 0."""
        pieces = [self._loaders[0].read(each.to(self._sampler.device)) for each in indices]
        return LocalBatch(pieces, 0, 0, 0, self._prepare, self._ranks.heartbeat)

    def first_examples(self, first: int, count: int) -> torch.Tensor:
        """Return the indices of `count` examples of epoch 0, from the `first` one in its order."""
        positions = (first + torch.arange(count)) % self.plan.num_examples
        order = self._sampler.sampling.order(self._prepare.seed, 0, self.plan.global_batch)
        return order(positions).to(self._sampler.device)

    def check_length(self) -> None:
        """Raise RunError if the number of training examples has changed since the start."""
        length = length_of(self.dataset, "the train data")
        original = self._sampler.sampling.num_examples
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
        most = max(MOST_UNREADABLE, self._sampler.sampling.num_examples // 100)
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
        self._fetcher.close()


def _examples(replaced: dict[str, int]) -> set[int]:
    """Return the indices in "<epoch>/<index>" keys."""
    return {int(key.split("/")[1]) for key in replaced}
