"""Facts of the walk over Python state, and of the sandbox that undoes changes."""

import itertools
import math
import os
import random
import shelve
import subprocess
import sys
from collections import OrderedDict, deque
from pathlib import Path
from types import SimpleNamespace

import numpy
import pytest
import torch
from torch import nn

import trainer
from trainer.base.python_code import owner_of, owner_of_frame
from trainer.core.state.sandbox import Keeper, keep_attributes, sandbox
from trainer.core.state.scopes import list_surroundings, scopes_of_model
from trainer.core.state.walk import DEPTH
from trainer.startup_checks.snapshots import Copier, Marks, find_different
from trainer.startup_checks.unsaved import FirstValues, PlainCheck

COUNTS = {"calls": 0}
TEXT = {"capture_output": True, "text": True}


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
    restore = Keeper().visit(value)
    copied = Copier().visit(value)
    change(value)
    if name != "namespace":  # its class is Python's, so marks leave it out
        assert Marks().visit(value) != before
    restore()
    again = Copier().visit(value)
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
    with sandbox(Keeper().visit(value)):
        counts[0] += 1
        assert Marks().visit(value) != before
    assert counts == [0]


def test_a_walk_ends_in_cycles():
    value = {"list": []}
    value["list"].append(value)
    for walk in (Keeper(), Marks(), Copier()):
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


def test_mappings_that_are_files_are_neither_read_nor_written(tmp_path):
    numpy.savez(tmp_path / "rows.npz", rows=numpy.zeros(3))
    with shelve.open(tmp_path / "shelf") as shelf, numpy.load(tmp_path / "rows.npz") as archive:
        shelf["a"] = [1, 2]
        task = SimpleNamespace(shelf=shelf, archive=archive)
        FirstValues(task, nn.Identity())
        with sandbox(keep_attributes(nn.Identity(), task)):
            Marks().visit(task.shelf)
        assert shelf["a"] == [1, 2] and archive["rows"].tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: zip("abc", "def", strict=True),
        lambda: (each for each in "abc"),
        lambda: torch.utils.data.DataLoader([1, 2, 3]),
    ],
)
def test_a_cycle_over_an_iterator_loses_nothing(make):
    task = SimpleNamespace(rows=itertools.cycle(make()))
    expected = [str(each) for each in itertools.islice(itertools.cycle(make()), 6)]
    with sandbox(keep_attributes(nn.Identity(), task)):
        pass
    assert [str(next(task.rows)) for _ in range(6)] == expected


ODD = {
    "meta": lambda: torch.zeros(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse_csr(),
    "lazy": lambda: nn.LazyLinear(3),
    "complex half": lambda: torch.zeros(3, dtype=torch.complex32),
    "scalar": lambda: torch.tensor(3.0),
    "not a number": lambda: torch.tensor(math.nan).expand(4),
    "system random": random.SystemRandom,
    "other bits": lambda: numpy.random.RandomState(numpy.random.PCG64(0)),
    "objects": lambda: numpy.array([{"a": 1}, None], dtype=object),
    "inference": lambda: torch.inference_mode()(torch.zeros)(2),
}


@pytest.mark.filterwarnings("ignore:.*(beta state|experimental)")
@pytest.mark.parametrize("name", ODD)
def test_what_stands_beside_odd_values_is_kept_and_marked(name):
    value = {"odd": ODD[name](), "calls": [0], "scalar": numpy.int64(0)}
    before = Marks().visit(value)
    assert Marks().visit(value) == before
    copied = Copier().visit(value)
    with sandbox(Keeper().visit(value)):
        value["calls"].append(1)
        assert Marks().visit(value) != before
        value["calls"].pop()
        value["scalar"] += 1
        assert Marks().visit(value) != before
        assert find_different({"": copied}, {"": Copier().visit(value)}, 0) == [""]
    assert value["calls"] == [0] and value["scalar"] == 0


def test_restoring_writes_no_new_version_of_what_is_not_a_number():
    values = torch.full((3,), math.nan)
    with sandbox(Keeper().visit(values)):
        pass
    assert values._version == 0


def test_the_state_of_an_optimizer_is_kept_however_large(monkeypatch):
    monkeypatch.setattr(Keeper, "_most_bytes", 4)
    optimizer = of_optimizer()
    before = Marks().visit(optimizer)
    momentum = [state["momentum_buffer"].clone() for state in optimizer.state.values()]
    with sandbox(Keeper().visit(optimizer)):
        stepped(optimizer)
        assert Marks().visit(optimizer) != before
    after = [state["momentum_buffer"] for state in optimizer.state.values()]
    assert all(map(torch.equal, momentum, after))


def test_shared_values_are_plain_each_time():
    sizes = (0, 0)
    assert PlainCheck().begin({"a": sizes, "b": sizes})


def test_names_may_have_braces():
    model = nn.ModuleDict({"{a}": nn.Linear(1, 1)})
    model["{a}"].rate = 1
    assert dict(scopes_of_model(model)[1].named())["{a}.rate"] == 1


def test_code_is_the_users_at_a_prompt_and_torchs_where_it_is_generated(tmp_path):
    def owner(name, file):
        code = compile("def f(frames): frames.append(sys._getframe())", file, "exec")
        variables = {"__name__": name, "sys": sys}
        exec(code, variables)
        frames = []
        variables["f"](frames)
        return owner_of_frame(frames[0])

    link = tmp_path / "linked"
    link.symlink_to(Path(trainer.__file__).parents[1])
    assert owner("__main__", "<stdin>") == owner("mine", "/home/a/ml-packages/x.py") == "user"
    assert owner("torch._inductor.runtime.compile_tasks.a", "/tmp/torchinductor_a/b.py") == "torch"
    assert owner("torch.nn", "/src/pytorch/torch/nn/a.py") == "torch"
    assert owner("trainer.core.task", trainer.core.task.__file__) == "lockstep"
    assert owner("x", "/usr/lib/python3/dist-packages/x.py") == "installed"
    lines = (
        "import trainer, trainer.base.python_code as p; print(p.owner_of_file(trainer.__file__))"
    )
    words = [sys.executable, "-c", lines]
    done = subprocess.run(words, env={**os.environ, "PYTHONPATH": str(link)}, **TEXT, cwd=tmp_path)
    assert done.stdout.strip() == "lockstep", done.stderr


def test_a_class_of_a_notebook_is_the_users():
    assert owner_of(type("Toy", (), {"__module__": "__main__"})) == "user"
