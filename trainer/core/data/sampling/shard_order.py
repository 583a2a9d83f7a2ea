"""Sample order for shards: few shards are open at a time, and each is read once per epoch."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from trainer.base.errors import ConfigError
from trainer.core.data.sampling import Sampling, State, as_vector, check_size
from trainer.core.rng.philox import Permutation

MOST_SHARDS = 2**27  # of a saved sampling: a small file must not fill the memory


class ShardShuffle(Sampling):
    """Each example once an epoch, from shards that are read a few at a time.

    An epoch permutes the shards and lays their rows in one row after the other. This sequence is
    cut into `lanes` equal parts, and each lane into windows of about `window` shards, in which the
    rows are permuted. A global batch takes its first rows from the first lane, and so on: a rank,
    whose rows are a contiguous part of it, reads its own lanes only. Lanes belong to the run, not
    to the ranks, so the batches are the same on any number of them.
    """

    kind = "shards"
    is_each_once = True
    LANES = 32
    WINDOW = 4

    def __init__(self, rows: Any, lanes: int = LANES, window: int = WINDOW):
        """`rows`: number of examples in each shard, in the order of their indices."""
        self.check_sizes(lanes, window)
        self.rows = as_vector(rows, "rows", torch.int64)
        if int(self.rows.min()) < 0:
            raise ConfigError("rows: must not be negative")
        self.lanes = lanes
        self.window = window
        self.num_examples = int(self.rows.sum())
        self.size = self.num_examples

    @staticmethod
    def check_sizes(lanes: int, window: int) -> None:
        """Raise ConfigError unless both are positive integers."""
        check_size("lanes", lanes)
        check_size("window", window)

    @cached_property
    def first(self) -> torch.Tensor:
        """The index of each shard's first example, and the number of examples."""
        return _sums(self.rows)

    def order(self, seed: int, epoch: int, global_batch: int) -> ShardOrder:
        return _make_order(self, seed, epoch, global_batch)

    def state(self) -> State:
        counts, lengths = torch.unique_consecutive(self.rows, return_counts=True)
        settings = {"lanes": self.lanes, "window": self.window}
        return settings, {"rows": counts, "repeats": lengths}

    @classmethod
    def restore(
        cls, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]
    ) -> ShardShuffle:
        repeats = tensors["repeats"]
        if int(repeats.min()) < 0 or int(repeats.sum()) > MOST_SHARDS:
            raise ValueError("more shards than a run can have")
        rows = tensors["rows"].repeat_interleave(repeats)
        return cls(rows, settings["lanes"], settings["window"])

    def describe(self) -> str:
        lanes = min(self.lanes, len(self.rows))
        return (
            f"{len(self.rows):,} shards in {lanes} lanes, rows permuted over {self.window} shards"
        )


# A run asks for the order of an epoch several times at its start, each node's fetcher for that of
# the next epoch too: with 10**6 shards one takes 0.2 s.
@lru_cache(maxsize=4)  # 16 MB each
def _make_order(sampling: ShardShuffle, seed: int, epoch: int, global_batch: int) -> ShardOrder:
    return ShardOrder(sampling, seed, epoch, global_batch)


@dataclass(frozen=True)
class Need:
    """Shards that a rank reads from the 0-based `step` of an epoch to the step before `end`."""

    step: int
    end: int
    shards: list[int]


