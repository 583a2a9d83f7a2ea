"""Evaluation counts each example exactly once, for any number of ranks and any micro-batch."""

import json

import pytest
import torch
from harness import CONF, fit_on, on_ranks, slow_but
from tiny import Tiny
from torch import nn

from trainer import ConfigError, Trainer, load_config
from trainer.core.checkpoints.transaction import steps
from trainer.train import load_task

RECIPE = ["task=tiny", "task.options.norm=true", "task.options.weights=true", "run.steps=3"]


class Counting(Tiny):
    """Task that also reports the number of examples, through a metric that is 1 only for the first
    example."""

    def build_dataset(self, split):
        data = super().build_dataset(split)
        data.tensors[0][0] = 100.0 if split == "eval" else data.tensors[0][0]
        return data

    def metrics(self, outputs, targets):
        is_first = (outputs.abs().sum(1) > 1e3).double()
        return {"share_of_first": is_first, "accuracy": (outputs.argmax(1) == targets).double()}


class Identity(Counting):
    def build_model(self):
        model = nn.Linear(4, 3)
        nn.init.constant_(model.weight, 7.0)
        return model


def evaluate(task, *overrides):
    config = load_config([*RECIPE, *overrides], [CONF])
    return task(config).evaluate()


@pytest.fixture(scope="module")
def on_one_rank():
    return on_ranks(1, evaluate, Identity)[0]


@pytest.mark.parametrize("ranks", slow_but([1, 2, 3, 4, 5], 1, 4))
def test_203_examples_count_203_times(ranks, on_one_rank):
    """Padding copies are not counted, and no example is missing."""

    def each():
        return [evaluate(Identity, f"eval.micro_batch={size}") for size in ("null", "7", "1000")]

    assert on_one_rank["eval/share_of_first"] == 1 / 203
    for found in on_ranks(ranks, each):
        for metrics in found:
            assert metrics.keys() == on_one_rank.keys()
            for name, value in on_one_rank.items():
                assert abs(metrics[name] - value) <= 1e-12 * abs(value), name


def test_fewer_examples_than_ranks_are_counted_once():
    one = on_ranks(1, evaluate, Counting, "task.options.examples=3", "data.global_batch=5")[0]
    for metrics in on_ranks(
        5, evaluate, Counting, "task.options.examples=3", "data.global_batch=5"
    ):
        assert metrics == pytest.approx(one, rel=1e-12)


def test_evaluation_leaves_no_trace_in_training(tmp_path):
    often = fit_on(2, tmp_path / "often", *RECIPE, "eval.every_steps=1", "task.options.dropout=0.3")
    once = fit_on(
        2, tmp_path / "once", *RECIPE, "eval.every_steps=null", "task.options.dropout=0.3"
    )
    assert len([r for r in often["record"] if "eval/loss" in r]) == 3
    for name, tensor in once["weights"].items():
        assert torch.equal(tensor, often["weights"][name]), name


def test_run_directory_is_evaluated_as_at_its_end(tmp_path):
    run = fit_on(2, tmp_path, *RECIPE)
    for ranks in (1, 3):
        for metrics in on_ranks(ranks, evaluate, Tiny, f"run.resume={run['directory']}"):
            assert metrics == pytest.approx(run["metrics"], rel=1e-12)


def test_best_checkpoint_is_kept_beside_the_newest(tmp_path):
    run = fit_on(
        1,
        tmp_path,
        *RECIPE,
        "run.steps=12",
        "eval.every_steps=2",
        "optim.lr=3.0",
        "checkpoint.keep_last=1",
    )
    evaluations = {r["step"]: r["eval/loss"] for r in run["record"] if "eval/loss" in r}
    best = min(evaluations, key=evaluations.get)
    kept = sorted(int(path.name[5:]) for path in (run["directory"] / "checkpoints").glob("step-*"))
    assert kept == sorted({best, 12})
    manifest = json.loads(
        (run["directory"] / f"checkpoints/step-{best:08d}/manifest.json").read_text()
    )
    assert manifest["metrics"]["eval/loss"] == evaluations[best]


class Without(Tiny):
    def build_dataset(self, split):
        return super().build_dataset(split) if split == "train" else None


def test_task_without_evaluation_data_trains(tmp_path):
    run = fit_on(2, tmp_path, *RECIPE, task=Without)
    assert run["metrics"] == {} and run["step"] == 3


def test_task_is_a_trainer():
    assert issubclass(load_task(load_config(RECIPE, [CONF])), Trainer)


def fit_then_evaluate(folder):
    task = Tiny(load_config([*RECIPE, f"run.dir={folder}"], [CONF]))
    summary = task.fit()
    return summary.metrics, task.evaluate()


def test_evaluation_after_a_fit_uses_the_trained_model(tmp_path):
    for fitted, evaluated in on_ranks(2, fit_then_evaluate, tmp_path):
        assert fitted == pytest.approx(evaluated, rel=1e-12)


class OtherNames(Tiny):
    def metrics(self, outputs, targets):
        return {f"accuracy_{self.world.rank}": (outputs.argmax(1) == targets).double()}


def other_names(folder):
    with pytest.raises(
        ConfigError,
        match="the list of eval metrics is accuracy_0, loss on rank 0 and accuracy_1, loss on",
    ):
        OtherNames(load_config([*RECIPE, f"run.dir={folder}"], [CONF])).fit()


def test_metrics_of_other_names_on_another_rank_are_refused(tmp_path):
    on_ranks(2, other_names, tmp_path)
    assert list(tmp_path.iterdir()) == []


class Rising(Tiny):
    """Its loss is best at the first evaluation."""

    def loss(self, outputs, targets):
        values = super().loss(outputs, targets)
        values, *weights = values if isinstance(values, tuple) else (values,)
        return (values + self.step, *weights) if weights else values + self.step


@pytest.mark.parametrize(
    ("more", "kept"), [([], [4, 16]), (["checkpoint.keep_best=2"], [4, 8, 16])]
)
def test_checkpoints_with_the_best_loss_are_kept_by_default(more, kept, tmp_path):
    words = ["task=tiny", "checkpoint.every_steps=4", "checkpoint.every_epochs=null"]
    words += ["eval.every_steps=4", "checkpoint.keep_last=1", "run.steps=16", "run.prove=false"]
    run = fit_on(1, tmp_path, *words, *more, task=Rising)
    assert sorted(steps(run["directory"] / "checkpoints")) == kept
