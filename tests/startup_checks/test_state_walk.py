"""Facts of the walk over Python state, and of the sandbox that undoes changes."""

import itertools
import random
from collections import OrderedDict, deque
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

from trainer.core.state.sandbox import Keep, keep_attributes, sandbox
from trainer.core.state.scopes import list_surroundings
from trainer.core.state.walk import DEPTH
from trainer.startup_checks.snapshots import Copy, Marks, find_different

COUNTS = {"calls": 0}


class Meter:
    """A class with slots and attributes."""

    __slots__ = ("__dict__", "last")

    def __init__(self):
        self.last = [0]
        self.sums = {"a": torch.zeros(2)}


class Momentum(torch.optim.SGD):
    def __init__(self, parameters):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.calls = 0


def stepped(optimizer):
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def of_teacher():
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def of_optimizer():
    optimizer = Momentum(nn.Linear(2, 2).parameters())
    stepped(optimizer)
    return optimizer


CHANGES = {  # what makes a value, and what changes it in place
    "list": (lambda: [1, [2]], lambda v: v[1].append(3)),
    "dict": (lambda: {"a": {"b": 1}}, lambda v: v["a"].update(b=2, c=3)),
    "set": (lambda: {1}, lambda v: v.add(2)),
    "deque": (lambda: deque([1, 2], maxlen=2), lambda v: v.append(3)),
    "ordered": (lambda: OrderedDict(a=1), lambda v: v.update(b=2)),
    "tuple": (lambda: ([1],), lambda v: v[0].append(2)),
    "tensor": (lambda: torch.zeros(3), lambda v: v.add_(1)),
    "array": (lambda: numpy.zeros(3), lambda v: v.__setitem__(0, 1)),
    "generator": (torch.Generator, lambda v: torch.rand(1, generator=v)),
    "random": (lambda: random.Random(0), lambda v: v.random()),
    "numpy": (lambda: numpy.random.default_rng(0), lambda v: v.random()),
    "old numpy": (lambda: numpy.random.RandomState(0), lambda v: v.standard_normal()),
    "object": (Meter, lambda v: v.sums["a"].add_(1)),
    "slot": (Meter, lambda v: v.last.append(1)),
    "new attribute": (Meter, lambda v: setattr(v, "more", 1)),
    "namespace": (lambda: SimpleNamespace(a=[1]), lambda v: v.a.append(2)),
    "weights": (of_teacher, lambda v: nn.init.ones_(v[0].weight)),
    "buffers": (of_teacher, lambda v: v(torch.ones(2, 2))),
    "attribute of a layer": (of_teacher, lambda v: setattr(v[1], "eps", 1.0)),
    "optimizer": (of_optimizer, stepped),
    "options": (of_optimizer, lambda v: v.param_groups[0].update(lr=0.5)),
    "attribute of an optimizer": (of_optimizer, lambda v: setattr(v, "calls", 1)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_in_place_is_marked_and_undone(name):
    make, change = CHANGES[name]
    value = make()
    before = Marks().visit(value)
    assert Marks().visit(value) == before
    restore = Keep().visit(value)
    copied = Copy().visit(value)
    change(value)
    if name != "namespace":  # its class is Python's, so marks leave it out
        assert Marks().visit(value) != before
    restore()
    again = Copy().visit(value)
    assert not find_different({"": copied}, {"": again}, 0)
    if name in ("generator", "random", "numpy", "old numpy", "set"):  # None in copies
        assert Marks().visit(value) == before


@pytest.mark.parametrize("depth", range(1, DEPTH + 1))
def test_a_walk_goes_to_its_depth(depth):
    counts = [0]
    value = counts
    for _ in range(depth - 1):
        value = [value]
    before = Marks().visit(value)
    with sandbox(Keep().visit(value)):
        counts[0] += 1
        assert Marks().visit(value) != before
    assert counts == [0]


def test_a_walk_ends_in_cycles():
    value = {"list": []}
    value["list"].append(value)
    for walk in (Keep(), Marks(), Copy()):
        walk.visit(value)


def test_an_iterator_goes_on_where_it_was():
    task = SimpleNamespace(numbers=itertools.count(), names=itertools.cycle("ab"))
    with sandbox(keep_attributes(nn.Identity(), task)):
        next(task.numbers), next(task.names)
    assert (next(task.numbers), next(task.names)) == (0, "a")


def counting(inner):
    calls, table = 0, [0]

    def hook(module, inputs, output, seen=[]):  # noqa: B006
        nonlocal calls
        calls += 1
        table[0] += 1
        seen.append(calls)
        hook.last = calls
        return inner(output)

    return hook


def test_variables_around_a_model_are_kept_and_named(monkeypatch):
    monkeypatch.setenv("PASSES", "0")
    model = nn.Linear(1, 1)
    model.register_forward_hook(counting(lambda output: output))
    (hook,) = model._forward_hooks.values()
    hook.last = 0
    model.task = SimpleNamespace()

    def values():
        return {k: str(v) for s in list_surroundings(model, model.task) for k, v in s.named()}

    before = values()
    with sandbox(keep_attributes(model, model.task)):
        model(torch.zeros(1, 1))
        COUNTS["calls"] += 1
        monkeypatch.setenv("PASSES", "1")
        changed = {name for name, value in values().items() if value != before.get(name)}
    assert values() == before
    of = "counting.hook"
    assert changed == {
        "COUNTS",
        "os.environ['PASSES']",
        *(f"calls of {of}", f"table of {of}", f"seen of {of}", f"{of}.last"),
    }
