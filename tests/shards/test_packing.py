"""Sequences packed into rows of a fixed number of tokens, from their lengths alone."""

import re

import pytest
import torch
import torch.nn.functional as F
from harness import fit_on
from harness.verbs import audit
from torch import nn
from torch.utils.data import Dataset

from trainer import ConfigError, PackedDataset, ShardedDataset, Trainer
from trainer.base.errors import ShardError
from trainer.core.data.packing import pack
from trainer.shards.__main__ import write_shards

BUDGET = 32
WORDS = [
    *("task=tiny", "run.steps=25", "strategy=exact", "data.global_batch=6", "data.micro_batch=2"),
    *("log.every_steps=1", "eval.every_epochs=null"),
]


class Sentences(Dataset):
    """120 sequences of 1 to 40 tokens, with labels."""

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.lengths = torch.randint(1, 41, (120,), generator=generator)
        self.first = torch.randint(1, 12, (120,), generator=generator)

    def __len__(self):
        return 120

    def __getitem__(self, index):
        tokens = (torch.arange(int(self.lengths[index])) * 5 + self.first[index]) % 11 + 1
        return {"tokens": tokens, "labels": tokens * 2 % 12}


class OfPacks(Trainer):
    """Predicts a label of each token."""

    def build_dataset(self, split):
        data = Sentences()
        return PackedDataset(data, data.lengths, BUDGET) if split == "train" else None

    def build_model(self):
        return nn.Sequential(nn.Embedding(12, 8), nn.Dropout(0.1), nn.Linear(8, 12))

    def split_batch(self, batch):
        return batch["tokens"], (batch["labels"], batch["segments"])

    def loss(self, outputs, targets):
        labels, segments = targets
        values = F.cross_entropy(outputs.transpose(1, 2), labels, reduction="none")
        return values, (segments > 0).to(values.dtype)


def test_rows_have_each_token_once_and_hardly_any_padding():
    data = Sentences()
    packed = PackedDataset(data, data.lengths, BUDGET, padding={"labels": -100})
    found = [packed[index] for index in range(len(packed))]
    assert all(values.shape == (BUDGET,) for row in found for values in row.values())
    tokens = torch.cat([row["tokens"][row["segments"] > 0] for row in found])
    assert len(tokens) == int(data.lengths.sum())
    assert tokens.sort().values.equal(
        torch.cat([data[i]["tokens"] for i in range(120)]).sort().values
    )
    for row in found:
        rest = row["segments"] == 0
        assert (row["labels"][rest] == -100).all() and (row["tokens"][rest] == 0).all()
        assert ((row["positions"] == 0) & ~rest).sum() == row["segments"].max()
    real = int(sum((row["segments"] > 0).sum() for row in found))
    assert packed.padding_share == pytest.approx(1 - real / (len(found) * BUDGET))
    assert packed.padding_share < 0.03 < 1 - float(data.lengths.float().mean()) / 40


