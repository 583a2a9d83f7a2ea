"""Reasons of the start and of verify tell causes apart that look alike, and name the code."""

import collections
import contextlib
import io
import itertools
import math
import os
import random
import re
import threading
import time
import uuid

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from harness import on_ranks
from test_proof import NOTE, error_of, lines_of_the_proof
from test_verify import prove  # noqa: F401  # a fixture
from tiny import Items, Tiny
from torch import nn
from wrong_tasks import net

from trainer.startup_checks.rank_agreement import find_changed


class Layer(nn.Module):
    """A layer whose `function(layer, x)` has one cause. What a pass changes is held here."""

    function = None

    def __init__(self, task):
        super().__init__()
        self.task = [task]
        self.number = 0
        self._hidden = 0
        self.queue = collections.deque(maxlen=4)
        self.numbers = itertools.count()
        self.holder = Holder()
        self.unseeded = np.random.default_rng()
        self.seeded = torch.Generator().manual_seed(0)
        self.closure = counting()

    def forward(self, x):
        return type(self).function(self, x)


class Holder:
    __slots__ = ("number",)

    def __init__(self):
        self.number = 0


def counting():
    number = [0]

    def count():
        number[0] += 1
        return number[0]

    return count


def bump():
    bump.number = getattr(bump, "number", 0) + 1
    return bump.number


def waved(x, number):
    return x * (1 + 0.1 * math.sin(number))


# Draws ---


def begins_with_calls(layer, x):
    layer.number += 1
    return F.dropout(x, 0.3) if layer.number > 3 else x


def begins_with_steps(layer, x):
    return F.dropout(x, 0.3) if layer.task[0].step >= 5 else x


def in_chunks(layer, x):
    return torch.cat([F.dropout(each, 0.3) for each in x.split(2)])


def of_sorted_rows(layer, x):
    order = x[:, 0].argsort()
    return F.dropout(x[order], 0.3)[order.argsort()]


def of_turned_rows(layer, x):
    return (x.flip(0) + torch.randn_like(x)).flip(0)


def of_rows_in_drawn_order(layer, x):
    order = torch.randperm(len(x))
    return F.dropout(x[order], 0.3)[order.argsort()]


def drawn_by_numpy(rows):
    return torch.as_tensor(np.random.rand(rows, 1))


def by_numpy(layer, x):
    return x * drawn_by_numpy(len(x)).to(x.dtype)


def by_numpy_in_place(layer, x):
    x[drawn_by_numpy(len(x)).flatten() > 0.5] = 0.0  # the layer before must not be blamed
    return x


def by_python(layer, x):
    order = list(range(len(x)))
    random.shuffle(order)
    return x + 0.1 * x[order]


# Chance ---


def by_new_generator(layer, x):
    return waved(x, np.random.default_rng().random())


def by_system(layer, x):
    return waved(x, random.SystemRandom().random())


def by_new_python_generator(layer, x):
    return waved(x, random.Random().random())


def by_uuid(layer, x):
    return waved(x, uuid.uuid4().int % 100)


def by_seeded_by_chance(layer, x):
    generator = torch.Generator()
    generator.seed()
    return x * (1 + 0.1 * torch.rand((), generator=generator, dtype=x.dtype))


def by_clock(layer, x):
    return waved(x, time.perf_counter() * 1e4)


def by_thread(layer, x):
    found = []
    thread = threading.Thread(target=lambda: found.append(time.perf_counter_ns()))
    thread.start()
    thread.join()
    return waved(x, found[0])


# State ---


def of_private_number(layer, x):
    layer._hidden += 1
    return waved(x, layer._hidden)


def of_queue(layer, x):
    layer.queue.append(float(x.detach().mean()))
    return x * (1 + sum(layer.queue))


def of_slots(layer, x):
    layer.holder.number += 1
    return waved(x, layer.holder.number)


def of_iterator(layer, x):
    return waved(x, next(layer.numbers))


