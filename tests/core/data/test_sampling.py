"""Weights, mixtures and balanced classes: functions of seed, epoch and position, as any order."""

import json
import time

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import fit_on, slow_but
from harness.shard_server import serving
from harness.training import newest
from harness.verbs import audit, write_shards
from safetensors.torch import save
from torch import nn
from torch.utils.data import ConcatDataset, Subset, TensorDataset

import trainer
from trainer import (
    ClassBalanced,
    ConfigError,
    Mixture,
    PackedDataset,
    Trainer,
    Weighted,
)
from trainer.core.data.sampling import mixture
from trainer.core.data.sampling.mixture import LONGEST_PATTERN, _pattern, _shares
from trainer.core.data.sampling.shard_order import ShardShuffle

WORDS = [
    *("task=tiny", "run.steps=25", "strategy=exact", "data.global_batch=20", "data.micro_batch=5"),
    *("log.every_steps=1", "eval.every_epochs=null"),
]
LABELS = torch.tensor([0] * 100 + [1] * 60 + [2] * 31 + [3] * 12)
SAMPLINGS = {
    "weights": lambda: Weighted(torch.arange(203) % 7),
    "mixture": lambda: Mixture([150, 53], [0.3, 0.7]),
    "classes": lambda: ClassBalanced(LABELS),
}


def rows():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(203, 12, generator=generator), LABELS)


class Sampled(Trainer):
    """203 examples of 4 classes, taken as `make` says."""

    make = staticmethod(SAMPLINGS["weights"])

    def build_model(self):
        return nn.Sequential(nn.Linear(12, 8), nn.Dropout(0.1), nn.Linear(8, 5))

    def build_dataset(self, split):
        return rows() if split == "train" else None

    def sampling(self, split):
        return self.make()

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets, reduction="none")


def task_with(make, dataset=None):
    members = {"make": staticmethod(make)}
    if dataset is not None:
        members["build_dataset"] = lambda self, split: dataset() if split == "train" else None
    return type("Sampled", (Sampled,), members)


