"""A stop and a resume do not change the result: the same bits on the same layout, and only rounding
differs on another layout."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from harness import (
    CONF,
    PARITY,
    check_equal_bits,
    check_parity,
    ended,
    fit,
    fit_on,
    launch,
    newest,
    on_ranks,
    slow_but,
)
from harness.command import refuse_meeting
from harness.stored import check_same_bits, optimizers_of
from harness.training import compose
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import Items, Tiny

from trainer import ConfigError, RunError
from trainer.core.checkpoints.transaction import read_manifest

# BatchNorm, dropout, weights and momentum: every kind of state. Stopped between log points 10
# and 15.
RICH = [
    *(
        "task=tiny",
        "task.options.norm=true",
        "task.options.weights=true",
        "task.options.dropout=0.2",
    ),
    *(
        "run.steps=30",
        "log.every_steps=5",
        "eval.every_steps=6",
        "run.clip_norm=0.5",
        "schedule=cosine",
    ),
]
EVERY_10 = [
    *("checkpoint.every_steps=10", "checkpoint.every_epochs=null", "checkpoint.keep_last=3"),
    "checkpoint.keep_best=0",
]


@pytest.mark.parametrize(
    ("ranks", "optimizer"),
    [
        (1, "adamw"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in ((1, "sgd"), (2, "adamw"), (2, "sgd"), (3, "adamw"), (3, "sgd"))
        ),
    ],
)
def test_resume_on_the_same_layout_gives_the_same_bits(ranks, optimizer, tmp_path):
    recipe = [*RICH, f"optim={optimizer}", "strategy.precision=fp32"]
    straight = fit_on(ranks, tmp_path / "straight", *recipe)
    stopped = fit_on(ranks, tmp_path / "broken", *recipe, "task.options.signal_at=11")
    assert stopped["code"] == 75 and 11 < stopped["step"] < 15
    assert json.loads((stopped["directory"] / "exit.json").read_text())["code"] == 75
    resumed = fit_on(ranks, tmp_path / "broken", *recipe, "run.resume=auto")
    assert stopped["seen"] + resumed["seen"] == straight["seen"]
    check_equal_bits(straight, resumed)
    assert resumed["record"] == straight["record"]
    ours, theirs = (optimizers_of(newest(run["directory"])) for run in (straight, resumed))
    assert ours["tensors"]
    check_same_bits(ours, theirs)


@pytest.mark.parametrize(("before", "after"), slow_but([(1, 3), (3, 2), (2, 1)], (3, 2)))
def test_resume_on_another_number_of_ranks_is_parity(before, after, tmp_path):
    recipe = ["task=tiny", *PARITY, "task.options.weights=true", "optim.lr=0.3"]
    straight = fit_on(1, tmp_path / "straight", *recipe)
    stopped = fit_on(before, tmp_path / "broken", *recipe, "task.options.signal_at=17")
    resumed = fit_on(after, tmp_path / "broken", *recipe, "run.resume=auto")
    check_parity(straight, {**resumed, "seen": stopped["seen"] + resumed["seen"]})


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_streamed_resume_gives_the_same_bits(workers, tmp_path):
    recipe = ["task=items", "run.steps=20", f"data.workers={workers}"]
    straight = fit_on(2, tmp_path / "straight", *recipe)
    stopped = fit_on(2, tmp_path / "broken", *recipe, "task.options.signal_at=11")
    resumed = fit_on(2, tmp_path / "broken", *recipe, "run.resume=auto")
    assert stopped["code"] == 75
    check_equal_bits(straight, resumed)


def test_every_step_is_in_the_curves_once(tmp_path):
    fit_on(2, tmp_path, *RICH, "checkpoint.every_steps=4", "task.options.signal_at=11")
    with open(tmp_path / "tiny/run/metrics.jsonl", "a") as file:
        file.write(
            '{"step": 20, "train/loss": 7.0}\n{"step": 2'
        )  # as after a kill: lines of later steps, and half a line
    run = fit_on(2, tmp_path, *RICH, "run.resume=auto")
    names = [(entry["step"], name) for entry in run["record"] for name in entry if name != "step"]
    assert len(names) == len(set(names))
    board = EventAccumulator(str(run["directory"] / "tensorboard"), {"scalars": 0})
    board.Reload()
    for tag in ("train/loss", "optim/lr", "eval/loss", "eval/accuracy"):
        points = {(event.step, round(event.value, 4)) for event in board.Scalars(tag)}
        assert points == {
            (e["step"], round(torch.tensor(e[tag]).item(), 4)) for e in run["record"] if tag in e
        }
        assert len(points) == len(board.Scalars(tag)), tag


def test_finished_run_started_again_does_nothing(tmp_path, capfd):
    first = fit_on(2, tmp_path, *RICH)
    again = fit_on(2, tmp_path, *RICH, "run.resume=auto")
    assert again["seen"] == [] and again["record"] == first["record"] and again["code"] == 0
    assert "nothing left to do" in capfd.readouterr().out


def test_resume_with_more_steps_reports_what_changed(tmp_path, capfd):
    fit_on(1, tmp_path, *RICH)
    longer = fit_on(1, tmp_path, *RICH, "run.resume=auto", "run.steps=40", "optim.lr=0.05")
    said = capfd.readouterr().out
    assert longer["step"] == 40 and max(longer["losses"]) == 40
    assert (
        "run.steps: 30 -> 40" in said
        and "optim.lr: 0.1 -> 0.05" in said
        and re.search(r"learning rate: \S+ in the next; the schedule", said)  # not the last step's
    )
    assert longer["record"][-1]["step"] == 40
    fit_on(1, tmp_path, *RICH, "run.resume=auto", "run.steps=50", "optim.lr=0.05")
    said = capfd.readouterr().out
    assert re.search(r"learning rate: \S+ in the last step, \S+ in the next; the schedule", said)


def test_settings_of_a_session_are_recorded_once_it_has_trained(tmp_path, capfd):
    place = Path(fit_on(1, tmp_path, *RICH)["directory"])
    before = (place / "config.json").read_text()
    fit_on(1, tmp_path, *RICH, "run.resume=auto", "optim.lr=0.5")
    assert "nothing left to do" in capfd.readouterr().out
    assert (place / "config.json").read_text() == before
    fit_on(1, tmp_path, *RICH, "run.resume=auto", "optim.lr=0.05", "run.steps=32")
    assert json.loads((place / "config.json").read_text())["optim"]["lr"] == 0.05
    found = read_manifest(newest(place).path)
    assert found["sessions"] == [[0, 1], [30, 1]]
    assert "optim.lr: 0.1 -> 0.05" in found["changes"]["30"]


def refusal(folder, *overrides):
    with pytest.raises(ConfigError) as caught:
        fit(folder, *RICH, "run.resume=auto", *overrides)
    return str(caught.value)


def test_fewer_steps_than_made_are_refused(tmp_path):
    fit_on(1, tmp_path, *RICH)
    (line,) = on_ranks(1, refusal, tmp_path, "run.steps=20")
    reached = "the run to resume is at step 30 already"
    assert line == f"run.steps=20: ends at step 20, but {reached}; give a larger number"


def test_corrupt_checkpoint_is_skipped_and_its_step_saved_anew(tmp_path, capfd):
    recipe = [*RICH, *EVERY_10]
    straight = fit_on(1, tmp_path, *recipe)
    file = straight["directory"] / "checkpoints/step-00000030/model-r00000.safetensors"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    again = fit_on(1, tmp_path, *recipe, "run.resume=auto")
    assert "skipped step-00000030" in capfd.readouterr().out
    assert len(again["seen"]) == 10 and newest(again["directory"]).manifest["step"] == 30
    check_equal_bits(straight, again)


def test_branch_from_an_older_checkpoint_needs_a_new_name(tmp_path):
    recipe = [*RICH, *EVERY_10]
    straight = fit_on(1, tmp_path, *recipe)
    old = straight["directory"] / "checkpoints/step-00000010"
    (line,) = refused_at_once(tmp_path, ["run.name=null", f"run.resume={old}"])
    assert "its run has reached step 30; give run.name=<new>" in line
    branch = fit_on(1, tmp_path, *recipe, "run.name=branch", f"run.resume={old}")
    assert len(branch["seen"]) == 20 and branch["directory"].name == "branch"
    check_equal_bits(straight, branch)
    left, own = (newest(run["directory"]).manifest["run"] for run in (straight, branch))
    assert left == read_manifest(old)["run"] != own  # it is another run, also for a bucket


def refused_at_once(folder, *cases):
    """Return the error line of each case (a list of overrides), raised before a group is formed."""

    def each():
        refuse_meeting()
        found = []
        for overrides in cases:
            with pytest.raises(ConfigError) as caught:
                fit(folder, *RICH, *overrides)
            found.append(str(caught.value))
        return found

    return on_ranks(1, each)[0]


def test_settings_that_determine_the_samples_cannot_change(tmp_path):
    fit_on(1, tmp_path, *RICH)
    seed, batch, again, nowhere = refused_at_once(
        tmp_path,
        ["run.resume=auto", "run.seed=1"],
        ["run.resume=auto", "data.global_batch=20"],
        [],
        [f"run.resume={tmp_path}/nowhere"],
    )
    assert "run.seed=1: the run to resume has 0" in seed
    assert "data.global_batch=20: the run to resume has 22" in batch
    assert "exists and is not being resumed" in again
    assert "no checkpoint there" in nowhere


def test_checkpoint_of_another_model_or_other_data_is_refused_on_all_ranks(tmp_path):
    fit_on(2, tmp_path, *RICH)
    for line in on_ranks(2, refusal, tmp_path, "task.options.examples=204"):
        assert line.startswith("the train data has length 204, the run to resume had 203")
    for line in on_ranks(2, refusal, tmp_path, "task.options.norm=false"):
        assert line.startswith(
            "the checkpoint is of another model: 1.weight is not in the model built here"
        )
    for line in on_ranks(2, refusal, tmp_path, "optim=adam"):
        other = "the checkpoint is of another optimizer: SGD in it and Adam here; "
        assert line == f"{other}resume with that one, or start a new run with run.init_from"


def test_best_checkpoint_outlives_a_stop_at_its_evaluation(tmp_path):
    """The stop comes before an evaluation that is due; the resume makes it, and its best checkpoint
    is kept."""
    recipe = [
        *RICH,
        "eval.every_steps=13",
        "eval.every_epochs=null",
        "checkpoint.every_epochs=null",
    ]
    recipe.remove("schedule=cosine")
    recipe += [
        "checkpoint.keep_last=1",
        "optim.momentum=0.0",
        "task.options.norm=false",
    ]  # evaluations are equal while lr is 0
    stopped = fit_on(1, tmp_path, *recipe, "task.options.signal_at=12")
    assert stopped["step"] == 13 and not stopped["metrics"]
    resumed = fit_on(1, tmp_path, *recipe, "run.resume=auto", "optim.lr=0.0")
    evaluations = {
        entry["step"]: entry["eval/loss"] for entry in resumed["record"] if "eval/loss" in entry
    }
    assert list(evaluations) == [13, 26, 30]
    kept = sorted(path.name for path in (resumed["directory"] / "checkpoints").glob("step-*"))
    assert kept == ["step-00000013", "step-00000030"]


def test_best_value_of_an_evaluation_after_the_last_checkpoint_is_remembered(tmp_path):
    """A stop before the last evaluation saves the last step; the resume evaluates, and has nothing
    to save."""
    recipe = [word for word in RICH if word != "schedule=cosine"]  # the last one is the best
    stopped = fit_on(1, tmp_path, *recipe, "task.options.signal_at=29")
    assert stopped["step"] == 30
    ends = []
    for _ in range(2):
        run = fit_on(1, tmp_path, *recipe, "run.resume=auto")
        ends.append(json.loads((run["directory"] / "exit.json").read_text()))
    earlier = {e["step"]: e["eval/loss"] for e in stopped["record"] if "eval/loss" in e}
    assert 30 not in earlier and ends[0]["best"] < min(earlier.values())
    assert ends[0]["best"] == ends[1]["best"] == ends[1]["metrics"]["eval/loss"]


def test_best_is_reset_when_its_metric_changes(tmp_path):
    fit_on(1, tmp_path, *RICH)
    other = [
        "run.resume=auto",
        "run.steps=40",
        "checkpoint.best_metric=accuracy",
        "checkpoint.best_mode=max",
    ]
    run = fit_on(1, tmp_path, *RICH, *other)
    accuracies = {
        e["step"]: e["eval/accuracy"]
        for e in run["record"]
        if "eval/accuracy" in e and e["step"] > 30
    }
    best = max(accuracies, key=lambda step: (accuracies[step], -step))
    assert (run["directory"] / f"checkpoints/step-{best:08d}").is_dir()


# A hostile machine --------------------------------------------------------------------------------


def ends(folder, *words, task) -> str:
    """Return the error line that the run ends with, or ""."""
    try:
        fit(folder, *words, task=task)
    except (ConfigError, RunError) as error:
        return str(error)
    return ""


def test_resume_on_other_software_reports_what_changed(tmp_path, capfd, monkeypatch):
    fit_on(1, tmp_path, "task=tiny", "run.steps=5")
    monkeypatch.setattr(torch, "__version__", "9.9.9")
    capfd.readouterr()
    fit_on(1, tmp_path, "task=tiny", "run.steps=8", "run.resume=auto")
    said = capfd.readouterr().out
    assert re.search(r"changed at this resume: torch: 2\..* -> 9\.9\.9", said)
    assert newest(tmp_path / "tiny/run").manifest["machine"]["torch"] == "9.9.9"


def test_newest_run_is_the_one_started_last_with_any_clock(tmp_path):
    for name in ("first", "second"):
        fit_on(1, tmp_path, "task=tiny", "run.steps=5", f"run.name={name}")
    second = tmp_path / "tiny/second/checkpoints"
    os.utime(second, (1, 1))  # as if the clock had been set back
    resumed = fit_on(1, tmp_path, "task=tiny", "run.steps=8", "run.name=null", "run.resume=auto")
    assert resumed["directory"] == tmp_path / "tiny/second"


class Wanders(Tiny):
    """Task that changes the working directory while it is built."""

    def build_dataset(self, split):
        os.chdir("/")
        return super().build_dataset(split)


def test_task_that_changes_the_working_directory_leaves_its_run_where_it_was_asked(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    config = compose(tmp_path, "task=tiny", "run.steps=5")
    config = replace(config, run=replace(config.run, dir="runs"), folder=str(tmp_path))
    on_ranks(2, lambda: Wanders(config).fit() and None)
    assert (tmp_path / "runs/tiny/run/checkpoints/step-00000005").is_dir()
    longer = replace(config, run=replace(config.run, steps=8, resume="auto"))
    on_ranks(2, lambda: Wanders(longer).fit() and None)
    assert newest(tmp_path / "runs/tiny/run").manifest["sessions"] == [[0, 2], [5, 2]]


class MeetsASecond(Tiny):
    """Task during whose build another start of the same run trains and ends."""

    def build_model(self):
        words = [f"run.dir={self.config.run.dir}", "run.name=run", "run.steps=5"]
        other = launch(Path.cwd(), "--config-dir", CONF, "task=tiny", *words)
        assert ended(other)[0] == 0
        return super().build_model()


@pytest.mark.slow
def test_second_start_of_a_name_that_ends_first_keeps_its_run(tmp_path):
    (said,) = on_ranks(1, lambda: ends(tmp_path, "task=tiny", "run.steps=5", task=MeetsASecond))
    assert re.match(r"run.name=run: .*tiny/run exists and is not being resumed", said)
    kept = sorted(path.name for path in (tmp_path / "tiny/run/checkpoints").iterdir())
    assert kept == ["step-00000005"]


class Grows(Items):
    """Dataset that grows while it is read."""

    reads = 0

    def __len__(self):
        return super().__len__() + (type(self).reads > 550)

    def __getitem__(self, index):
        type(self).reads += 1
        return super().__getitem__(index)


class GrowingData(Tiny):
    def build_dataset(self, split):
        return Grows(split) if split == "train" else super().build_dataset(split)


@pytest.mark.companion("startup_checks")
def test_data_whose_length_changes_ends_the_run_and_its_checkpoint_stays_readable(tmp_path):
    words = ["task=tiny", "run.steps=30", "data.path=streamed"]
    (said,) = on_ranks(1, lambda: ends(tmp_path, *words, task=GrowingData))
    assert said.startswith("the train data has 204 examples and had 203 at the start")
    assert newest(tmp_path / "tiny/run").manifest["step"] == 9
