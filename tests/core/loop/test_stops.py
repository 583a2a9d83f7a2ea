"""Ends before the last step: by the clock, by evaluations that get no better, by the task."""

import json
import time
from contextlib import suppress

import pytest
from harness import fit, fit_on, on_ranks, slow_but
from mesh_gpt import Meshed
from tiny import Tiny

from trainer.core.setup import session

WORDS = [
    *("task=tiny", "run.steps=30", "eval.every_steps=4", "eval.every_epochs=null"),
    *("checkpoint.every_epochs=null", "strategy.precision=fp64"),
]
STALE = [*WORDS, "optim.lr=0.0", "run.stop_after_evals=2"]
LAYOUTS = {
    "1": (1, ["strategy=single"]),
    "2": (2, ["strategy=ddp"]),
    "3": (3, ["strategy=ddp", "data.micro_batch=2"]),
    "exact": (2, ["strategy=exact", "data.global_batch=20", "data.micro_batch=5"]),
}


def told(run):
    return json.loads((run["directory"] / "exit.json").read_text())


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "1"))
def test_a_run_ends_after_evaluations_that_are_no_better(layout, tmp_path):
    ranks, words = LAYOUTS[layout]
    run = fit_on(ranks, tmp_path, *STALE, *words)
    assert (run["step"], run["code"]) == (12, 0)  # the first one is the best: two after it
    line = "no better eval/loss in 2 evaluations (run.stop_after_evals)"
    assert told(run)["reason"] == f"done: {line}"
    assert (run["directory"] / "checkpoints/step-00000012").is_dir()
    assert max(run["losses"]) == 12  # log.every_steps is 5, and the end is always logged
    again = fit_on(ranks, tmp_path, *STALE, *words, "run.resume=auto")
    assert (again["step"], again["code"]) == (12, 0)
    longer = fit_on(ranks, tmp_path, *STALE, *words, "run.resume=auto", "run.stop_after_evals=4")
    assert longer["step"] == 20


def test_evaluations_are_counted_across_a_resume(tmp_path):
    stopped = fit_on(1, tmp_path, *STALE, "task.options.signal_at=5")
    assert (stopped["step"], stopped["code"]) == (8, 75)
    resumed = fit_on(1, tmp_path, *STALE, "run.resume=auto")
    assert (resumed["step"], resumed["code"]) == (12, 0)


def test_a_small_improvement_does_not_count(tmp_path):
    words = [*WORDS, "run.stop_after_evals=2"]
    assert fit_on(1, tmp_path / "any", *words)["step"] == 30
    run = fit_on(1, tmp_path / "much", *words, "run.min_improvement=100")
    assert run["step"] == 12
    assert run["metrics"]["eval/loss"] == told(run)["best"]  # the best is the best by any amount


class InLoss(Tiny):
    def loss(self, outputs, targets):
        if self.step == 6 and self.world.rank == self.world.world_size - 1:
            self.stop("seen enough")
            self.stop("a second reason")
        return super().loss(outputs, targets)


class InSummary(Tiny):
    def summarize(self, means):
        if self.step == 8:
            self.stop("good enough")
        return {}


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "2", "exact"))
def test_a_task_ends_the_run_on_all_ranks(layout, tmp_path):
    ranks, words = LAYOUTS[layout]
    words = [*WORDS, *words, "optim.lr=0.01"]
    run = fit_on(ranks, tmp_path / "loss", *words, task=InLoss)
    assert (run["step"], run["code"]) == (8, 0)
    assert told(run)["reason"] == "done: seen enough"
    assert [e["step"] for e in run["record"] if "eval/loss" in e] == [4, 8]
    other = fit_on(ranks, tmp_path / "summary", *words, task=InSummary)
    assert (other["step"], told(other)["reason"]) == (8, "done: good enough")
    assert [e["step"] for e in other["record"] if "eval/loss" in e] == [4, 8]


def test_a_resume_of_an_ended_run_ends_at_once_unless_it_is_longer(tmp_path):
    fit_on(2, tmp_path, *WORDS, task=InLoss)
    again = fit_on(1, tmp_path, *WORDS, "run.resume=auto", task=Tiny)
    assert (again["step"], again["code"]) == (8, 0)
    longer = fit_on(1, tmp_path, *WORDS, "run.resume=auto", "run.steps=31", task=Tiny)
    assert longer["step"] == 31


class OnAStage(Meshed):
    def loss(self, outputs, targets):
        if self.step == 3:
            self.stop("a stage has seen enough")
        return super().loss(outputs, targets)


def test_the_last_stage_of_a_pipeline_ends_the_run(tmp_path):
    run = fit_on(2, tmp_path, "task=meshed", "strategy=pp", "run.steps=9", task=OnAStage)
    assert (run["step"], run["code"]) == (5, 0)


class FailsAt(Tiny):
    """Fails in step 5, which is the first one of its session."""

    def train_step(self, batch):
        raise RuntimeError("of the task")


def test_an_evaluation_that_is_recorded_is_not_made_again_after_a_failure(tmp_path):
    """The checkpoint of its step is from before it: it was owed by an earlier session."""
    words = [*WORDS, "run.prove=false", "run.steps=6"]
    stopped = fit_on(1, tmp_path, *words, "task.options.signal_at=2")
    assert (stopped["step"], stopped["code"]) == (4, 75)

    def evaluations(task):
        made = []

        class Counting(task):
            def evaluate(self):
                made.append(self.step)
                return super().evaluate()

        with suppress(RuntimeError):
            fit(tmp_path, *words, "run.resume=auto", task=Counting)
        return made

    assert on_ranks(1, evaluations, FailsAt) == [[4]]
    assert on_ranks(1, evaluations, Tiny) == [[6]]


def test_a_resume_keeps_a_precision_that_was_chosen(tmp_path, capfd, monkeypatch):
    """Another machine would choose another one."""
    words = [*WORDS[:-1], "eval.every_steps=null"]
    fit_on(1, tmp_path, *words, "run.steps=2", "strategy.precision=fp32")

    def resume():
        monkeypatch.setattr(session, "choose_precision", lambda has_bf16: "amp_bf16")
        more = ["run.steps=3", "run.resume=auto", "strategy.precision=auto"]
        return fit(tmp_path, *words, *more)["step"]

    capfd.readouterr()
    assert on_ranks(1, resume) == [3]
    said = capfd.readouterr().out
    assert ", CPU, fp32, " in said
    line = "dtype   fp32 (strategy.precision=auto), because the run to resume has it"
    assert line in said.splitlines()


class Slow(Tiny):
    def loss(self, outputs, targets):
        if self.model.training:
            time.sleep(0.03)
        return super().loss(outputs, targets)


@pytest.mark.parametrize("ranks", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_a_run_stops_after_its_minutes_and_is_resumed(ranks, tmp_path):
    words = [*WORDS, "run.max_minutes=0.005", "run.steps=40"]
    run = fit_on(ranks, tmp_path, *words, task=Slow)
    assert run["code"] == 75 and 0 < run["step"] < 40
    assert told(run)["reason"] == "stopped"
    resumed = fit_on(ranks, tmp_path, *words, "run.resume=auto", "run.max_minutes=9", task=Slow)
    assert (resumed["step"], resumed["code"]) == (40, 0)
