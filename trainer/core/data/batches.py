"""Batches: this rank's rows of every step, and its shard of the evaluation data."""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Protocol

import torch

from trainer.base.errors import RunError, counted
from trainer.core.config.schema import Config
from trainer.core.data.examples import length_of
from trainer.core.data.ledger import CLOSE_EVERY, Ledger
from trainer.core.data.loaders import ExampleSource
from trainer.core.data.order import BatchPlan, BatchSplit, EpochSampler, check_batch
from trainer.core.data.packing import check_enough
from trainer.core.data.preparation import Preparation
from trainer.core.data.resident import Piece
from trainer.core.data.sampling import Sampling
from trainer.core.distributed.ranks import Ranks
from trainer.core.distributed.watch.heartbeat import Heartbeat, Phase
from trainer.core.micro_batch import MicroBatch

_INDICES = operator.itemgetter(1)  # of a piece
MOST_UNREADABLE = 10  # training examples; 1 % of the data, where that is more


@dataclass(eq=False, slots=True)
class LocalBatch:
    """This rank's rows of one global batch, in micro-batches.

    Iterating augments a micro-batch and seeds dropout for it, so run it before taking the next.
    It can be iterated several times, with the same random numbers.
    """

    # all are read before the step, so that one that cannot be read leaves the state whole; each is
    # copied to the device when it is used
    pieces: Sequence[Piece]
    first: int  # number of this rank's first micro-batch in the global batch
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
        for micro_batch_index, piece in enumerate(self.pieces, self.first):
            if micro_batch_index > self.first:  # Batches.take entered the phase for the first one
                self.heartbeat.enter(Phase.COMPUTE)
            yield self.prepare(piece, "train", self.epoch, self.step, micro_batch_index)

    def repeat_draws(self, micro_batch_index: int) -> None:
        """Begin the random draws of one of these micro-batches once more."""
        _, indices = self.pieces[micro_batch_index]
        self.prepare.begin_draws(self.step, self.first + micro_batch_index, indices)


class AheadFetcher(Protocol):
    """A process that fetches what the next steps of the run read; steps are 0-based."""

    def begin(self, step: int, until: int) -> None: ...

    def advance(self, step: int) -> None: ...

    def close(self) -> None: ...


class Batches:
    """The training data in the order of the run, as one LocalBatch per step."""

    def __init__(
        self,
        dataset: Any,
        sampling: Sampling,
        config: Config,
        batch_split: BatchSplit,
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
        check_enough(dataset, data.global_batch, sampling.size)
        micro_batch = check_batch(data.global_batch, batch_split, size)
        source = ExampleSource(
            dataset, "train", data, prepare.seed, prepare.device, prepare.collate, sampling
        )
        self.plan = BatchPlan(sampling.size, data.global_batch, micro_batch, size, batch_split.unit)
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
        self._ahead: tuple[int, Iterator[Piece]] = (-1, iter(()))  # a step, and its pieces on

    @property
    def steps_per_epoch(self) -> int:
        return self.plan.steps_per_epoch

    def take(self, first: int, end: int, until: int) -> Iterator[LocalBatch]:
        """Iterate over the batches of the run's steps `first` to `end - 1`, of one epoch.

        Shards are fetched ahead for the steps before the run's step `until`.
        """
        epoch, start = divmod(first, self.steps_per_epoch)
        if start == 0 or first != self._ahead[0]:
            self._open(epoch, start, until)
        _, pieces = self._ahead
        heartbeat, group = self._ranks.heartbeat, self._ranks.group
        fetcher, pending = self._fetcher, self.ledger.pending
        count = len(self._sampler.pieces)
        for step in range(first, end):
            heartbeat.begin_step(step)
            if fetcher is not None:
                fetcher.advance(step)
            own = list(islice(pieces, count))
            pending.append(list(map(_INDICES, own)))
            if len(pending) >= CLOSE_EVERY:
                self.ledger.close(group)
            self._ahead = (step + 1, pieces)
            heartbeat.enter(Phase.COMPUTE)
            yield self._local(own, step, epoch)

    def _open(self, epoch: int, start: int, until: int) -> None:
        """Begin an epoch at its 0-based step `start`."""
        self._ahead = (-1, iter(()))  # the last epoch's readers end before the next ones begin
        self.check_length()
        self._sampler.set_epoch(epoch, start)
        first = epoch * self.steps_per_epoch + start
        if self._fetcher is not None:
            self._fetcher.begin(first, until)
        self._ahead = (first, iter(self._loaders[0]))

    @cached_property
    def _fetcher(self) -> AheadFetcher | None:
        """The fetcher of this node's shards; None on most ranks, and for data that is here."""
        open_fetcher = getattr(self.dataset, "open_fetcher", None)
        return open_fetcher and open_fetcher(self._sampler, self._ranks.group.world)

    def of_step(self, step: int) -> LocalBatch:
        """Return the batch of any 0-based step, read in this process and kept out of the ledger."""
        epoch, first = divmod(step, self.steps_per_epoch)
        sampler = copy.copy(self._sampler)
        sampler.set_epoch(epoch, first)
        wanted = islice(sampler, len(sampler.pieces))
        pieces = [self._loaders[0].read(indices, epoch) for indices in wanted]
        return self._local(pieces, step, epoch)

    def of_examples(self, *indices: torch.Tensor, first: int = 0) -> LocalBatch:
        """Return a micro-batch of each of these examples, read in this process as in epoch 0.

        `first` is the number of the first one in the global batch.
        """
        pieces = [self._loaders[0].read(each.to(self._sampler.device)) for each in indices]
        return LocalBatch(pieces, first, 0, 0, self._prepare, self._ranks.heartbeat)

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
            raise RunError(f"""the train data has {length:,} examples and had
                {original:,} at the start: must not change, because the sample order depends on it;
                fix the length of the dataset, or start a new run""")

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
        unreadable_before = _examples(self.replaced)
        for replaced in self._ranks.group.gather(self._loaders[0].take_replaced()):
            self.replaced |= replaced
        unreadable = _examples(self.replaced)
        most = max(MOST_UNREADABLE, self._sampler.sampling.num_examples // 100)
        if len(unreadable) > most:
            raise RunError(f"""data.on_error=skip: {counted(len(unreadable), "train example")}
                cannot be read; must be at most {most}; repair the data""")
        return sorted(unreadable - unreadable_before)

    def restore(self, step: int, chain: str, replaced: dict[str, int]) -> None:
        """Restore the ledger after `step`, and the replaced examples, from a checkpoint."""
        self.ledger.restore(step, chain)
        self.replaced = dict(replaced)

    def close(self) -> None:
        """Stop the data workers immediately: garbage collection would wait 5 s for each."""
        self._ahead = (-1, iter(()))
        self._loaders.clear()
        if self._fetcher is not None:
            self._fetcher.close()


def _examples(replaced: dict[str, int]) -> set[int]:
    """Return the indices in "<epoch>/<index>" keys."""
    return {int(key.split("/")[1]) for key in replaced}
