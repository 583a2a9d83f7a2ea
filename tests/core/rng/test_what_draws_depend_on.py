"""What each random draw depends on: comparisons of layouts do not see a key that lacks the step."""

import random

import numpy
import torch
from harness import fit, on_ranks
from tiny import Tiny
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

ALL = 40  # examples, all in each step, so a step is an epoch
SEEN = {}  # of a run: (what, step or epoch, ...) -> example -> a row of random numbers


SOURCES = ("python", "numpy", "torch")
ONE = torch.zeros(1)


def note(key, examples, rows):
    known = SEEN.setdefault(key, {})
    known |= dict(zip(examples.tolist(), rows.flatten(1).tolist(), strict=True))


def draw():
    drawn = [random.random(), float(numpy.random.rand()), float(torch.rand(()))]
    return torch.tensor(drawn, dtype=torch.float64)


def note_sources(key, examples, rows):
    for number, source in enumerate(SOURCES):
        note((key[0] + source, *key[1:]), examples, rows[:, number : number + 1])


class Items(Dataset):
    def __init__(self, split):
        self.split = split

    def __len__(self):
        return ALL

    def __getitem__(self, index):
        return torch.arange(4.0) / 4, draw(), torch.tensor(0)


class Drops(nn.Module):
    def __init__(self, task):
        super().__init__()
        self.inner = nn.Linear(4, 3)
        self.task = [task]

    def forward(self, x):
        task = self.task[0]
        for call in (1, 2):
            kept = F.dropout(torch.ones(len(x), 64), 0.5, self.training)
            if task.place and self.training:
                note(("dropout", call, *task.place), task.examples, kept)
        coins = torch.tensor([[random.random(), float(numpy.random.rand())]])
        if task.place and self.training:
            for number, source in enumerate(SOURCES[:2]):
                note((f"coin of {source}", *task.place), ONE, coins[:, number : number + 1])
        return self.inner(x)


class Draws(Tiny):
    """Task that notes what is drawn for each example: in data set, augment, model and step."""

    place = ()

    def build_model(self):
        return Drops(self)

    def build_dataset(self, split):
        return Items(split)

    def split_batch(self, batch):
        inputs, drawn, targets = batch
        return (inputs, drawn), targets

    def augment(self, inputs, targets, random, train):
        inputs, drawn = inputs
        self.examples = random.indices
        split = "train" if train else "eval"
        if self.place or not train:
            note_sources(("data of ", split, random.epoch), random.indices, drawn)
            for name in ("one", "two"):
                note((name, split, random.epoch), random.indices, random.normal(name, 8))
                per_run = random.normal(name, 8, per="run")
                note((f"{name} of the run", split, random.epoch), random.indices, per_run)
        return inputs, targets

    def train_step(self, batch):
        note_sources(("step of ", self.step), ONE, draw()[None])
        self.place = (self.step, "loss")
        outcome = self.update(batch, self.loss)
        self.place = (self.step, "other")
        outcome += self.update(batch, self.other, name="other")
        self.place = ()
        return outcome

    def other(self, outputs, targets):
        return outputs.square().sum(1)


WORDS = ["task=tiny", f"data.global_batch={ALL}", "run.steps=3", "eval.every_steps=3"]
WORDS += ["run.prove=false", "log.every_steps=1"]


def run(folder, name, *words):
    """Return what a run draws; torch's own state before it does not matter."""
    SEEN.clear()
    torch.manual_seed(ord(name))
    losses = fit(folder, *WORDS, f"run.name={name}", *words, task=Draws)["losses"]
    return {**SEEN}, losses


def runs(folder):
    every = {
        "one": run(folder, "a"),
        "again": run(folder, "b"),
        "seeded": run(folder, "c", "run.seed=1"),
    }
    small, _ = run(folder, "d", "data.micro_batch=7", "data.workers=1")
    return every, small


def rows_of(seen):
    return {(*key, e): tuple(row) for key, rows in seen.items() for e, row in rows.items()}


def test_draws_depend_on_seed_step_update_call_name_split_and_example(tmp_path):
    ((every, small),) = on_ranks(1, runs, tmp_path)
    (one, losses), (again, others), (seeded, last) = (every[n] for n in ("one", "again", "seeded"))
    assert rows_of(one) == rows_of(again) and losses == others
    assert rows_of(one) == rows_of(small), "not on micro-batches and workers"
    own, other = rows_of(one), rows_of(seeded)
    kinds = {key[0] for key in own}
    by_source = {f"{what} of {source}" for what in ("data", "step") for source in SOURCES}
    by_source |= {"coin of python", "coin of numpy"}
    assert kinds == by_source | {"dropout", "one", "two", "one of the run", "two of the run"}
    assert len(own) == ALL * (2 * 3 * 2 + 7 * 4) + 3 * 3 + 3 * 2 * 2, "3 steps of 2 updates"
    per_run = {key: row for key, row in own.items() if "of the run" in key[0]}
    for (name, split, _, example), row in per_run.items():
        assert row == per_run[name, split, 0, example]
    keyed = [row for key, row in own.items() if key not in per_run]
    keyed += [row for (_, _, epoch, _), row in per_run.items() if epoch == 0]
    assert len({*keyed}) == len(keyed), "no two draws are the same"
    assert not {*keyed} & {*other.values()}, "nor are they with another seed"
    assert losses[1] != last[1], "weights depend on the seed"