def epochs(sampling, count, batch=10):
    positions = torch.arange(sampling.size // batch * batch)
    return [sampling.order(3, epoch, batch)(positions) for epoch in range(count)]


@pytest.mark.parametrize("name", slow_but(SAMPLINGS, "mixture"))
def test_run_is_the_same_to_the_bit_on_any_ranks_and_after_a_resume(name, tmp_path, capfd):
    task = task_with(SAMPLINGS[name])
    one = fit_on(1, tmp_path / "one", *WORDS, task=task)
    two = fit_on(3, tmp_path / "two", *WORDS, "data.path=streamed", "data.workers=1", task=task)
    assert one["seen"] == two["seen"] and one["losses"] == two["losses"]
    fit_on(2, tmp_path / "three", *WORDS, "run.steps=13", task=task)
    three = fit_on(1, tmp_path / "three", *WORDS, "run.resume=auto", task=task)
    assert three["losses"].items() <= one["losses"].items()
    capfd.readouterr()
    assert audit([str(three["directory"])]) == 0
    said = capfd.readouterr().out
    assert "agree with the recomputed order" in said and "expected of the sampling" in said
    with pytest.raises(AssertionError, match="the train data has sampling"):
        other = task_with(lambda: Weighted(torch.ones(203)))
        fit_on(1, tmp_path / "three", *WORDS, "run.steps=40", "run.resume=auto", task=other)


def test_an_example_is_taken_as_often_as_its_weight_says_up_to_one():
    weights = torch.rand(1000, generator=torch.Generator().manual_seed(1)) ** 3
    sampling = Weighted(weights, size=5000)
    expected = sampling.weights / sampling.weights.sum() * 5000
    taken = [torch.bincount(epoch, minlength=1000) for epoch in epochs(sampling, 40)]
    assert all(((times - expected).abs() < 1 + 1e-9).all() for times in taken)
    # over the epochs the starts are random, so the sums go to what is expected
    total = sum(taken)
    chi_square = ((total - 40 * expected) ** 2 / (40 * expected).clamp(min=1e-9)).sum()
    assert chi_square < 1000
    assert (total - 40 * expected).abs().max() < 15
    assert not epochs(sampling, 2)[0].equal(epochs(sampling, 2)[1])


def test_equal_weights_take_each_example_once():
    (taken,) = epochs(Weighted(torch.full((770,), 3.0)), 1)
    assert taken.sort().values.equal(torch.arange(770))


def test_equal_weights_and_a_smaller_size_take_neighbours_as_often_as_others():
    """They took every k-th example: all even, or all odd."""
    sampling = Weighted(torch.ones(1000), size=500)
    taken = [set(epoch.tolist()) for epoch in epochs(sampling, 40)]
    for one, two in zip(taken[::2], taken[1::2], strict=True):
        assert len(one) == len(two) == 500 and not one & two  # the epochs of an era take all
        assert 200 < sum(index % 2 for index in one) < 300
    pairs = sum(index in each and index + 1 in each for each in taken for index in range(999))
    assert 0.23 < pairs / 40 / 999 < 0.27
    assert len({frozenset(each) for each in taken}) == 40


def test_a_small_size_of_unequal_weights_takes_examples_as_often_as_expected():
    weights = torch.rand(700, generator=torch.Generator().manual_seed(2))
    sampling = Weighted(weights, size=50)
    total = torch.bincount(torch.cat(epochs(sampling, 280)), minlength=700)
    expected = sampling.weights / sampling.weights.sum() * 50 * 280
    assert ((total - expected).abs() < 20 + 1e-9).all()  # one in each of 20 eras
    order = sampling.order(3, 5, 10)
    assert order(torch.arange(50))[7:9].equal(order(torch.tensor([7, 8])))


def test_many_classes_are_balanced_in_seconds():
    began = time.monotonic()
    sampling = ClassBalanced(torch.arange(200_000).repeat(2))
    assert time.monotonic() - began < 10  # 50 s before
    (taken,) = epochs(sampling, 1, batch=1000)
    assert (taken % 200_000).bincount().eq(2).all()


def test_an_example_of_weight_0_is_never_taken():
    sampling = Weighted([0, 1, 0, 2, 0], size=1000)
    assert {*torch.cat(epochs(sampling, 5)).tolist()} == {1, 3}


@pytest.mark.parametrize(
    "proportions", [[0.7, 0.3], [1, 1, 1], [0.5, 0.2, 0.2, 0.1], [1 / 3, 2 / 3], [0.123456, 5, 3]]
)
def test_a_pattern_is_within_one_example_of_its_proportions_at_any_place(proportions):
    shares = _shares(proportions)
    pattern = torch.tensor(_pattern(shares))
    taken = F.one_hot(pattern, len(shares)).cumsum(0).double()
    places = torch.arange(1, len(pattern) + 1, dtype=torch.float64)[:, None]
    assert (taken - places * torch.tensor(shares) / sum(shares)).abs().max() < 1
    assert taken[-1].tolist() == shares
    wanted = torch.tensor(proportions) / sum(proportions)
    assert torch.tensor(shares).div(sum(shares)).allclose(wanted, atol=1e-4)


@pytest.mark.parametrize(
    "proportions", [[0.31, 1.7, 1 / 7], [123457, 7654321, 99], torch.tensor([0.7, 0.3]), [1e-9, 1]]
)
def test_fine_proportions_are_kept_within_three_examples_of_a_million(proportions):
    shares = _shares(proportions)
    assert _shares(shares) == shares  # as a saved sampling restores them
    assert sum(shares) <= LONGEST_PATTERN
    for share, wanted in zip(shares, proportions, strict=True):
        error = abs(share / sum(shares) - float(wanted) / float(sum(proportions)))
        assert error <= (3e-6 if min(proportions) > 1e-5 else 2e-5)


def test_a_mixture_may_have_fewer_examples_in_shards_than_lanes(tmp_path):
    write_shards(TensorDataset(*rows()[:3]), str(tmp_path / "three"), 600, 0)
    parts = [trainer.ShardedDataset(tmp_path / "three"), range(50)]
    taken = torch.cat(epochs(Mixture(parts), 2, batch=5))
    counts = taken[taken < 3].bincount()
    assert counts.max() - counts.min() <= 1


def test_a_group_may_be_a_number_of_numpy():
    assert Mixture([np.int64(3), range(4), 5]).sizes.tolist() == [3, 4, 5]


def test_weights_in_a_list_have_the_precision_of_python():
    assert Weighted([1.0, 1e-50, 16777217.0]).weights.tolist() == [1.0, 1e-50, 16777217.0]
    assert Weighted(np.arange(3.0)[::-1]).weights.tolist() == [2.0, 1.0, 0.0]


def test_a_mixture_keeps_its_proportions_after_every_step_over_epochs():
    mixture = Mixture([100, 7, 1000], [0.5, 0.2, 0.3])
    taken = torch.cat(epochs(mixture, 5, batch=13))
    group = torch.bucketize(taken, torch.tensor([100, 107]), right=True)
    after = F.one_hot(group, 3).view(-1, 13, 3).sum(1).cumsum(0).double()
    steps = torch.arange(1, len(after) + 1, dtype=torch.float64)[:, None] * 13
    assert (after - steps * torch.tensor([0.5, 0.2, 0.3])).abs().max() < 1


def test_a_group_of_a_mixture_has_epochs_of_its_own():
    mixture = Mixture([40, 7], [0.5, 0.5])
    order = torch.cat(epochs(mixture, 20, batch=2))
    few = order[order >= 40]
    whole = few[: len(few) // 7 * 7].view(-1, 7)
    # rows are permuted within a batch, which has one of this group: so its order is kept
    assert all(turn.sort().values.tolist() == [*range(40, 47)] for turn in whole)
    assert len({tuple(turn.tolist()) for turn in whole}) > 1


def test_batches_have_as_many_examples_of_each_class_up_to_one():
    for epoch in epochs(ClassBalanced(LABELS), 3):
        counts = F.one_hot(LABELS[epoch], 4).view(-1, 10, 4).sum(1)
        assert counts.min() >= 2 and counts.max() <= 3


@pytest.mark.slow
def test_weights_and_shards_go_together(tmp_path):
    write_shards(rows(), str(tmp_path / "data"), 600, 0)
    task = task_with(SAMPLINGS["classes"], lambda: trainer.ShardedDataset(tmp_path / "data"))
    found = fit_on(2, tmp_path / "shards", *WORDS, task=task)
    plain = fit_on(1, tmp_path / "plain", *WORDS, task=task_with(SAMPLINGS["classes"]))
    assert found["seen"] == plain["seen"] and found["losses"] == plain["losses"]


def test_a_mixture_of_shards_reads_few_of_them_at_a_time(tmp_path):
    for name in ("one", "two"):
        write_shards(rows(), str(tmp_path / name), 600, 0)
    parts = [trainer.ShardedDataset(tmp_path / name, lanes=2, window=1) for name in ("one", "two")]
    mixture = Mixture(parts, [0.75, 0.25])
    taken = torch.cat(epochs(mixture, 2, batch=20))
    many = taken[taken < 203][:188]  # rows of a batch are permuted: its last batches mix epochs
    assert len(many.unique()) == 188
    shards = torch.searchsorted(parts[0].sampling.first, many, right=True) - 1
    assert all(len(some.unique()) <= 8 for some in shards.split(20))
    assert len(shards.unique()) > 25
    task = task_with(lambda: mixture, lambda: ConcatDataset(parts))
    one = fit_on(1, tmp_path / "run", *WORDS, task=task)
    two = fit_on(2, tmp_path / "runs", *WORDS, "data.workers=1", task=task)
    assert one["seen"] == two["seen"] and one["losses"] == two["losses"]
    assert audit([str(two["directory"])]) == 0


def test_shards_of_a_mixture_are_fetched_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    for name in ("one", "two"):
        write_shards(rows(), str(tmp_path / name), 600, 0)

    def run(name, place):
        parts = [trainer.ShardedDataset(f"{place}/{each}") for each in ("one", "two")]
        whole = ConcatDataset([Subset(parts[0], range(150)), parts[1]])
        task = task_with(lambda: Mixture([150, 203], [0.75, 0.25]), lambda: whole)
        return fit_on(1, tmp_path / name, *WORDS, "run.steps=3", task=task)

    local = run("local", tmp_path)
    with serving(tmp_path, 1.0, faults=("slow",), slow_s=0.1) as server:
        found = run("served", server.url)
        assert server.most_at_once > 2
    assert found["seen"] == local["seen"] and found["losses"] == local["losses"]


def test_an_example_of_a_damaged_shard_is_replaced_by_one_of_its_group(tmp_path):
    for name in ("one", "two"):
        write_shards(rows(), str(tmp_path / name), 600, 0)
    damaged = tmp_path / "two" / "shard.00003.mds"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    parts = [trainer.ShardedDataset(tmp_path / name) for name in ("one", "two")]
    first = parts[1].sampling.first.tolist()
    task = task_with(lambda: Mixture(parts, [0.75, 0.25]), lambda: ConcatDataset(parts))
    found = fit_on(1, tmp_path / "run", *WORDS, "data.on_error=skip", task=task)
    replaced = newest(found["directory"]).manifest["replaced"]
    assert replaced
    for place, other in replaced.items():
        wanted = int(place.partition("/")[2])
        assert first[3] <= wanted - 203 < first[4]
        assert other == wanted + first[4] - first[3]


class Holed(TensorDataset):
    """Some of whose examples cannot be read: 4 to 6, and 99, the last of class 0."""

    def __getitem__(self, index):
        if index in (4, 5, 6, 99):
            raise OSError("a hole")
        return super().__getitem__(index)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: Weighted([*[1.0] * 7, *[0.0] * 100, *[1.0] * 96]), {4: 107, 5: 107, 6: 107}),
        (lambda: Mixture([100, 103]), {4: 7, 5: 7, 6: 7, 99: 0}),
        (lambda: ClassBalanced(LABELS), {4: 7, 5: 7, 6: 7, 99: 0}),
        (lambda: None, {4: 7, 5: 7, 6: 7, 99: 100}),
    ],
    ids=["weights", "mixture", "classes", "plain"],
)
def test_an_unreadable_example_is_replaced_by_one_that_the_sampling_allows(
    make, expected, tmp_path
):
    task = task_with(make, lambda: Holed(*rows().tensors))
    words = ("data.on_error=skip", "data.path=streamed")
    one = fit_on(1, tmp_path / "one", *WORDS, *words, task=task)
    two = fit_on(2, tmp_path / "two", *WORDS, *words, "data.workers=1", task=task)
    replaced = newest(one["directory"]).manifest["replaced"]
    found = {int(place.partition("/")[2]): other for place, other in replaced.items()}
    assert found == expected
    assert one["seen"] == two["seen"] and one["losses"] == two["losses"]
    assert audit([str(two["directory"])]) == 0


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Weighted([1.0, -1.0]), "weights: must be finite, not negative"),
        (lambda: Weighted([0.0, 0.0]), "one at least above 0"),
        (lambda: Weighted(torch.ones(2, 2)), "weights: must have one axis"),
        (lambda: Weighted("abc"), "weights: must be numbers, and is a str"),
        (lambda: Weighted([1e308] * 10), "and their sum finite"),
        (lambda: Weighted([1.0, 1j]), "weights: must be real numbers, and is complex128"),
        (lambda: ClassBalanced([0.5, 1.5]), "labels: must be integers, and is float64 with"),
        (lambda: ClassBalanced([0.0, float("nan")]), "labels: must be integers"),
        (lambda: Weighted([1.0], size=0), "size=0: must be an integer of at least 1"),
        (lambda: Mixture([3, 4], [1.0]), "must be one for each group"),
        (lambda: Mixture(5), "groups=5: must be data sets or their numbers of examples"),
        (lambda: Mixture("ab"), "groups='ab': must be data sets"),
        (lambda: Mixture([3, 4], 0.5), "proportions=0.5: must be finite numbers"),
        (lambda: Mixture([3] * 100_001, range(1, 100_002)), "proportions of 100,001 groups: must"),
        (lambda: PackedDataset(5, [1], 10), "dataset: must be a data set with __len__"),
        (lambda: PackedDataset([1], [1], 10, padding=5), "padding=5: must be values by name"),
        (lambda: Mixture([3, 0]), "groups: each must have at least one"),
        (lambda: Mixture([3, 4], [0.5, -0.5]), "must be above 0"),
        (lambda: Mixture([3, 4], [0.5, float("nan")]), "must be finite numbers"),
    ],
)
def test_mistakes_are_named(make, why):
    with pytest.raises(ConfigError, match=why):
        make()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: Weighted(torch.ones(202)), "the train data has 203: must be equal"),
        (lambda: [1, 2], "must be Weighted, Mixture, ClassBalanced or None"),
        (lambda: Weighted(torch.ones(203), size=10), "must be at most the 10 training examples"),
    ],
)
def test_a_sampling_for_other_data_is_refused(make, why, tmp_path):
    with pytest.raises(AssertionError, match=why):
        fit_on(1, tmp_path, *WORDS, task=task_with(make))


@pytest.mark.parametrize("harm", ["damage", "bomb", "other", "missing"])
def test_a_saved_sampling_that_was_changed_is_refused(harm, tmp_path):
    found = fit_on(1, tmp_path, *WORDS, "run.steps=2", task=task_with(SAMPLINGS["weights"]))
    path = found["directory"] / mixture.SAMPLING_FILE
    data = path.read_bytes()
    sampling = ShardShuffle([7])
    settings, tensors = sampling.state()
    tensors["repeats"] = torch.tensor([2**60])
    bomb = save(tensors, {"kind": "shards", "settings": json.dumps(settings)})
    other = mixture.to_bytes(Weighted(torch.ones(203)))
    path.write_bytes({"damage": data[:-1], "bomb": bomb, "other": other, "missing": b""}[harm])
    if harm == "missing":
        path.unlink()
    with pytest.raises(ConfigError, match=r"sampling\.safetensors: (is damaged|No such file)"):
        audit([str(found["directory"])])
