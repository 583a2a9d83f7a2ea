"""Data as people have it: rows of unequal length, read at once, prepared once per node."""

import json
import random
import time
from collections import UserDict

import pytest
import torch
import torch.nn.functional as F
from harness import check_parity, fit_on, on_ranks, slow_but
from harness.training import compose, fit
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from trainer import ConfigError, RunError, Trainer
from trainer.core.data.loaders import check_dataset

WORDS = [
    *("task=tiny", "run.steps=20", "strategy.precision=fp64", "eval.every_steps=9"),
    "log.every_steps=1",
]
LAYOUTS = {
    "accumulated": (1, ["strategy=single", "data.micro_batch=5"]),
    "2": (2, ["strategy=ddp"]),
    "3, workers": (3, ["strategy=ddp", "data.workers=1", "data.micro_batch=4"]),
    "fsdp 2": (2, ["strategy=fsdp"]),
    "exact": (2, ["strategy=exact", "data.global_batch=20", "data.micro_batch=5"]),
}


class Sentences(Dataset):
    """Rows of 3 to 9 tokens, with labels that are -100 where there is none."""

    def __len__(self):
        return 61

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        length = int(torch.randint(3, 10, (1,), generator=generator))
        tokens = torch.randint(1, 12, (length,), generator=generator)
        return {"tokens": tokens, "labels": tokens.where(tokens % 3 > 0, -100)}


class Padded(Trainer):
    """Pads to the longest row of a micro-batch."""

    def build_dataset(self, split):
        return Sentences()

    def build_model(self):
        return nn.Sequential(nn.Embedding(12, 8), nn.Linear(8, 12), nn.Tanh())

    def collate(self, rows):
        def pad(name, value):
            return nn.utils.rnn.pad_sequence([row[name] for row in rows], True, value)

        return UserDict(tokens=pad("tokens", 0), labels=pad("labels", -100))

    def split_batch(self, batch):
        return batch["tokens"], batch["labels"]

    def loss(self, outputs, targets):
        values = F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
        return values, (targets != -100).to(values.dtype)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    known = {}

    def run(task, *words):
        key = (task, words)
        if key not in known:
            folder = tmp_path_factory.mktemp("one")
            known[key] = fit_on(1, folder, *WORDS, "strategy=single", *words, task=task)
        return known[key]

    return run


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "2"))
def test_rows_of_unequal_length_are_padded_alike_in_every_layout(layout, single, tmp_path):
    ranks, words = LAYOUTS[layout]
    batch = [word for word in words if word.startswith("data.global_batch")]
    other = fit_on(ranks, tmp_path, *WORDS, *words, task=Padded)
    check_parity(single(Padded, *batch), other, falls=False)


class Broken(Padded):
    def collate(self, rows):
        return torch.stack([row["tokens"] for row in rows])


class Unpadded(Padded):
    collate = Trainer.collate


def failure(folder, task, *words):
    compose(folder, *WORDS)
    with pytest.raises((RunError, ConfigError)) as caught:
        fit(folder, *WORDS, "strategy=single", *words, task=task)
    return str(caught.value)


@pytest.mark.parametrize("workers", [0, 1])
def test_rows_that_cannot_be_collated_are_one_line(workers, tmp_path):
    word = f"data.workers={workers}"
    (told,) = on_ranks(1, failure, tmp_path / "own", Broken, word)
    assert told.startswith("train examples ") and "\n" not in told
    assert "and 18 more: collate(rows) failed: RuntimeError: stack expects each tensor" in told
    assert "test_data_hooks.py:" in told
    (told,) = on_ranks(1, failure, tmp_path / "torch", Unpadded, word)
    assert "cannot be read: it is" in told and "pad in collate(rows)" in told


# Rows read at once --------------------------------------------------------------------------------


class Table(Sentences):
    """Counts how its rows are read."""

    counts = {"at once": 0, "one": 0}
    is_random = False
    bad = -1

    def __getitem__(self, index):
        self.counts["one"] += 1
        return self._row(index)

    def __getitems__(self, indices):
        self.counts["at once"] += 1
        return [self._row(index) for index in indices]

    def _row(self, index):
        if index == self.bad:
            raise ValueError("a torn row")
        row = super().__getitem__(index)
        shift = random.randrange(11) if self.is_random else 0
        return {**row, "tokens": (row["tokens"] + shift) % 12}


class OfTable(Padded):
    def build_dataset(self, split):
        return Table()


class OfRandomTable(Padded):
    def build_dataset(self, split):
        made = Table()
        made.is_random = True
        return made


def counted(folder, task, *words):
    Table.counts = {"at once": 0, "one": 0}
    run = fit(folder, *WORDS, "strategy=single", "eval.every_steps=null", *words, task=task)
    return run["losses"], Table.counts


def test_rows_are_read_at_once_where_a_dataset_can(tmp_path):
    ((losses, counts),) = on_ranks(1, counted, tmp_path / "once", OfTable)
    assert counts["one"] == 2 * 3 * 2  # of both splits, to describe three examples at the start
    assert counts["at once"] >= 8
    ((other, _),) = on_ranks(1, counted, tmp_path / "one", Padded)
    assert losses == other


@pytest.mark.slow
def test_random_rows_are_read_one_by_one(tmp_path):
    ((_, counts),) = on_ranks(1, counted, tmp_path, OfRandomTable)
    assert counts["at once"] <= 2 < counts["one"]


