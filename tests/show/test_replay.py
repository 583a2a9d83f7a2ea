"""trainer.replay says what it trains before it begins, and does not show its own folder."""

import re

import pytest
from harness import CONF, Command

DIRS = ["--config-dir", CONF]
RUN = "runs/tiny/a"


@pytest.fixture(scope="module")
def at_home(tmp_path_factory):
    """Return a command in a folder with a run of 20 steps, which kept checkpoints 18 and 20."""
    command = Command(tmp_path_factory.mktemp("replay"))
    assert command(*DIRS, "task=tiny", "run.name=a", "log.trackers=[]").returncode == 0
    return command


@pytest.mark.parametrize(
    ("step", "line"),
    [
        (
            12,
            "step 12 needs 11 steps of training, from the start: no checkpoint before it is kept; "
            "a run with checkpoint.keep_last=<n> keeps more checkpoints",
        ),
        (
            20,
            "step 20 needs 1 step of training, from step-00000018; "
            "a run with checkpoint.keep_last=<n> keeps more checkpoints",
        ),
        (19, "step 19 needs 0 steps of training, from step-00000018"),
    ],
)
def test_first_line_says_how_much_is_trained(step, line, at_home):
    done = at_home(RUN, f"step={step}", *DIRS, verb="trainer.show")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == line


def test_its_own_folder_is_not_shown(at_home):
    """Step 12 is after an epoch, at whose end a run saves."""
    done = at_home(RUN, "step=12", *DIRS, verb="trainer.show")
    assert "model   Sequential" in done.stdout
    assert not re.search(r"tmp\w+|resume with|tiny/replay", done.stdout + done.stderr)