@pytest.mark.parametrize("budget", [1, 7, 64])
def test_packing_fits_and_depends_on_the_lengths_alone(budget):
    lengths = torch.randint(1, 100, (500,), generator=torch.Generator().manual_seed(1)).tolist()
    rows = pack(lengths, budget, 10)
    assert all(sum(end - begin for _, begin, end in row) <= budget for row in rows)
    pieces = sorted(piece for row in rows for piece in row)
    whole = {}
    for index, begin, end in pieces:
        assert begin == whole.get(index, 0)
        whole[index] = end
    assert whole == dict(enumerate(lengths, 10))
    assert len(rows) <= 1.25 * -(-sum(lengths) // budget) + 1
    assert pack(lengths, budget, 10) == rows


def test_run_on_packed_rows_is_the_same_on_any_ranks_and_after_a_resume(tmp_path):
    one = fit_on(1, tmp_path / "one", *WORDS, task=OfPacks)
    three = fit_on(3, tmp_path / "three", *WORDS, "data.workers=1", task=OfPacks)
    assert one["seen"] == three["seen"] and one["losses"] == three["losses"]
    fit_on(2, tmp_path / "two", *WORDS, "run.steps=13", task=OfPacks)
    two = fit_on(1, tmp_path / "two", *WORDS, "run.resume=auto", task=OfPacks)
    assert two["losses"].items() <= one["losses"].items()
    assert audit([str(two["directory"])]) == 0


def test_sequences_of_shards_are_packed_within_their_shard(tmp_path):
    data = Sentences()
    write_shards(data, str(tmp_path / "data"), 4000, 0)
    sharded = ShardedDataset(tmp_path / "data", lanes=2, window=1)
    packed = PackedDataset(sharded, data.lengths, BUDGET)
    assert packed.sampling.num_examples == len(packed)
    assert len(packed.sampling.rows) == len(sharded.index) > 3
    first = sharded.sampling.first
    for shard in range(len(sharded.index)):
        own = range(*packed.sampling.first[shard : shard + 2].tolist())
        count = sum(int((packed[index]["segments"] > 0).sum()) for index in own)
        assert count == int(data.lengths[first[shard] : first[shard + 1]].sum())

    def build(self, split):
        return packed if split == "train" else None

    task = type("OfShards", (OfPacks,), {"build_dataset": build})
    one = fit_on(1, tmp_path / "one", *WORDS, "run.steps=10", task=task)
    two = fit_on(2, tmp_path / "two", *WORDS, "run.steps=10", task=task)
    assert one["seen"] == two["seen"] and one["losses"] == two["losses"]


def test_a_row_of_a_damaged_shard_is_replaced_by_one_of_the_next_shard(tmp_path):
    data = Sentences()
    write_shards(data, str(tmp_path / "data"), 4000, 0)
    damaged = tmp_path / "data" / "shard.00001.mds"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    packed = PackedDataset(ShardedDataset(tmp_path / "data"), data.lengths, BUDGET)
    begin, end = packed.sampling.first[1:3].tolist()
    for row in range(begin, end):
        with pytest.raises(ShardError) as caught:
            packed[row]
        assert caught.value.num_examples == end - begin
    packed[end]


def test_fewer_rows_than_a_global_batch_are_named_with_their_sequences(tmp_path):
    line = (
        "data.global_batch=600: must be at most the 79 training examples, 120 sequences in rows of "
        "32 tokens, 0.9% padding; make rows shorter, or do not pack"
    )
    with pytest.raises(AssertionError, match=re.escape(line)):
        fit_on(1, tmp_path, *WORDS, "data.global_batch=600", task=OfPacks)


def test_mistakes_are_named():
    data = Sentences()
    with pytest.raises(ConfigError, match=r"lengths: must be one for each example"):
        PackedDataset(data, data.lengths[1:], BUDGET)
    with pytest.raises(ConfigError, match="lengths: must be at least 1, and one is 0"):
        PackedDataset(data, data.lengths * 0, BUDGET)
    with pytest.raises(ConfigError, match="budget=0: must be an integer of at least 1"):
        PackedDataset(data, data.lengths, 0)
    with pytest.raises(ValueError, match="lengths must be theirs"):
        PackedDataset(data, data.lengths + 1, BUDGET)[0]
    with pytest.raises(ValueError, match="sequence 0 is a tuple: must be a tensor"):
        PackedDataset([(torch.arange(3), torch.arange(3))], [3], BUDGET)[0]
    with pytest.raises(ValueError, match="sequences of row 0 differ: must have the same names"):
        PackedDataset([{"a": torch.ones(1)}, {"a": torch.ones(1), "b": torch.ones(1)}], [1, 1], 4)[
            0
        ]
    with pytest.raises(ValueError, match=r"names \['label'\]: padding and the data must have"):
        PackedDataset(data, data.lengths, BUDGET, {"label": -100})[0]
    with pytest.raises(ValueError, match=r"names \['positions'\]: padding and the data"):
        PackedDataset([{"positions": torch.arange(3)}], [3], BUDGET)[0]
