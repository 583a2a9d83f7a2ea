"""A resume notices data of equal length with other content, whatever reads it."""

import random

import numpy
import pytest
import torch
from harness import fit, fit_on, on_ranks
from tiny import Items, Tiny, TinyItems, points
from torch.utils.data import Dataset, TensorDataset

from trainer import ConfigError, ResidentDataset
from trainer.core.data.ledger import describe, find_changes, short
from trainer.show.audit import audit

WORDS = ["task=tiny", "run.steps=2", "strategy=ddp"]


class Other(Tiny):
    """Task whose labels of some examples have changed."""

    def build_dataset(self, split):
        inputs, targets = points(203, split)
        targets[100] += 1
        return ResidentDataset(inputs, targets)


class OtherItems(TinyItems):
    def build_dataset(self, split):
        items = Items(split)
        items.inputs = items.inputs.roll(1, 0) if split == "eval" else items.inputs
        return items


def refusal(folder, task):
    with pytest.raises(ConfigError) as caught:
        fit(folder, *WORDS, "run.steps=4", "run.resume=auto", task=task)
    return str(caught.value)


def test_other_data_of_equal_length_is_refused_at_a_resume_on_all_ranks(tmp_path):
    other = "data has other content than the run to resume had"
    advice = "resume with the same data, or start a new run"
    fit_on(2, tmp_path / "a", *WORDS)
    line = f"the train {other} (tensor 1 of 2 places compared): {advice}"
    assert on_ranks(2, refusal, tmp_path / "a", Other) == [line, line]
    fit_on(1, tmp_path / "b", *WORDS, task=TinyItems)
    places = "example 0, example 101, example 202 of 3 places compared"
    (found,) = on_ranks(1, refusal, tmp_path / "b", OtherItems)
    assert found == f"the eval {other} ({places}): {advice}"
    resumed = fit_on(1, tmp_path / "b", *WORDS, "run.steps=4", "run.resume=auto", task=TinyItems)
    code, lines, _ = audit(resumed["directory"])
    compared = "this length, and its content in example 0, example 101, example 202"
    assert code == 0 and lines[2] == f"at each resume the train data had {compared}"


class Rows(Dataset):
    def __init__(self, read, size=9):
        self.read = read
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        return self.read(index)


def noisy(index):
    noise = torch.randn(3) + random.random() + numpy.random.rand()
    return {"image": index + noise, "text": f"row {index}", "pair": (index, [1.5, None])}


def broken(index):
    if index == 4:
        raise OSError("unreadable")
    return numpy.full((2, 2), index)


def test_content_of_trees_is_compared_at_three_places_with_seeded_transforms():
    before = torch.get_rng_state()
    content = describe(Rows(noisy))
    assert torch.equal(torch.get_rng_state(), before)
    assert list(content) == ["example 0", "example 4", "example 8"]
    assert content == describe(Rows(noisy)) and short(content) == short(describe(Rows(noisy)))
    changed = describe(Rows(lambda i: {**noisy(i), "text": f"row {i}" + ("x" if i == 4 else "")}))
    assert find_changes(content, changed) == ["example 4"]
    moved = describe(Rows(lambda i: noisy(i + (i == 8)) | {"text": f"row {i}", "pair": (i, [1.5])}))
    assert find_changes(content, moved) == ["example 0", "example 4", "example 8"]  # no None there
    moved = describe(Rows(lambda i: {**noisy(i), "pair": (i, [1.5 + (i == 8), None])}))
    assert find_changes(content, moved) == ["example 8"]
    assert list(describe(Rows(broken))) == ["example 0", "example 8"]
    assert find_changes(content, {"example 0": "damaged"}) == ["example 0"]
    assert find_changes(content, None) == find_changes(None, content) == []


def test_data_that_reads_differently_each_time_is_not_compared(tmp_path, capfd):
    counts = iter(range(1000))
    assert describe(Rows(lambda index: next(counts))) is None

    class Counting(TinyItems):
        def build_dataset(self, split):
            items = Items(split)
            return Rows(lambda i: (items[i][0] + next(counts), items[i][1]), 203)

    fit_on(1, tmp_path, *WORDS, task=Counting)
    fit_on(1, tmp_path, *WORDS, "run.steps=3", "run.resume=auto", task=Counting)
    line = "an example differs when it is read twice, so a resume cannot notice other data"
    assert capfd.readouterr().out.count(f"\ntrain: {line}\neval: {line}\n") == 2


def test_rounding_of_floats_is_not_other_content_and_large_tensors_are_compared_in_rows():
    floats = torch.randn(1000, 3, 32)
    rounded = (floats * 1.7 + 1e-6) / 1.7
    assert not torch.equal(floats, rounded)
    pair = [describe(TensorDataset(each)) for each in (floats, rounded)]
    assert find_changes(*pair) == []
    images = torch.randint(0, 255, (2000, 64, 64), dtype=torch.uint8)
    content = describe(TensorDataset(images, torch.arange(2000)))
    images[:] = images.flip(0)
    assert find_changes(content, describe(TensorDataset(images, torch.arange(2000)))) == [
        "tensor 0"
    ]
    for odd in (
        torch.empty(5, 0),
        torch.zeros(5, dtype=torch.complex64),
        torch.full((5,), torch.nan),
    ):
        assert find_changes(describe(TensorDataset(odd)), describe(TensorDataset(odd))) == []
    assert describe(ResidentDataset(images, digest="its own")) == {}
