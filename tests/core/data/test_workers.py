"""Data workers begin, although Python's fork may deadlock, and end with their rank."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from harness import CONF, children_of, ended, launch, wait_for
from harness.launch import environment_of_a_command

WORDS = ["--config-dir", CONF, "task=items", "run.steps=6", "run.name=a", "data.workers=1"]
# The first children hang in fork, before they run a line of the rank, as in python/cpython#112275.
HANGING = """
import os, runpy, signal
from pathlib import Path

import trainer.core.data.workers

def hang():
    if len(os.listdir("hung")) < int(os.environ["NUM_HUNG"]):
        Path("hung", str(os.getpid())).touch()
        signal.pause()

trainer.core.data.workers.BEGIN_S = 1
os.register_at_fork(after_in_child=hang)
runpy.run_module("trainer", run_name="__main__")
"""


def train(folder, num_hung):
    """Train while the first children hang. Return (exit code, stderr, metrics, their pids)."""
    (folder / "hung").mkdir(parents=True)
    done = subprocess.run(
        [sys.executable, "-c", HANGING, *WORDS],
        cwd=folder,
        env=environment_of_a_command(NUM_HUNG=str(num_hung)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    path = folder / "runs/items/a/metrics.jsonl"
    entries = map(json.loads, path.read_text().splitlines()) if path.exists() else []
    losses = [entry["train/loss"] for entry in entries if "train/loss" in entry]
    return done.returncode, done.stderr, losses, [each.name for each in (folder / "hung").iterdir()]


def state_of(pid):
    """Return the kernel's letter for the state of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


@pytest.mark.slow
def test_a_worker_that_hangs_in_fork_is_forked_again(tmp_path):
    *_, expected, none = train(tmp_path / "a", 0)
    code, err, losses, hung = train(tmp_path / "b", 2)
    assert code == 0, err
    assert expected
    assert (losses, none, len(hung)) == (expected, [], 2)
    assert not any(Path("/proc", pid).exists() for pid in hung)


@pytest.mark.slow
def test_workers_that_never_begin_are_one_line(tmp_path):
    code, err, _, hung = train(tmp_path, 1000)
    assert code == 1
    assert err.splitlines()[-1] == (
        "error: no data worker began within 1 s, 3 times; set data.workers=0"
    )
    assert not any(Path("/proc", pid).exists() for pid in hung)


@pytest.mark.slow
def test_a_worker_that_hangs_ends_with_its_rank(tmp_path):
    words = ["--config-dir", CONF, "task=sticks", "task.options.how=worker", "task.options.rank=0"]
    rank = launch(tmp_path, *words, "data.workers=1", "dist.hang_timeout_s=null")

    def stopped():
        return [pid for pid in children_of(rank.pid) if state_of(pid) == "T"]

    (worker,) = wait_for(stopped)
    rank.kill()
    wait_for(lambda: state_of(worker) in ("", "Z"), limit_s=10)
    ended(rank)