@pytest.mark.parametrize("layout", slow_but(["2", "3, workers"], "2"))
def test_random_rows_are_the_same_in_every_layout(layout, single, tmp_path):
    ranks, words = LAYOUTS[layout]
    other = fit_on(ranks, tmp_path, *WORDS, *words, task=OfRandomTable)
    check_parity(single(OfRandomTable), other, falls=False)


class Torn(Padded):
    def build_dataset(self, split):
        made = Table()
        made.bad = 17
        return Subset(made, range(61)) if split == "train" else None


def test_a_row_that_cannot_be_read_is_named(tmp_path):
    (told,) = on_ranks(1, failure, tmp_path, Torn, "run.steps=2")
    assert told.startswith("train example 17 cannot be read: ValueError: a torn row")


# Preparation --------------------------------------------------------------------------------------


class Prepared(Padded):
    """Reads a file that `prepare` writes, slowly."""

    def prepare(self):
        path = self.config.runs / "rows.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.with_suffix(".log").open("a") as file:
            file.write(f"{self.world.rank}\n")
        path.write_text(json.dumps(list(range(61))))

    def build_dataset(self, split):
        rows = json.loads((self.config.runs / "rows.json").read_text())
        return Subset(Sentences(), rows)


class Failing(Padded):
    def prepare(self):
        raise OSError("no space left for the download")


@pytest.mark.slow
def test_one_rank_of_a_node_prepares_before_the_others_build(tmp_path):
    fit_on(3, tmp_path, *WORDS, "strategy=ddp", task=Prepared)
    assert (tmp_path / "rows.log").read_text() == "0\n"


def fails(folder):
    task = Failing(compose(folder, *WORDS))
    with pytest.raises((OSError, RuntimeError)) as caught:
        task.fit()
    return str(caught.value)


def test_a_preparation_that_fails_ends_all_ranks(tmp_path):
    for told in on_ranks(2, fails, tmp_path):
        assert "no space left for the download" in told or "rank 0" in told


class Slow(Prepared):
    def prepare(self):
        time.sleep(8)
        super().prepare()


@pytest.mark.slow
def test_a_preparation_may_take_longer_than_a_collective(tmp_path):
    # on busy cores a rank may be two seconds late in any collective
    words = [*WORDS, "strategy=ddp", "dist.timeout_s=6", "run.steps=2"]
    assert fit_on(2, tmp_path, *words, task=Slow)["step"] == 2


class Dropping(Padded):
    """Leaves out rows that it does not like."""

    def collate(self, rows):
        return super().collate([row for row in rows if len(row["tokens"]) != 5])


@pytest.mark.parametrize("words", [["strategy=single"], ["strategy=single", "data.workers=1"]])
def test_a_collate_that_drops_rows_is_refused(words, tmp_path):
    line = r"22 examples of train became \d+ rows: collate, split_batch and augment must keep a row"
    with pytest.raises(AssertionError, match=line):
        fit_on(1, tmp_path, *WORDS, *words, task=Dropping)


class Stream(IterableDataset):
    def __iter__(self):
        yield from range(9)


class Streamed(Padded):
    def build_dataset(self, split):
        return Stream()


def test_an_iterable_dataset_is_refused_with_the_way_out(tmp_path):
    (told,) = on_ranks(1, failure, tmp_path, Streamed)
    assert told == (
        "build_dataset('train') returned Stream: must be map-style, with __len__ and __getitem__; "
        "write it once: python -m trainer.shards write task=<name> to=URL, "
        "and return ShardedDataset(URL)"
    )


MADE = "must be a dataset; Lockstep makes the batches, of data.global_batch rows"
NO_DATASETS = {
    f"None: {MADE}": None,
    f"a DataLoader: {MADE}": DataLoader(range(9)),
    "a dict of train, test: must be the data set of one split": {"train": [1], "test": [2]},
    "a tuple of tensors: must be a dataset; wrap them: ResidentDataset(inputs, targets)": (
        torch.ones(9, 2),
        torch.ones(9),
    ),
}


@pytest.mark.parametrize("line", NO_DATASETS)
def test_what_is_no_dataset_is_refused_by_name(line):
    with pytest.raises(ConfigError) as refused:
        check_dataset(NO_DATASETS[line], "train", "auto")
    assert str(refused.value) == f"build_dataset('train') returned {line}"


class Sleeping(Sentences):
    def __getitem__(self, index):
        time.sleep(0.01)
        return super().__getitem__(index)


@pytest.mark.parametrize("is_slow", [True, False])
def test_the_share_of_time_that_waits_for_data_is_logged_and_a_large_one_told(
    is_slow, tmp_path, capfd
):
    class Waiting(Padded):
        def build_dataset(self, split):
            return Sleeping() if is_slow else Sentences()

    found = fit_on(1, tmp_path, *WORDS, "run.steps=4", task=Waiting)
    lines = (found["directory"] / "metrics.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    waited = [entry["speed/data_wait"] for entry in entries if "speed/data_wait" in entry]
    assert len(waited) == 4
    assert (sum(waited) / 4 > 0.5) == is_slow
    told = [line for line in capfd.readouterr().out.splitlines() if "data loading" in line]
    assert len(told) == is_slow
    assert all(line.startswith("hint: data loading blocks training, ") for line in told)
