"""Sequences of unequal length, packed into rows of equal length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch.utils.data import Dataset

from trainer.base.errors import ConfigError, ShardError
from trainer.core.data.sampling import as_vector, check_size
from trainer.core.data.sampling.shard_order import ShardShuffle

SEGMENTS = "segments"
POSITIONS = "positions"


class PackedDataset(Dataset):
    """Rows of `budget` tokens, each of several sequences, with hardly any padding.

    Only the lengths decide what is packed together, so rows do not depend on layout and epoch;
    epochs permute the rows. A sequence longer than `budget` is cut.

    An example of `dataset` is a 1-D tensor, then named "tokens", or a dict of 1-D tensors of one
    length. A row is a dict of them, (budget,), with "segments", the number of a token's sequence
    (from 1; 0 is padding), and "positions", from 0 in each sequence. Attention must not cross
    segments: `segments[:, :, None] == segments[:, None, :]` is the mask, and `segments > 0` the
    weight of the loss.
    """

    def __init__(
        self,
        dataset: Any,
        lengths: Any,
        budget: int,
        padding: Mapping[str, int] | None = None,
    ):
        """`lengths` (examples,): tokens of each; `padding`: value by name, by default 0.

        Packs only sequences of the same shard of a `ShardedDataset` together. Raises ConfigError
        for another number of lengths, or a length below 1.
        """
        check_size("budget", budget)
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ConfigError(f"""dataset: must be a data set with __len__ and __getitem__,
                and is a {type(dataset).__name__}""")
        if not isinstance(padding or {}, Mapping):
            raise ConfigError(f"""padding={padding!r:.60}:
                must be values by name, such as {{"labels": -100}}""")
        self._dataset = dataset
        self._budget = budget
        self._padding = dict(padding or {})
        counts = as_vector(lengths, "lengths", torch.int64)
        if len(counts) != len(dataset):
            raise ConfigError(f"""lengths: must be one for each example;
                the data has {len(dataset):,} examples, not {len(counts):,}""")
        if int(counts.min()) < 1:
            raise ConfigError(f"lengths: must be at least 1, and one is {int(counts.min())}")
        self._lengths = counts
        own = getattr(dataset, "sampling", None)
        shards = own if isinstance(own, ShardShuffle) else None
        bounds = [0, len(counts)] if shards is None else shards.first.tolist()
        packs: list[list[Piece]] = []
        rows = []
        for start, end in pairwise(bounds):
            shard_packs = pack(counts[start:end].tolist(), budget, start)
            packs += shard_packs
            rows.append(len(shard_packs))
        self._ends = torch.tensor([len(each) for each in packs]).cumsum(0)
        self._pieces = torch.tensor([piece for each in packs for piece in each])
        if shards is not None:  # as an order and a fetcher know it
            self.sampling = ShardShuffle(rows, shards.lanes, shards.window)
            self.open_fetcher = dataset.open_fetcher

    @property
    def padding_share(self) -> float:
        """The share of padding among all tokens of the rows."""
        return 1 - int(self._lengths.sum()) / (len(self) * self._budget)

    @property
    def source(self) -> str:
        """Words for the start of a run."""
        share = f"{self.padding_share:.1%} padding"
        return f"{len(self._lengths):,} sequences in rows of {self._budget} tokens, {share}"

    @property
    def digest(self) -> str:
        return str(getattr(self._dataset, "digest", ""))

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        index %= len(self)
        start = int(self._ends[index - 1]) if index else 0
        pieces = self._pieces[start : int(self._ends[index])].tolist()
        try:
            parts = [self._take(*piece) for piece in pieces]
        except ShardError as error:
            raise ShardError(str(error), self._rows_beside(index)) from None
        sizes = torch.tensor([end - begin for _, begin, end in pieces])
        numbers = torch.arange(1, len(pieces) + 1).repeat_interleave(sizes)
        places = torch.cat([torch.arange(int(size)) for size in sizes])
        if any(part.keys() != parts[0].keys() for part in parts):
            raise ValueError(f"sequences of row {index} differ: must have the same names in all")
        row = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        if odd := {SEGMENTS, POSITIONS} & row.keys() or self._padding.keys() - row.keys():
            must = "those of the data, without segments and positions"
            raise ValueError(f"names {sorted(odd)}: padding and the data must have {must}")
        row |= {SEGMENTS: numbers, POSITIONS: places}
        return {name: self._filled(name, values) for name, values in row.items()}

    def _rows_beside(self, index: int) -> int:
        """Return the number of rows in the shard of a row."""
        if not hasattr(self, "sampling"):
            return 1
        shard = torch.searchsorted(self.sampling.first, index, right=True) - 1
        return int(self.sampling.rows[shard])

    def _take(self, index: int, begin: int, end: int) -> dict[str, torch.Tensor]:
        example = self._dataset[index]
        if isinstance(example, tuple):
            raise ValueError(f"sequence {index} is a tuple: must be a tensor, or a dict of them")
        if not isinstance(example, Mapping):
            example = {"tokens": example}
        tensors = {name: torch.as_tensor(values) for name, values in example.items()}
        for name, values in tensors.items():
            if values.shape != (int(self._lengths[index]),):
                flaw = f"has shape {tuple(values.shape)}, and its length is {self._lengths[index]}"
                raise ValueError(f"{name!r} of sequence {index} {flaw}: lengths must be theirs")
        return {name: values[begin:end] for name, values in tensors.items()}

    def _filled(self, name: str, values: torch.Tensor) -> torch.Tensor:
        rest = values.new_full((self._budget - len(values),), self._padding.get(name, 0))
        return torch.cat([values, rest])


Piece = tuple[int, int, int]  # index of a sequence, its first token and the one after its last


def pack(lengths: Sequence[int], budget: int, first: int = 0) -> list[list[Piece]]:
    """Return the pieces of each row: best fit, the longest first, in a time of O(n log n).

    `first` is the index of the first sequence. Rows are in the order of their first sequence.
    """
    pieces = sorted(_cut(lengths, budget, first), key=lambda piece: (piece[1] - piece[2], piece))
    rows: list[list[Piece]] = []
    by_room: list[list[int]] = [[] for _ in range(budget + 1)]  # rows, by the tokens that fit
    has_room = 0  # a bit for each room that some row has
    for piece in pieces:
        size = piece[2] - piece[1]
        fitting = has_room >> size << size
        if fitting:
            room = (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            has_room &= ~(not by_room[room] and 1 << room)
            rows[row].append(piece)
        else:
            room = budget
            row = len(rows)
            rows.append([piece])
        if room > size:
            by_room[room - size].append(row)
            has_room |= 1 << room - size
    return sorted((sorted(row) for row in rows), key=lambda row: row[0])


def _cut(lengths: Sequence[int], budget: int, first: int) -> Iterator[Piece]:
    for index, length in enumerate(lengths, first):
        for begin in range(0, length, budget):
            yield index, begin, min(begin + budget, length)


def check_enough(dataset: Any, global_batch: int, num_examples: int) -> None:
    """Raise ConfigError if a global batch needs more examples than there are."""
    if global_batch > num_examples:
        packed = ""
        if isinstance(dataset, PackedDataset):
            packed = f", {dataset.source}; make rows shorter, or do not pack"
        raise ConfigError(f"""data.global_batch={global_batch}:
            must be at most the {num_examples} training examples{packed}""")
