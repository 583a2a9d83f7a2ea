"""Verbs on a run that is being trained: its checkpoints are removed while they are read."""

import os
import signal
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from harness import CONF, fit_on, on_ranks
from harness.internals import checkpoint
from harness.training import compose, keep_rules
from tiny import Tiny

from trainer.base.errors import CheckpointError
from trainer.core.checkpoints import reading
from trainer.core.distributed.group import Group
from trainer.show.differences import find_first, list_compared
from trainer.show.run_reading import RunFiles

WORDS = ["task=tiny", "run.steps=2", "strategy=ddp"]


def publish_again(root, newest):
    """Publish the newest checkpoint under the next step, and remove it."""
    facts = dict(checkpoint.read_manifest(newest))
    files = facts.pop("files")
    facts.pop("format")
    step = facts.pop("step") + 1
    staging = checkpoint.stage(root, step)
    for name in files:
        os.link(newest / name, staging / name)
    checkpoint.publish(staging, root, step, files, facts, lambda: None)
    checkpoint.prune(root, keep_rules(1, 0), set())
    return checkpoint.final_path(root, step)


@contextmanager
def going_on(directory):
    """Publish checkpoints in another process, each of which replaces the one before."""
    root = directory / "checkpoints"
    pid = os.fork()
    if not pid:
        newest = max(root.glob("step-*"))
        while True:
            newest = publish_again(root, newest)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def check_reading(folder, directory):
    """Read the newest checkpoint in every way, again and again."""
    root = directory / "checkpoints"
    for _ in range(20):
        assert checkpoint.steps(root)
        assert checkpoint.newest_manifest(root) is not None
        loaded, skipped = checkpoint.find_newest(root, checkpoint.load)
        assert loaded and not skipped
    for number in range(2):
        task = Tiny(compose(folder, *WORDS, f"run.resume={directory}", f"run.name=e{number}"))
        assert task.evaluate().keys() == {"eval/loss", "eval/accuracy"}


def test_checkpoints_that_are_removed_while_they_are_read_are_listed_again(command, tmp_path):
    directory = fit_on(1, tmp_path, *WORDS, "checkpoint.keep_last=1")["directory"]
    with going_on(directory):
        on_ranks(1, check_reading, tmp_path, directory)
        begun = fit_on(1, tmp_path, *WORDS, f"run.init_from={directory}", "run.name=b")
        for more in ([f"--config-dir={CONF}", "out=p.npz"], ["--stored", "out=w.safetensors"]):
            done = command(str(directory), *more, verb="trainer.use")
            assert done.returncode == 0 and not done.stderr, done
        for _ in range(4):
            runs = [RunFiles.read(str(place)) for place in (directory, begun["directory"])]
            assert runs[0].manifest and list_compared(*runs)
            assert "cannot be compared" not in str(find_first(*runs))


def test_checkpoints_that_are_always_removed_are_one_line(tmp_path, monkeypatch):
    """The list is asked for three times."""
    listed = [[tmp_path / f"step-{number:08d}"] for number in range(4)]
    monkeypatch.setattr(reading, "LISTING_TRIES", 3)
    group: Any = Group(SimpleNamespace(rank=0, world_size=1), None)
    why = "no checkpoint is valid; all were removed before they were read; try again"
    with pytest.raises(CheckpointError, match=rf"{tmp_path}: {why}"):
        reading.read_on_all_ranks(group, lambda: (listed.pop(), False))
    assert len(listed) == 1
