"""Hooks and datasets that return something wrong: one line that names it, whatever it is."""

import multiprocessing
import re
from pathlib import Path

import pytest
import torch
from harness import fit, on_ranks
from harness.training import compose
from tiny import Items, Tiny, TinyItems, points

from trainer import ConfigError, ResidentDataset, RunError

WORDS = ["task=tiny", "run.steps=12", "log.trackers=[]", "strategy=single", "eval.every_steps=6"]
BAD = 57  # an example


def ends(folder, cases, words):
    """Return the error of each case, (kind, line), from runs one after another in one process."""
    found = {}
    for number, (name, task) in enumerate(cases.items()):
        try:
            fit(folder / str(number), *WORDS, *words, task=task)
            found[name] = ("", "")
        except Exception as error:
            found[name] = (type(error).__name__, str(error))
        for child in multiprocessing.active_children():
            child.kill()  # as the command line does
    return found


def check(folder: Path, expected: dict, *words: str, ranks: int = 1) -> None:
    """Check the error of each case: `expected` is {name: (task, kind, pattern of the line)}.

    One fork runs all of them.
    """
    compose(folder, *WORDS, *words)
    cases = {name: task for name, (task, _, _) in expected.items()}
    for found in on_ranks(ranks, ends, folder, cases, words):
        for name, (_, kind, pattern) in expected.items():
            assert found[name][0] == kind.__name__, (name, found[name])
            assert re.fullmatch(pattern, found[name][1]), (name, found[name])


def task_with(base=Tiny, **members):
    """Return a task with these hooks."""
    return type("Wrong", (base,), members)


# Lengths ------------------------------------------------------------------------------------------


def of_length(value):
    class Data(Items):
        def __len__(self):
            if isinstance(value, Exception):
                raise value
            return value

    return task_with(TinyItems, build_dataset=lambda self, split: Data(split))


def test_length_that_is_none_is_one_line(tmp_path):
    returned = r"build_dataset\('train'\) returned Data, whose length"
    must = r"; __len__ must return an integer from 1 to 2\*\*63 - 1"
    expected = {
        str(value): (of_length(value), ConfigError, f"{returned} is {re.escape(repr(value))}{must}")
        for value in (-1, 2**63, 1000.0, "5", None)
    }
    why = r"cannot be read: ValueError: unknown \(\S+test_wrong_hooks.py:\d+\)"
    expected["raises"] = (of_length(ValueError("unknown")), ConfigError, f"{returned} {why}{must}")
    check(tmp_path, expected)


# Examples -----------------------------------------------------------------------------------------


class Mute(Exception):
    def __str__(self):
        raise ValueError("no message")


def raises(error):
    def change(inputs, target):
        raise error

    return change


def of_examples(change):
    class Data(Items):
        def __getitem__(self, index):
            row = super().__getitem__(index)
            return change(row[0], int(row[1])) if index == BAD else (row[0], int(row[1]))

    def build_dataset(self, split):
        return Data(split) if split == "train" else Items(split)

    return task_with(TinyItems, build_dataset=build_dataset)


UNREADABLE = f"train example {BAD} cannot be read: "
EXAMPLES = {
    "sparse": (
        lambda x, y: (x.to_sparse(), y),
        r"it is a sparse tensor \(sparse_coo\); return tensor.to_dense\(\)",
    ),
    "complex": (
        lambda x, y: (x.to(torch.complex64), y),
        r"it is \('\(4,\) of complex64', 'int'\) and the others are \(\(4,\), 'int'\); repair .*",
    ),
    "meta": (
        lambda x, y: (x.to("meta"), y),
        r"it is a tensor without values \(on the meta device\); build it on the CPU",
    ),
    "huge": (
        lambda x, y: (x, 2**64),
        "18446744073709551616 does not fit into 64 bits; map it to a smaller number",
    ),
    "mute": (raises(Mute()), r"Mute: its message raises ValueError \(.*\); repair it, or .*"),
    "exits": (raises(GeneratorExit()), r"GeneratorExit \(.*\); repair it, or set .*"),
}


@pytest.mark.parametrize("workers", [0, 1])
def test_example_that_fits_into_no_batch_is_named(workers, tmp_path):
    expected = {
        name: (of_examples(change), RunError, UNREADABLE + line)
        for name, (change, line) in EXAMPLES.items()
    }
    check(tmp_path, expected, f"data.workers={workers}")


def resident(make):
    def build_dataset(self, split):
        return ResidentDataset(*make(*points(203, split)))

    return task_with(build_dataset=build_dataset)


def test_tensors_that_are_no_rows_are_refused(tmp_path):
    returned = r"build_dataset\('train'\) returned a"
    argument = r"ResidentDataset: argument {} must be a tensor with a row for each example, and "
    lines = {
        "sparse": (
            lambda x, y: (x.to_sparse(), y),
            rf"{returned} sparse tensor \(sparse_coo\); .*",
        ),
        "meta": (lambda x, y: (x.to("meta"), y), rf"{returned} tensor without values .*"),
        "list": (lambda x, y: (x.tolist(), y), argument.format(1) + "is a list"),
        "scalar": (lambda x, y: (x, y[0]), argument.format(2) + "is a scalar"),
        "rows": (lambda x, y: (x, y[1:]), argument.format(2) + "arguments 1 and 2 have .* rows"),
        "none": (lambda x, y: (), "ResidentDataset: needs at least one tensor"),
    }
    check(tmp_path, {name: (resident(make), ConfigError, t) for name, (make, t) in lines.items()})


# Hooks of a batch ---------------------------------------------------------------------------------


def augmenting(change):
    return task_with(augment=lambda self, inputs, targets, random, train: change(inputs, targets))


def drawing(*sizes):
    def augment(self, inputs, targets, random, train):
        return inputs + random.normal("noise", *sizes), targets

    return task_with(augment=augment)


def test_hook_that_returns_no_pair_is_named(tmp_path):
    must = r": must return \(inputs, targets\)"
    size = "random: 'noise' was drawn with the size {}: must be an integer of at least 0"
    splitting = task_with(split_batch=lambda self, batch: batch[0])
    expected = {
        "none": (augmenting(lambda x, y: None), ConfigError, f"augment returned a NoneType{must}"),
        "three": (
            augmenting(lambda x, y: (x, y, y)),
            ConfigError,
            f"augment returned a tuple of 3{must}",
        ),
        "generator": (
            augmenting(lambda x, y: (each for each in (x, y))),
            ConfigError,
            f"augment returned a generator{must}",
        ),
        "one": (splitting, ConfigError, f"split_batch returned a Tensor{must}"),
        "sparse": (
            augmenting(lambda x, y: (x.to_sparse(), y)),
            ConfigError,
            r"the train batches contain a sparse tensor \(sparse_coo\); return tensor.to_dense\(\)",
        ),
        "negative": (drawing(-4), ConfigError, size.format(-4)),
        "text": (drawing("4"), ConfigError, size.format("'4'")),
    }
    check(tmp_path, expected)
