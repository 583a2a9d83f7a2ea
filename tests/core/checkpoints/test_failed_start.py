"""A start that fails after it has opened the run directory closes everything that it opened."""

import json
import threading
import time

import pytest
from harness import fit, on_ranks
from harness.training import compose
from tiny import Items, Tiny

from trainer.base.errors import RunError
from trainer.core.checkpoints import run_directory
from trainer.core.checkpoints.resume import Origin
from trainer.core.distributed.launchers import Launcher
from trainer.core.setup import session

RECIPE = ["task=tiny", "run.steps=4", "checkpoint.keep_best=0", "checkpoint.every_steps=2"]


class FailingItems(Items):
    """A data set whose disk fails once the run directory is open."""

    def __getitem__(self, index):
        if FailingItems.fails():
            raise OSError(5, "Input/output error", "rows.bin")
        return super().__getitem__(index)


class OnFailingItems(Tiny):
    def build_dataset(self, split):
        return FailingItems(split)

    def augment(self, inputs, targets, random, train):
        return inputs, targets


def lease_of(place):
    (path,) = sorted(place.glob("bucket/first/*/lease.json"))[-1:]
    return json.loads(path.read_text())


def test_start_that_fails_in_its_checks_can_be_made_again_in_the_same_process(
    tmp_path, monkeypatch
):
    """A failure of the data was tried in the dry run only, before there is a directory."""
    words = [*RECIPE, "run.resume=auto", f"checkpoint.mirror=file://{tmp_path}/bucket/first"]
    writer = tmp_path / "runs/tiny/run/.writer"
    monkeypatch.setattr(FailingItems, "fails", writer.exists, raising=False)

    def body():
        compose(tmp_path / "runs", *words)
        before = {*threading.enumerate()}
        with pytest.raises(RunError, match="Input/output error"):
            fit(tmp_path / "runs", *words, task=OnFailingItems)
        ended = json.loads((writer.parent / "exit.json").read_text())
        threads = [t.name for t in {*threading.enumerate()} - before if t.name in OURS]
        found = [ended, lease_of(tmp_path)["released"], threads]
        FailingItems.fails = staticmethod(lambda: False)
        return [*found, fit(tmp_path / "runs", *words, task=OnFailingItems)["step"]]

    ((ended, is_released, threads, step),) = on_ranks(1, body)
    assert (ended["code"], ended["step"]) == (1, 0)
    assert "Input/output error" in ended["reason"]
    assert (is_released, threads, step) == (True, [], 4)


OURS = ("mirror", "lease", "checkpoint")


@pytest.mark.parametrize("fails", ["take", "read_evaluation", "lack_of_room"])
def test_start_that_fails_while_it_opens_the_run_lets_go_of_it(fails, tmp_path, monkeypatch):
    address = f"file://{tmp_path}/bucket/first"
    words = [*RECIPE, "run.resume=auto", f"checkpoint.mirror={address}"]
    home = {"take": session, "read_evaluation": session, "lack_of_room": session.startup}[fails]

    def body():
        with monkeypatch.context() as patch:
            patch.setattr(home, fails, refuse)
            with pytest.raises(OSError if fails == "take" else Exception, match="no more room"):
                fit(tmp_path / "runs", *words)
        ended = run_directory.read_exit(tmp_path / "runs/tiny/run")
        return [ended, lease_of(tmp_path)["released"], fit(tmp_path / "runs", *words)["step"]]

    ((ended, is_released, step),) = on_ranks(1, body)
    assert (is_released, step) == (True, 4)
    if fails != "take":
        assert ended["code"] == 2 and "no more room; make room" in ended["reason"]


def refuse(*_):
    raise OSError(28, "no more room")


def test_right_to_write_is_let_go_if_the_directory_cannot_be_taken_over(tmp_path):
    words = [*RECIPE, f"checkpoint.mirror=file://{tmp_path}/bucket/first"]

    def body():
        config = compose(tmp_path / "runs", *words)
        directory = tmp_path / "runs/tiny/run"
        directory.mkdir(parents=True)
        (directory / "config.json").mkdir()  # it cannot be replaced
        origin = Origin(directory)
        with pytest.raises(Exception, match=r"config\.json"):
            session.RunLock(config, origin, 0, Launcher("python", {}))
        (directory / "config.json").rmdir()
        begun = time.monotonic()
        lock = session.RunLock(config, origin, 0, Launcher("python", {}))
        lock.give_up(ValueError("a reason"), 3)
        ended = run_directory.read_exit(directory)
        number = session.RunLock(config, origin, 0, Launcher("python", {})).writer.fence.number
        return [number, ended, time.monotonic() - begun]

    ((number, ended, seconds),) = on_ranks(1, body)
    assert number == 3 and seconds < 10
    assert ended == {"code": 1, "reason": "ValueError: a reason", "step": 3}