def of_closure(layer, x):
    return waved(x, layer.closure())


def of_function(layer, x):
    return waved(x, bump())


def of_environment(layer, x):
    os.environ["PASSES"] = str(int(os.environ.get("PASSES", "0")) + 1)
    return waved(x, int(os.environ["PASSES"]))


def of_unseeded_generator(layer, x):
    return waved(x, layer.unseeded.random())


def of_seeded_generator(layer, x):
    return x * torch.bernoulli(torch.full_like(x, 0.7), generator=layer.seeded)


def of_first_rows(layer, x):
    if not hasattr(layer, "scale"):
        layer.scale = x.detach().abs().mean()
    return x / layer.scale


def of_first_rows_privately(layer, x):
    if not hasattr(layer, "_scale"):
        layer._scale = x.detach().abs().mean()
    return x / layer._scale


CHANCE = (
    "gives different results each time for the same rows: it draws unseeded numbers, or depends on"
)
GLOBAL = "draws from numpy's or Python's generator, per micro-batch and not per example"
STATE = "depends on {}, which it changes and no buffer holds"
MIXED_STATE = "depends on the other rows of a micro-batch, or on {}, which it changes; compute"
LATE = "or first draws after the start has looked for draws: its draws have no key by example"
ORDER = "draws for rows in another order than in the micro-batch, so that an example gets"
REASONS = {
    begins_with_calls: STATE.format("1.number"),
    begins_with_steps: LATE,
    in_chunks: "draws as often as a micro-batch has rows or chunks (11 times for 22 rows, 4 for 8)",
    of_sorted_rows: ORDER,
    of_turned_rows: ORDER,
    of_rows_in_drawn_order: "randperm draws inside its kernel, per micro-batch",
    by_numpy: GLOBAL,
    by_numpy_in_place: GLOBAL,
    by_python: GLOBAL,
    by_new_generator: CHANCE,
    by_system: CHANCE,
    by_new_python_generator: CHANCE,
    by_uuid: CHANCE,
    by_seeded_by_chance: CHANCE,
    by_clock: CHANCE,
    by_thread: CHANCE,
    of_private_number: STATE.format("1._hidden"),
    of_queue: MIXED_STATE.format("1.queue"),
    of_slots: STATE.format("1.holder"),
    of_iterator: STATE.format("1.numbers"),
    of_closure: STATE.format("number of counting.count"),
    of_function: STATE.format("bump.number"),
    of_environment: STATE.format("os.environ['PASSES']"),
    of_unseeded_generator: STATE.format("1.unseeded"),
    of_seeded_generator: "model or loss depend on 1.seeded, which a pass changes and no",
    of_first_rows: MIXED_STATE.format("1.scale"),
    of_first_rows_privately: MIXED_STATE.format("1._scale"),
}


def layer_of(function):
    return type("Layer", (Layer,), {"function": staticmethod(function)})


def task_of(function):
    return type("Task", (Tiny,), {"build_model": lambda task: net(layer_of(function)(task))})


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """Return the lines of the proof of each task, whose runs follow each other in one process."""

    def body(folder):
        found = {}
        for function in REASONS:
            with contextlib.redirect_stdout(io.StringIO()) as out:
                name = function.__name__
                assert error_of(task_of(function), folder / name) == "", name
            found[name] = lines_of_the_proof(out.getvalue())
        return found

    return on_ranks(1, body, tmp_path_factory.mktemp("reasons"))[0]


@pytest.mark.parametrize("function", REASONS)
def test_the_start_names_the_module_and_the_reason(function, said):
    (line,) = [line for line in said[function.__name__] if NOTE in line]
    is_named = f"1 (Layer){' ' * (function is not of_rows_in_drawn_order)}" in line
    assert is_named or function is of_seeded_generator, line
    assert REASONS[function] in line, line


