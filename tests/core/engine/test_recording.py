"""Recorded values: means over the global batches of an interval, in any layout."""

import os
import signal

import pytest
import torch
from harness import fit_on, on_ranks, slow_but
from harness.training import compose, fit
from mesh_gpt import Meshed

from trainer import ConfigError
from trainer.core.engine import recording
from trainer.core.engine.means import Means
from trainer.core.engine.recording import LossWatcher, Recorder
from trainer.core.engine.step import OpenStep

WORDS = [
    *("task=meshed", "strategy.precision=fp64", "run.steps=9", "log.every_steps=4"),
    *("data.global_batch=23", "log.train_metrics=true", "run.dropout=example"),
    *("checkpoint.every_steps=3", "eval.every_steps=null", "task.options.dropout=0.1"),
]
LAYOUTS = {
    "1": (1, ["strategy=single"]),
    "accumulated": (1, ["strategy=single", "data.micro_batch=5"]),
    "2": (2, ["strategy=ddp", "data.micro_batch=3"]),
    "3": (3, ["strategy=ddp"]),
    "fsdp 2": (2, ["strategy=fsdp"]),
    "tp 2": (2, ["strategy=tp"]),
    "cp 2": (2, ["strategy=cp"]),
    "pp 2": (2, ["strategy=pp", "data.micro_batch=6"]),
    "exact": (2, ["strategy=exact", "data.global_batch=24", "data.micro_batch=2"]),
}
KEYS = ("train/loss", "train/entropy", "train/rows", "train/sometimes", "train/accuracy")


class Recorded(Meshed):
    """Records weighted values, one per row, and some in every third step only."""

    def loss(self, outputs, targets):
        tokens, is_there = targets
        entropy = torch.distributions.Categorical(logits=outputs).entropy()
        self.record("entropy", entropy, is_there.to(entropy.dtype))
        self.record("rows", entropy.new_ones(tokens.shape))
        if self.step % 3 == 0:
            self.record("sometimes", entropy)
        return super().loss(outputs, targets)


class Stopped(Recorded):
    def loss(self, outputs, targets):
        if self.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(outputs, targets)


def values_of(run):
    """Return the recorded values by step and name."""
    return {
        (entry["step"], name): value
        for entry in run["record"]
        for name, value in entry.items()
        if name.startswith(("train/", "optim/"))
    }


def check_same(one, other):
    assert one.keys() == other.keys()
    for (step, name), value in one.items():
        most = 1e-9 if name == "optim/grad_norm" else 1e-12
        assert other[step, name] == pytest.approx(value, rel=most, abs=0), (step, name)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    known = {}

    def run(*words):
        if words not in known:
            folder = tmp_path_factory.mktemp("single")
            known[words] = fit_on(1, folder, *WORDS, "strategy=single", *words, task=Recorded)
        return known[words]

    return run


def test_values_have_their_names_and_intervals(single):
    values = values_of(single())
    assert {step for step, _ in values} == {4, 8, 9}
    assert {name for _, name in values} == {*KEYS, "optim/grad_norm", "optim/lr"}
    assert (9, "train/sometimes") not in values  # not recorded after step 7
    assert all(values[step, "train/rows"] == 1 for step in (4, 8, 9))
    assert all(0 < values[step, "train/accuracy"] < 1 for step in (4, 8, 9))
    record = [entry for entry in single()["record"] if "train/loss" in entry]
    assert len(record) == 3


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "accumulated", "3"))
def test_values_are_equal_in_every_layout(layout, single, tmp_path):
    ranks, words = LAYOUTS[layout]
    batch = [word for word in words if word.startswith("data.global_batch")]
    other = fit_on(ranks, tmp_path, *WORDS, *words, task=Recorded)
    check_same(values_of(single(*batch)), values_of(other))


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["2", "pp 2"])
def test_values_are_equal_after_a_resume_in_an_interval(layout, single, tmp_path):
    ranks, words = LAYOUTS[layout]
    words = [*WORDS, *words]
    stopped = fit_on(ranks, tmp_path, *words, task=Stopped)
    assert stopped["step"] == 6 and stopped["code"] == 75
    resumed = fit_on(1, tmp_path, *WORDS, "strategy=single", "run.resume=auto", task=Recorded)
    whole = {key: value for key, value in values_of(single()).items() if key[0] > 6}
    assert {step for step, _ in whole} == {8, 9}
    check_same(whole, {key: value for key, value in values_of(resumed).items() if key[0] > 6})


