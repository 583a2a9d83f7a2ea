"""What a log says of speed, memory and checkpoints, of one session and of a resumed one."""

import json
from types import SimpleNamespace

import pytest
import torch
from harness import fit_on, on_ranks
from harness.training import compose
from tiny import Begun, Tiny, TinyItems

from trainer import World
from trainer.core.checkpoints.transaction import steps
from trainer.core.record import run_log
from trainer.core.record.run_log import SLOWEST, RunLog
from trainer.core.record.trackers import Record


class Clock:
    """A clock that is set by hand."""

    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


def open_log(first_step=6, workers=0):
    """Return a log of a run with a global batch of 22, and the list of what it says."""
    said = []
    data = SimpleNamespace(global_batch=22, workers=workers)
    waits = iter([1.0, 3.0, 0.0])
    ranks = SimpleNamespace(
        heartbeat=SimpleNamespace(take_wait=lambda: next(waits)),
        group=SimpleNamespace(world=World()),
    )
    config = SimpleNamespace(data=data, strategy=SimpleNamespace(precision="fp32"))
    record, later = SimpleNamespace(say=said.append), SimpleNamespace(finish=lambda: None)
    return RunLog(config, ranks, record, later, None, first_step, list, True, True), said


def test_the_logged_speed_is_of_the_steps_since_the_last_log_without_evaluations(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(run_log, "time", clock)
    log, _ = open_log(first_step=6)
    clock.now += 3
    with log.paused():
        clock.now += 50
    clock.now += 1
    assert log._speeds(None, 14) == {"speed/examples_per_s": 8 * 22 / 4, "speed/data_wait": 0.25}
    clock.now += 2
    assert log._speeds(None, 15) == {"speed/examples_per_s": 11, "speed/data_wait": 1.0}
    assert log.is_behind(16) and not log.is_behind(15)
    clock.now += 2
    assert log._speeds(None, 17) == {"speed/examples_per_s": 22, "speed/data_wait": 0.0}


def test_waiting_for_data_is_told_once_from_a_tenth_of_the_time_on(monkeypatch):
    monkeypatch.setattr(run_log, "usable_cores", lambda: 8)
    log, said = open_log(workers=3)
    log._hint_at_data(0.09, 10)
    log._hint_at_data(0.5, 0.1)
    assert not said, "a tenth of a second is noise"
    log._hint_at_data(0.1, 10)
    log._hint_at_data(0.9, 10)
    hint = "hint: data loading blocks training, 10% of the time; try data.workers=6"
    assert said == [hint]
    for workers, advice in [(0, "2"), (5, "8")]:
        log, said = open_log(workers=workers)
        log._hint_at_data(0.5, 10)
        assert said[0].endswith(f"try data.workers={advice}")
    log, said = open_log(workers=8)
    log._hint_at_data(0.5, 10)
    assert said[0].endswith("; read less per example, or store what is computed of it")


def test_the_largest_of_the_ranks_have_these_names_in_this_order():
    """`World.peak_bytes` returns used and reserved memory."""
    assert SLOWEST == ("speed/data_wait", "speed/memory_gb", "speed/reserved_gb")


def test_a_resumed_run_tells_its_own_speed_and_settings_once(tmp_path):
    def body(*words):
        shown = []
        Record.hyper_parameters = lambda self, values: shown.append(values)
        summary = Tiny(compose(tmp_path, "task=tiny", *words)).fit()
        return summary.examples_per_s * summary.seconds / 22, len(shown)

    assert on_ranks(1, body, "run.steps=5") == [(pytest.approx(5), 1)]
    resumed = on_ranks(1, body, "run.steps=8", "run.resume=auto")
    assert resumed == [(pytest.approx(3), 0)]


class Asks(Begun):
    def train_step(self, batch):
        outcome = super().train_step(batch)
        if self.step == 5:
            self.save_checkpoint()
        return outcome


def test_a_checkpoint_has_the_evaluation_of_its_own_step_only(tmp_path):
    words = ["task=tiny", "run.steps=11", "eval.every_steps=4", "checkpoint.every_steps=2"]
    words += ["checkpoint.every_epochs=null", "checkpoint.keep_last=20"]
    run = fit_on(1, tmp_path, *words)
    evaluated = {e["step"]: e["eval/loss"] for e in run["record"] if "eval/loss" in e}
    found = {}
    for step, path in steps(run["directory"] / "checkpoints").items():
        manifest = json.loads((path / "manifest.json").read_text())
        found[step] = manifest["metrics"].get("eval/loss")
        assert manifest["code"].keys() >= {"tiny"}
    assert found == {step: evaluated.get(step) for step in (2, 4, 6, 8, 9, 10, 11)}
    assert sorted(evaluated) == [4, 8, 9, 11]


def test_a_checkpoint_that_is_asked_for_is_one(tmp_path):
    words = ["task=tiny", "run.steps=11", "log.every_steps=1", "checkpoint.every_epochs=null"]
    words += ["checkpoint.keep_last=20", "eval.every_epochs=null", "checkpoint.keep_best=0"]
    run = fit_on(1, tmp_path, *words, task=Asks)
    assert [*steps(run["directory"] / "checkpoints")] == [6, 11]


class Many(TinyItems):
    """Task of 1,500 examples, of which some cannot be read."""

    bad = frozenset(range(0, 1500, 100))

    def build_dataset(self, split):
        return Unreadable(self.bad) if split == "train" else None


class TooMany(Many):
    bad = frozenset(range(0, 1500, 90))


class Unreadable(torch.utils.data.Dataset):
    def __init__(self, bad):
        self.bad = bad

    def __len__(self):
        return 1500

    def __getitem__(self, index):
        if index in self.bad:
            raise OSError(f"image {index} is truncated")
        return torch.full((4,), index / 1500), torch.tensor(index % 3)


SKIPPING = ["task=items", "data.on_error=skip", "data.global_batch=500", "run.steps=3"]


def test_a_hundredth_of_a_large_data_set_may_be_unreadable(tmp_path):
    run = fit_on(1, tmp_path / "15", *SKIPPING, task=Many)
    (path,) = steps(run["directory"] / "checkpoints").values()
    replaced = json.loads((path / "manifest.json").read_text())["replaced"]
    assert replaced == {f"0/{index}": index + 1 for index in Many.bad}
    line = "data.on_error=skip: 17 train examples cannot be read; must be at most 15"
    with pytest.raises(AssertionError, match=line):
        fit_on(1, tmp_path / "17", *SKIPPING, task=TooMany)