@pytest.mark.parametrize(("ranks", "words"), [(2, []), (1, ["data.micro_batch=3"])])
def test_a_reason_is_the_same_in_a_layout_that_it_ends(ranks, words, tmp_path):
    for function in (by_numpy_in_place, of_sorted_rows, by_clock, of_closure, of_first_rows):
        folder = tmp_path / function.__name__
        (error, *_) = on_ranks(ranks, error_of, task_of(function), folder, *words)
        assert error.startswith("run.prove=true: 1 (Layer) ") and REASONS[function] in error, error


def of_most_rows(layer, x):
    layer.number = layer.number or len(x)
    return 2 * x if len(x) + 10 < layer.number else x


def test_what_a_first_pass_of_all_rows_sets_is_named(tmp_path, capfd):
    assert not on_ranks(1, error_of, task_of(of_most_rows), tmp_path)[0]
    (line,) = [line for line in capfd.readouterr().out.splitlines() if NOTE in line]
    assert "model or loss depend on 1.number, which a pass changes and no buffer holds" in line


def begins_with_hardly_any(layer, x):
    return F.dropout(x, 0.3 if layer.task[0].step >= 5 else 1e-9)


def test_dropout_that_begins_late_is_keyed_if_it_draws_from_step_1_on(tmp_path, capfd):
    assert not on_ranks(1, error_of, task_of(begins_with_hardly_any), tmp_path)[0]
    assert NOTE not in capfd.readouterr().out


# Losses and data ---


class Loss(Tiny):
    function = None

    def loss(self, outputs, targets):
        return type(self).function(self, super().loss(outputs, targets))


def by_torchs_own_generator(task, values):
    draws = torch.rand(len(values), generator=torch.default_generator, dtype=values.dtype)
    return values * draws


def of_some_rows(task, values):
    return torch.cat([F.dropout(values[values > 1], 0.3), values[values <= 1]])


def by_new_seed(task, values):
    torch.seed()
    return values * torch.rand_like(values)


OF_LOSSES = {
    in_chunks: "the loss draws as often as a micro-batch has rows or chunks (11 times for 22 rows,",
    of_some_rows: "the loss draws dropout of shape (",
    by_torchs_own_generator: "the loss draws from torch's generator itself (generator=...,",
    by_new_seed: f"the loss {CHANCE}",
}


class Read(Items):
    held = np.random.default_rng()
    function = None

    def __getitem__(self, index):
        return self.inputs[index] * type(self).function(self), self.targets[index]


def counting_reads(dataset):
    dataset.reads = getattr(dataset, "reads", 0) + 1
    return 1 + 0.1 * math.sin(dataset.reads)


OF_DATA = {
    lambda dataset: 1 + 0.1 * np.random.default_rng().random(): (
        "augment counts its calls or draws without a key; draw from augment's Random argument",
    ),
    lambda dataset: 1 + 0.1 * math.sin(time.time() * 1e3): ("the data set changes, or collate",),
    lambda dataset: dataset.held.random(): ("depends on held of the data set, which reading",),
    counting_reads: ("it depends on reads of the data set, which reading changes; draw from",),
}


class Data(Tiny):
    function = None

    def build_dataset(self, split):
        return type("Read", (Read,), {"function": staticmethod(type(self).function)})(split)

    def augment(self, inputs, targets, random, train):
        return inputs, targets


@pytest.mark.parametrize("function", OF_LOSSES)
def test_a_loss_is_told_what_it_draws(function, tmp_path, capfd):
    task = type("Task", (Loss,), {"function": staticmethod(function)})
    assert not on_ranks(1, error_of, task, tmp_path)[0]
    (line,) = [line for line in capfd.readouterr().out.splitlines() if NOTE in line]
    assert OF_LOSSES[function] in line, line