def refusal(folder, returned):
    class Wrong(Recorded):
        def loss(self, outputs, targets):
            self.record(*returned(outputs))
            return super().loss(outputs, targets)

    compose(folder, *WORDS)
    with pytest.raises(ConfigError) as caught:
        fit(folder, *WORDS, task=Wrong)
    return str(caught.value)


WRONG = {
    "record('a') got a scalar: must be a value per example": lambda out: ("a", out.mean()),
    "record('a') got values of shape (2,": lambda out: ("a", out[:2]),
    "record('a') got a float: must be a value per example": lambda out: ("a", 0.5),
    "record got the name 3: must be a string of printable characters": lambda out: (3, out),
    "record('loss'): is the name of an update's loss": lambda out: ("loss", out),
    "record('a') got weights with shape (1,)": lambda out: ("a", out, torch.ones(1)),
}


@pytest.mark.parametrize("line", WRONG)
def test_wrong_values_are_refused_in_one_line(line, tmp_path):
    (told,) = on_ranks(1, refusal, tmp_path, WRONG[line])
    assert told.startswith(line) and "\n" not in told


class Colliding(Recorded):
    def loss(self, outputs, targets):
        self.record("twice", outputs.detach().amax(1))
        return super().loss(outputs, targets)

    def metrics(self, outputs, targets):
        return {"twice": outputs.amin(1)}


def test_a_recorded_value_and_a_metric_of_one_name_are_refused(tmp_path):
    with pytest.raises(AssertionError, match=r"metrics returned 'twice', and record has this name"):
        fit_on(1, tmp_path, *WORDS, "log.train_metrics=true", task=Colliding)


class Ending(Recorded):
    def train_step(self, batch):
        if self.step == 5:
            self.stop("enough")
        return super().train_step(batch)


def test_the_norm_of_an_earlier_step_is_not_logged_again(tmp_path):
    words = [*WORDS, "log.every_steps=4", "run.steps=20", "run.clip_norm=null"]
    run = fit_on(1, tmp_path, *words, "strategy=single", task=Ending)
    entries = {r["step"]: r for r in run["record"] if "train/loss" in r}
    assert "optim/grad_norm" in entries[4] and max(entries) in (6, 7)
    assert "optim/grad_norm" not in entries[max(entries)]


def test_nothing_is_recorded_in_an_evaluation_or_after_the_run(tmp_path):
    def run():
        config = compose(tmp_path, *WORDS, "eval.every_steps=2")
        task = Recorded(config)
        task.record("entropy", torch.ones(3))  # before
        task.fit()
        task.record("entropy", torch.ones(3))  # after
        return task.evaluate()

    (metrics,) = on_ranks(1, run)
    assert set(metrics) == {"eval/loss", "eval/accuracy"}


class Losses:
    """Two losses, of which the first one records a value."""

    def __init__(self):
        step = OpenStep()
        step.__enter__()
        self.recorder = Recorder(step, Means(), (), True)
        self.watcher = LossWatcher(self.recorder, None, True)

    def recording(self, outputs, targets):
        self.recorder.record("size", outputs.abs())
        return outputs

    def plain(self, outputs, targets):
        return outputs


def test_a_loss_that_records_stays_eager_whatever_the_others_do(monkeypatch):
    asked = []

    def note(loss, *_):
        return lambda outputs, targets: asked.append(loss.__name__) or loss(outputs, targets)

    monkeypatch.setattr(recording, "compiled", note)
    losses = Losses()
    for _ in range(3):  # updates
        for loss in (losses.recording, losses.plain):
            losses.watcher.watch(loss)(torch.ones(4), torch.ones(4))
    assert asked == ["plain", "plain"], "the first update of a loss is eager"