class ShardOrder:
    """The order of one epoch. Its tables take 24 bytes a shard."""

    def __init__(self, sampling: ShardShuffle, seed: int, epoch: int, global_batch: int):
        num_shards = len(sampling.rows)
        self._batch = global_batch
        self._lanes = min(sampling.lanes, global_batch, num_shards)
        self._shuffle = Permutation(num_shards, seed, "shards", epoch)
        self._key = (seed, "window", epoch)
        self._shards = self._shuffle(torch.arange(num_shards))
        self._starts = _sums(sampling.rows[self._shards])  # rows before each place
        self._first = sampling.first
        # Of each lane: its first row of a batch, rows of a batch, first row, length and windows
        bounds = -(-torch.arange(self._lanes + 1) * global_batch // self._lanes)
        steps = sampling.size // global_batch
        self._bounds = bounds
        self._each = bounds.diff()
        self._lane_starts = steps * bounds
        self._lengths = steps * self._each
        mean = sampling.size / num_shards
        windows = self._lengths.double() / (mean * sampling.window)
        self._windows = windows.round().long().clamp(min=1)

    @property
    def _used(self) -> int:
        """The number of positions before the dropped tail."""
        return int(self._lane_starts[-1])

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the example indices at int64 `positions` of the epoch, of the same shape."""
        step, row = positions // self._batch, positions % self._batch
        lane = row * self._lanes // self._batch
        offset = step * self._each[lane] + row - self._bounds[lane]
        is_tail = positions >= self._used
        if is_any_tail := bool(is_tail.any()):
            offset = offset.masked_fill(is_tail, 0)
        begin, permutation = self._window_at(lane, offset)
        sequence = self._lane_starts[lane] + begin + permutation(offset - begin)
        if is_any_tail:
            sequence = torch.where(is_tail, positions, sequence)
        slot = torch.searchsorted(self._starts, sequence, right=True) - 1
        return self._first[self._shards[slot]] + sequence - self._starts[slot]

    def invert(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the positions of example indices; those of the dropped tail come last."""
        shard = torch.searchsorted(self._first, indices, right=True) - 1
        slot = self._shuffle.invert(shard)
        sequence = self._starts[slot] + indices - self._first[shard]
        is_tail = sequence >= self._used
        inside = sequence.masked_fill(is_tail, 0)
        lane = torch.searchsorted(self._lane_starts[1:], inside, right=True)
        offset = inside - self._lane_starts[lane]
        begin, permutation = self._window_at(lane, offset)
        offset = begin + permutation.invert(offset - begin)
        step, row = offset // self._each[lane], offset % self._each[lane]
        return torch.where(is_tail, sequence, step * self._batch + self._bounds[lane] + row)

    def _window_at(
        self, lane: torch.Tensor, offset: torch.Tensor
    ) -> tuple[torch.Tensor, Permutation]:
        """Return the first offset of the window of each offset in its lane, and its permutation."""
        length, windows = self._lengths[lane], self._windows[lane]
        window = ((offset + 1) * windows - 1) // length
        begin = window * length // windows
        size = (window + 1) * length // windows - begin
        return begin, Permutation(size, *self._key, numbers=window * self._lanes + lane)

    def needs(self, rows: tuple[int, int], step: int = 0) -> Iterator[Need]:
        """Yield the shards that rows (start, end) of the batches need from `step` on, by time."""
        first, last = (row * self._lanes // self._batch for row in (rows[0], rows[1] - 1))
        lanes = [self._needs_of_lane(lane, step) for lane in range(first, last + 1)]
        return heapq.merge(*lanes, key=lambda need: need.step)

    def uses(self, shard: int, rows: tuple[int, int]) -> list[tuple[int, int]]:
        """Return (step, end) of each window in which rows (start, end) of the batches use a shard,
        by time."""
        slot = int(self._shuffle.invert(torch.tensor([shard])))
        begin, end = self._starts[slot : slot + 2].tolist()
        end = min(end, self._used)
        first, last = (row * self._lanes // self._batch for row in (rows[0], rows[1] - 1))
        intervals = []
        for lane in range(first, last + 1):
            start, length = int(self._lane_starts[lane]), int(self._lengths[lane])
            one, two = max(begin - start, 0), min(end - start, length)
            if one >= two:
                continue
            each, windows = int(self._each[lane]), int(self._windows[lane])
            for window in range(
                ((one + 1) * windows - 1) // length, (two * windows - 1) // length + 1
            ):
                opened, closed = (n * length // windows for n in (window, window + 1))
                intervals.append((opened // each, -(-closed // each)))
        return sorted(intervals)

    def _needs_of_lane(self, lane: int, step: int) -> Iterator[Need]:
        length, windows = int(self._lengths[lane]), int(self._windows[lane])
        start, each = int(self._lane_starts[lane]), int(self._each[lane])
        if step * each >= length:
            return
        for window in range(((step * each + 1) * windows - 1) // length, windows):
            begin, end = (n * length // windows for n in (window, window + 1))
            ends = torch.tensor([start + begin, start + end - 1])
            one, last = (torch.searchsorted(self._starts, ends, right=True) - 1).tolist()
            shards = self._shards[one : last + 1]
            has_rows = self._first[shards + 1] > self._first[shards]
            yield Need(begin // each, -(-end // each), shards[has_rows].tolist())


def _sums(rows: torch.Tensor) -> torch.Tensor:
    """Return the sums of the first 0, 1, ... of the rows."""
    return torch.cat([rows.new_zeros(1), rows.cumsum(0)])
