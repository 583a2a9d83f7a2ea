"""The console shows the losses of a task's updates, whatever their names are."""

import pytest

from trainer.core.record.trackers.console import Console


@pytest.mark.parametrize(
    ("values", "shown"),
    [
        ({"train/loss": 0.5}, "loss 0.5000"),
        ({"train/loss": 0.5, "train/accuracy": 0.9}, "loss 0.5000"),
        ({"train/d": 1.0, "train/g": 2.0}, "d 1.0000  g 2.0000"),
        ({"train/d": 1.0, "train/kl": 3.0, "optim/grad_norm/d": 1.0}, "d 1.0000"),
        ({"train/loss": 0.5, "train/critic": 1.0, "optim/grad_norm/critic": 1.0}, "critic 1.0000"),
    ],
)
def test_losses_of_updates_are_shown(values, shown, capfd):
    console = Console()
    console.scalars(1, values)
    console.progress(1, 1, True)
    (line,) = capfd.readouterr().out.splitlines()
    assert shown in line and "accuracy" not in line and "kl" not in line
