"""The fault rows that need no process, with few cases; `make faults` runs all rows in full."""

import sys
from pathlib import Path

import pytest
from harness import slow_but

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from faults import damage, hostile, power


@pytest.mark.parametrize(
    ("row", "cases"),
    slow_but([(power.power, 60), (power.weak, 4), (damage.damage, 60)], (damage.damage, 60)),
)
def test_no_case_fails(row, cases):
    found = row(cases, seed=0)
    assert (found.passed, found.failures, found.skipped) == (cases, [], "")


def test_first_save_of_our_writer_loses_nothing_in_any_state():
    shape = power.Shape(2, 50)
    found = power.crash_states(power.ours, shape, 1)
    assert len(found) > 10 and {announced for announced, _ in found} == {0, 1}
    assert [power.loss_in(announced, tree, shape) for announced, tree in found] == [None] * len(
        found
    )


def test_each_verb_that_reads_a_run_is_attacked():
    assert {"show", "use"} <= {name.partition(" ")[0] for name in hostile.VERBS}