def test_rows_of_other_sizes_when_they_are_read_again_are_changed_unless_only_padded():
    indices = torch.tensor([7, 5])
    whole = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    longer = torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 5.0]])
    assert find_changed(whole, longer, indices) == 5
    assert find_changed(whole, F.pad(whole, (0, 1)), indices) is None


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("function", OF_DATA)
def test_examples_that_differ_each_time_they_are_read_are_named(function, ranks, tmp_path, capfd):
    task = type("Task", (Data,), {"function": staticmethod(function)})
    error = on_ranks(ranks, error_of, task, tmp_path)[0]
    lines = [error] if error else capfd.readouterr().out.splitlines()
    (line,) = [line for line in lines if NOTE in line or error]
    assert "example 184 has other values when it is read again: " in line, line
    assert all(each in line for each in OF_DATA[function]), line


# verify ---


class OfTheWorld(nn.Module):
    def forward(self, x):
        return x * (1 + 0.1 * int(os.environ["WORLD_SIZE"]))


class LateOfTheRank(Layer):
    def forward(self, x):
        task = self.task[0]
        return x * (1 + 0.1 * task.world.rank) if task.step >= 3 else x


class Backwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * (1 + 0.1 * int(os.environ["RANK"]))


class BackwardOfTheRank(nn.Module):
    def forward(self, x):
        return Backwards.apply(x)


class ModelOfTheWorld(Tiny):
    def build_model(self):
        return net(OfTheWorld())


class ModelLateOfTheRank(Tiny):
    def build_model(self):
        return net(LateOfTheRank(self))


class GradientOfTheRank(Tiny):
    def build_model(self):
        return net(BackwardOfTheRank())


class LossOfTheWorld(Tiny):
    def loss(self, outputs, targets):
        return super().loss(outputs, targets) * self.world.world_size


class WeightsOfTheProcess(Tiny):
    def build_model(self):
        torch.manual_seed(os.getpid())
        return super().build_model()


class InnerNorm(Tiny):
    def build_model(self):
        return net(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16)))


BY_VERIFY = {
    ModelOfTheWorld: "1 (OfTheWorld) differs from one rank: the same rows have another loss",
    ModelLateOfTheRank: "1 (LateOfTheRank) differs on rank 1: the same rows have another loss",
    GradientOfTheRank: "the gradient of 0.bias differs on rank 1: the same rows have another loss",
    LossOfTheWorld: "the loss differs from one rank: the same rows have another loss or gradient",
    WeightsOfTheProcess: "0.weight differs on rank 0 before step 1: build_model draws unseeded",
    InnerNorm: "plain BatchNorm (1.1) normalises over the rows of a micro-batch",
}


def difference(prove, task, steps):  # noqa: F811
    """Return the line about two ranks, which differ."""
    code, out = prove(task, "layouts=ranks-2", f"steps={steps}")
    (line,) = [line for line in out.splitlines() if line.startswith("ranks-2, fp64: DIFFERENT: ")]
    assert code == 1, line
    return line


@pytest.mark.parametrize("task", BY_VERIFY)
def test_verify_names_the_module_that_depends_on_the_layout(task, prove):  # noqa: F811
    line = difference(prove, task, 5)
    assert BY_VERIFY[task] in line, line


class OfTheClock(Tiny):
    def build_model(self):
        return net(layer_of(by_clock)(self))


class OfANewGenerator(Tiny):
    def build_model(self):
        return net(layer_of(by_new_generator)(self))


class OfNumpy(Tiny):
    def build_model(self):
        return net(layer_of(by_numpy)(self))


BY_CHANCE = {
    OfTheClock: "; draw with torch.rand; by_clock (test_reasons.py:{}) reads the clock",
    OfANewGenerator: "; by_new_generator (test_reasons.py:{}) draws unseeded random numbers",
    OfNumpy: "; drawn_by_numpy (test_reasons.py:{}) draws from numpy's or Python's generator",
}


@pytest.mark.parametrize("task", BY_CHANCE)
def test_verify_names_the_line_that_takes_something_from_chance(task, prove):  # noqa: F811
    line = difference(prove, task, 3)
    assert re.search(re.escape(BY_CHANCE[task]).replace(r"\{\}", r"\d+"), line), line
