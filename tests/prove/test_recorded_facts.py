"""trainer.prove: what is recorded of steps, and what differences of records mean.

One process is recorded; its records are then changed as other scripts would change them.
"""

from __future__ import annotations

import base64
import copy
import json
import subprocess
import sys

import numpy as np
import pytest
from test_prove import SCRIPTS
from test_prove_causes import recorded_in

from trainer.prove.comparison import compare
from trainer.prove.merging import CommandHistory
from trainer.prove.rank_reading import find_records, read_events
from trainer.prove.rounding import Bounds

SGD, SCALED, LBFGS, WRAPPED, LATER = range(5)  # optimizers of the script


@pytest.fixture(scope="module")
def events(tmp_path_factory):
    """Return the events of the script's process."""
    folder = tmp_path_factory.mktemp("records")
    words = [sys.executable, "-W", "ignore", str(SCRIPTS / "recorded.py")]
    done = subprocess.run(
        words, env=recorded_in(folder), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = find_records(folder)
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps_of(events, optimizer):
    return [
        each for each in read_events(copy.deepcopy(events)).steps if each.optimizer == optimizer
    ]


@pytest.mark.parametrize("optimizer", [SCALED, LBFGS])
def test_the_gradients_are_those_of_the_first_evaluation_without_a_loss_scale(events, optimizer):
    plain = steps_of(events, SGD)[0].gradients.values()
    (step,) = steps_of(events, optimizer)
    for one, other in zip(plain, step.gradients.values(), strict=True):
        assert np.linalg.norm(one - other) < 1e-6 * np.linalg.norm(one)


def test_a_parameter_that_is_frozen_between_steps_is_noted(events):
    assert [step.frozen for step in steps_of(events, SGD)] == [[], *[["0.weight"]] * 2]


def test_an_optimizer_at_the_address_of_one_that_is_gone_is_another_one(events):
    """It was counted as the first one's next steps, when Python used the address again."""
    assert [len(steps_of(events, each)) for each in (SGD, WRAPPED)] == [3, 2]
    later = [step.number for step in read_events(copy.deepcopy(events)).steps[-2:]]
    assert later == [1, 1] and len(steps_of(events, LATER)) == 1


def test_a_step_that_another_step_makes_is_no_step(events):
    one, other = steps_of(events, SGD), steps_of(events, WRAPPED)
    assert [step.number for step in other] == [1, 2]
    plain, within = (steps[0].gradients.values() for steps in (one, other))
    assert all(np.array_equal(*pair) for pair in zip(plain, within, strict=True))


# Comparison --------------------------------------------------------------------------------------


def of_sgd(events):
    """Return a copy of the events of the first optimizer only."""
    end = max(n for n, each in enumerate(events) if each.get("optimizer") == SGD)
    return copy.deepcopy(events[: end + 1])


def scaled(texts, factor):
    """Return sketches `factor` times as large."""
    return [
        text
        and base64.b64encode((factor * np.frombuffer(base64.b64decode(text))).tobytes()).decode()
        for text in texts
    ]


def changed(events, step, **factors):
    """Return events with values of a step `factor` times as large."""
    events = of_sgd(events)
    for each in events:
        if each["event"] == "step" and each["step"] == step:
            for name, factor in factors.items():
                old = each[name]
                each[name] = [factor * v for v in old] if name == "rates" else scaled(old, factor)
    return events


def other_rows(events, step):
    """Return events in which the rows of a step are others."""
    events = of_sgd(events)
    forwards = [each for each in events if each["event"] == "forward" and each["training"]]
    forwards[step - 1]["rows"] = [f"{row[1:]}0" for row in forwards[step - 1]["rows"]]
    return events


def compared(one, *others):
    """Return the comparison of a command of one rank with one of several."""
    histories = [read_events(each) for each in others]
    for number, history in enumerate(histories):
        history.rank, history.world_size = number, len(histories)
    pair = [CommandHistory.of("A", "a", [read_events(one)]), CommandHistory.of("B", "b", histories)]
    return compare(*pair, Bounds())


def kinds(found):
    return {each.kind: each.place for each in found.deviations}


def test_equal_records_are_the_same(events):
    found = compared(of_sgd(events), of_sgd(events))
    assert found.is_same and not found.harmless and found.worst["weights"] == 0


def test_other_examples_count_if_any_number_differs(events):
    found = compared(of_sgd(events), other_rows(events, 2))
    assert found.is_same and [each.kind for each in found.harmless] == ["examples"]
    other = other_rows(changed(events, 2, weights=1.01), 2)
    found = compared(of_sgd(events), other)
    assert kinds(found) == {"examples": 1} and not found.harmless


def test_a_cause_in_the_same_step_leaves_nothing_out_that_it_does_not_explain(events):
    """The rate of a step cannot change its gradient, but its weights and what follows."""
    other = changed(events, 2, rates=2.0, gradients=1.01)
    assert kinds(compared(of_sgd(events), other)) == {"lr": 1, "gradients": 1}
    other = changed(events, 2, rates=2.0, weights=1.01)
    assert kinds(compared(of_sgd(events), other)) == {"lr": 1}
    other = changed(changed(events, 2, rates=2.0), 3, gradients=1.01)
    assert kinds(compared(of_sgd(events), other)) == {"lr": 1}


def test_ranks_that_start_with_other_weights_are_named(events):
    second = of_sgd(events)
    for each in second:
        if each["event"] == "optimizer":
            each["weights"] = scaled(each["weights"], 1.001)
    found = compared(of_sgd(events), of_sgd(events), second)
    (start,) = [each for each in found.deviations if each.kind == "initial weights"]
    assert start.where.endswith("starts with other values on the ranks of B")


def test_commands_that_learn_nothing_are_not_the_same(events):
    silent = of_sgd(events)
    for each in silent:
        if each["event"] == "step":
            each["gradients"] = scaled(each["gradients"], 0.0)
    found = compared(silent, copy.deepcopy(silent))
    assert [each.where for each in found.deviations] == [
        "no parameter of A and B has a gradient at any step"
    ]
