"""One fault row on one save; `make faults` runs all rows, and CI those of `--quick`."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))
from faults import power


def test_first_save_of_our_writer_loses_nothing_in_any_state():
    shape = power.Shape(2, 50)
    found = power.crash_states(power.ours, shape, 1)
    assert len(found) > 10 and {announced for announced, _ in found} == {0, 1}
    losses = [power.loss_in(announced, tree, shape) for announced, tree in found]
    assert losses == [None] * len(found)
