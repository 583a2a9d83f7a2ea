"""Facts of a step that tables state: precisions, rates, the best evaluation, recorded losses."""

import json
import math
from types import SimpleNamespace

import pytest
import torch
from harness import fit, fit_on, on_ranks
from harness.training import compose
from tiny import Tiny
from torch import nn

from trainer import ConfigError
from trainer.base.errors import CheckpointError
from trainer.core.checkpoints.progress import RunProgress
from trainer.core.checkpoints.run_directory import BAD_STEP
from trainer.core.engine.evaluation import Evaluator
from trainer.core.engine.means import Means
from trainer.core.engine.optimizers import split_for_muon
from trainer.core.engine.precision import Precision
from trainer.core.engine.recording import LossWatcher, Recorder
from trainer.core.engine.step import Norms, OpenStep, Rates
from trainer.core.schedule import (
    Schedule,
    constant,
    cosine,
    describe_longer_run,
    linear,
    rate_scale,
)
from trainer.core.strategy.base import Strategy
from trainer.core.strategy.exact import Exact

HERE = torch.device("cpu")
FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
NAN = math.nan

# Precisions ---------------------------------------------------------------------------------------

# dtype of weights, of autocast, of sums; scaled, narrow, rounded; skipped steps in a row at most
PRECISIONS = {
    "fp64": (FP64, None, FP64, False, False, False, 10),
    "fp32": (FP32, None, FP32, False, False, False, 10),
    "tf32": (FP32, None, FP32, False, False, True, 10),
    "amp_bf16": (FP32, BF16, FP32, False, True, True, 10),
    "amp_fp16": (FP32, FP16, FP32, True, True, True, 30),
    "bf16": (BF16, None, FP32, False, True, True, 10),
    "fp16": (FP16, None, FP32, True, True, True, 30),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_precision_decides_dtypes_scaling_and_limits(name):
    found = Precision(name, HERE)
    facts = (found.dtype, found.autocast_dtype, found.wide, found.is_scaled)
    facts += (found.is_narrow, found.is_rounded, found.max_skipped)
    assert facts == PRECISIONS[name]
    assert found.state_dict().keys() == ({"scale", "growth"} if found.is_scaled else set())


def test_the_loss_scale_doubles_after_2000_good_steps_and_goes_on_after_a_resume():
    good, bad = torch.zeros(()), torch.ones(())
    precision = Precision("fp16", HERE)
    precision.update_scale(bad)
    for _ in range(1500):
        precision.update_scale(good)
    resumed = Precision("fp16", HERE)
    resumed.load_state_dict(precision.state_dict())
    for _ in range(499):
        resumed.update_scale(good)
    assert resumed.state_dict()["scale"] == 2.0**15
    resumed.update_scale(good)
    assert resumed.state_dict()["scale"] == 2.0**16
    resumed.update_scale(bad)
    assert resumed.state_dict()["scale"] == 2.0**15


class Huge(Tiny):
    """Task whose gradients overflow fp16 at any scale above 2**2."""

    def loss(self, outputs, targets):
        return super().loss(outputs * 20_000, targets)


def test_fp16_may_skip_more_steps_than_10_while_the_scale_falls(tmp_path):
    words = ["task=tiny", "strategy.precision=amp_fp16", "run.steps=20", "optim.lr=1e-6"]
    run = fit_on(1, tmp_path, *words, "log.every_steps=1", task=Huge)
    noted = [e["step"] for e in run["record"] if BAD_STEP in e]
    assert len(noted) > 10 and noted == list(range(1, len(noted) + 1))
    assert run["step"] == 20


def test_the_norm_of_gradients_of_16_bits_does_not_overflow():
    gradients = [[torch.full((4,), 6e4, dtype=FP16)], [torch.full((5,), 2.0**-20, dtype=FP16)]]
    tensors = SimpleNamespace(gradients=lambda: gradients)
    strategy = SimpleNamespace(tensors=tensors, precision=Precision("fp16", HERE))
    assert float(Strategy._norm(strategy)) == pytest.approx(1.2e5, rel=1e-3)


# Rates --------------------------------------------------------------------------------------------


def settings(scaling, batch, of):
    run = SimpleNamespace(lr_scaling=scaling, lr_batch=of)
    return SimpleNamespace(run=run, data=SimpleNamespace(global_batch=batch))


def test_rates_are_scaled_by_the_global_batch_as_asked_for():
    assert rate_scale(settings("none", 64, None)) == 1
    assert rate_scale(settings("linear", 64, 16)) == 4
    assert rate_scale(settings("sqrt", 64, 16)) == 2
    assert rate_scale(settings("sqrt", 16, 64)) == 0.5


def test_a_group_without_a_rate_is_left_as_it_is():
    parameters = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": [p]} for p in parameters], lr=0.5)
    first, second, third = optimizer.param_groups
    first["initial"] = {"lr": 0.5}
    second["initial"] = {"momentum": 0.0}
    second["lr"] = third["lr"] = 7.0  # added later, or of another kind
    rates = Rates([optimizer], linear(10), 2.0)
    rates.set(5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 7.0, 7.0]
    assert rates.by_name() == {"optim/lr": 0.5}
    assert rates.around(9) == pytest.approx([0.5, 0.1])


@pytest.mark.parametrize(
    ("schedule", "line"),
    [
        (constant, []),
        (
            linear,
            [
                "a longer run: the schedule is computed for the new length, so the rate goes from"
                " 0.0909 to 0.545 of its peak"
            ],
        ),
        (
            cosine,
            [
                "a longer run: the schedule is computed for the new length, so the rate goes from"
                " 0.0203 to 0.571 of its peak"
            ],
        ),
    ],
)
def test_a_rate_that_jumps_in_a_longer_run_is_told(schedule, line):
    assert describe_longer_run(schedule, 11) == line


@pytest.mark.parametrize("factor", [-1e-9, math.inf, -math.inf, NAN, "0.5", None, [1.0]])
def test_a_factor_must_be_a_finite_number_of_at_least_0(factor):
    schedule = Schedule(lambda step: factor if step == 7 else 0, "build_schedule")
    schedule.check(7)
    with pytest.raises(ConfigError, match=r"^build_schedule: returned .* for step 7 \(the first"):
        schedule.check(8)


def test_norms_are_taken_once():
    norms = Norms(None)
    norms.note_and_clip("loss", [], torch.tensor(3.0))
    assert norms.take() == {"loss": torch.tensor(3.0)}
    assert norms.take() == {}


def test_muon_steps_trained_matrices_that_are_no_embeddings():
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 3), nn.Conv1d(3, 2, 1), nn.Linear(2, 2))
    model[3].requires_grad_(False)
    matrices, others = split_for_muon(model)
    embedding, linear_, conv = model[0], model[1], model[2]
    assert list(map(id, matrices)) == [id(linear_.weight)]
    expected = [embedding.weight, linear_.bias, conv.weight, conv.bias]
    assert list(map(id, others)) == list(map(id, expected))


# Evaluations --------------------------------------------------------------------------------------

# value: whether it is the best, the best step, evaluations without a better one
NOTED = {
    ("min", 0.0): [
        (NAN, False, None, 1),
        (3.0, True, 2, 0),
        (3.0, False, 2, 1),
        (2.5, True, 4, 0),
        (NAN, False, 4, 1),
        (2.7, False, 4, 2),
    ],
    ("max", 0.0): [(3.0, True, 1, 0), (3.0, False, 1, 1), (3.5, True, 3, 0), (3.2, False, 3, 1)],
    ("min", 0.5): [(3.0, True, 1, 0), (2.6, True, 2, 1), (2.5, True, 3, 2), (2.4, True, 4, 0)],
}


@pytest.mark.parametrize(("mode", "least"), NOTED)
def test_the_best_evaluation_and_those_since_a_better_one(mode, least):
    state = RunProgress.begin(1)
    for value, is_best, best_step, stale in NOTED[mode, least]:
        state.advance()
        assert state.note({"eval/a": value}, "eval/a", mode, least) is is_best
        assert (state.best_step, state.stale) == (best_step, stale)
        assert state.evaluated == state.step


def test_another_metric_begins_a_new_best():
    state = RunProgress.begin(1)
    state.note({"eval/a": 1.0, "eval/b": 9.0}, "eval/a", "min", 0.0)
    state.advance()
    assert state.note({"eval/a": 2.0, "eval/b": 10.0}, "eval/b", "min", 0.0)
    assert (state.best, state.best_step, state.best_of) == (10.0, 1, "min eval/b")
    state.advance()
    assert state.note({"eval/b": 9.5}, "eval/b", "max", 0.0), "of another mode, too"
    assert (state.best, state.best_step, state.stale) == (9.5, 2, 0)


def test_an_evaluation_that_an_earlier_process_recorded_is_taken_once():
    state = RunProgress.begin(1)
    state.advance()
    state.recall({}, "eval/a", "min", 0.0)
    assert state.evaluated == -1
    state.recall({"eval/a": 2.0}, "eval/a", "min", 0.0)
    state.recall({"eval/a": 1.0}, "eval/a", "min", 0.0)
    assert (state.evaluated, state.best, state.stale) == (1, 2.0, 0)


def test_each_batch_of_an_evaluation_must_return_the_same_names():
    evaluator = SimpleNamespace(_names={})
    check = Evaluator._check_names
    check(evaluator, "eval", {"loss", "a"})
    check(evaluator, "other", {"loss"})
    check(evaluator, "eval", {"loss", "a"})
    for names, shown in [({"loss"}, "loss"), ({"loss", "a", "b"}, "a, b, loss"), ({"b"}, "b")]:
        with pytest.raises(ConfigError, match=f"^metrics returned {shown} after a, loss: must"):
            check(evaluator, "eval", names)


class NegativeWeights(Tiny):
    def metrics(self, outputs, targets):
        right = (outputs.argmax(1) == targets).double()
        return {"accuracy": (right, targets.double() - 0.5)}


class CalledLoss(Tiny):
    def metrics(self, outputs, targets):
        return {"loss": (outputs.argmax(1) == targets).double()}


WRONG_METRICS = {
    NegativeWeights: "metrics: accuracy returned a weight of -0.5: must be at least 0",
    CalledLoss: "metrics returned a value called loss: must have another name; loss is always",
}


@pytest.mark.parametrize("task", WRONG_METRICS)
def test_wrong_metrics_are_refused_before_training(task, tmp_path):
    def body():
        with pytest.raises(ConfigError) as error:
            fit(tmp_path, "task=tiny", task=task)
        return str(error.value)

    (line,) = on_ranks(1, body)
    assert line.startswith(WRONG_METRICS[task])
    assert not any(tmp_path.iterdir())


def test_averages_are_of_the_weights_that_train(tmp_path):
    words = ["task=tiny", "run.steps=2", "run.ema_decay=0.9"]
    frozen = [*words, "run.freeze=[0.bias]"]
    made = {False: fit_on(1, tmp_path / "all", *words)["directory"]}
    made[True] = fit_on(1, tmp_path / "some", *frozen)["directory"]

    def evaluate(was_frozen, *again):
        task = Tiny(compose(tmp_path / "other", *again, f"run.resume={made[was_frozen]}"))
        try:
            return len(task.evaluate())
        except CheckpointError as error:
            return str(error)

    (line,) = on_ranks(1, evaluate, False, *frozen)
    assert line.startswith(
        "the checkpoint has an average of 0.bias, which does not train here: give"
    )
    (line,) = on_ranks(1, evaluate, True, *words)
    assert line.startswith("the checkpoint has no average of 0.bias, which trains here: give")
    assert on_ranks(1, evaluate, True, *frozen) == on_ranks(1, evaluate, False, *words) == [2]


# Records ------------------------------------------------------------------------------------------


def test_a_loss_that_is_another_function_in_each_step_is_computed():
    step = OpenStep()
    step.__enter__()
    watcher = LossWatcher(Recorder(step, Means(), (), True), None)
    for factor in (1.0, 2.0, 3.0):
        loss = watcher.watch(lambda outputs, targets, factor=factor: factor * outputs)
        assert loss(torch.ones(2), torch.ones(2)).tolist() == [factor] * 2


class Twice(Tiny):
    """Task with a second update, of another loss."""

    mark = 1.0

    def other(self, outputs, targets):
        return 0.01 * outputs.square().sum(1)

    def metrics(self, outputs, targets):
        one = torch.full((len(targets),), self.mark)
        return {"one": one, "row": torch.arange(len(targets)).double()}

    def train_step(self, batch):
        self.mark = 1.0
        outcome = self.update(batch, self.loss)
        self.mark = 9.0
        return outcome + self.update(batch, self.other, name="other")


def test_metrics_of_training_are_those_of_the_rows_that_are_learned(tmp_path):
    """Neither of a second update, nor of the passes of the start's checks, nor of an evaluation."""
    words = ["task=tiny", "run.steps=4", "log.every_steps=2", "log.train_metrics=true"]
    words += ["data.micro_batch=11", "eval.every_steps=1"]
    run = fit_on(1, tmp_path, *words, task=Twice)
    entries = [e for e in run["record"] if "train/loss" in e]
    assert [e["step"] for e in entries] == [2, 4]
    for entry in entries:
        assert entry["train/one"] == 1 and entry["train/row"] == 5
        assert {name for name in entry if name.startswith("optim/")} == {
            "optim/lr",
            "optim/grad_norm",
            "optim/grad_norm/other",
        }
        assert entry["epoch"] == round(entry["step"] / 9, 6)
        assert entry["optim/grad_norm/other"] < entry["optim/grad_norm"]


class OneOfTwo(Tiny):
    """Task that updates its first layer only, without a change of its weights."""

    def augment(self, inputs, targets, random, train):
        return inputs, targets

    def build_optimizer(self, model):
        return [torch.optim.SGD(model[layer].parameters(), lr=0.0) for layer in (0, 4)]

    def train_step(self, batch):
        return self.update(batch, self.loss, self.optimizers[:1])


def test_the_norm_of_an_update_is_that_of_the_weights_it_steps(tmp_path):
    """It is logged, and clipped by."""

    def body():
        words = ["task=tiny", "run.steps=1", "data.global_batch=203", "log.every_steps=1"]
        task = OneOfTwo(compose(tmp_path, *words, "run.clip_norm=9"))
        directory = task.fit().directory
        inputs, targets = task.build_dataset("train").tensors
        loss = nn.functional.cross_entropy(task.model(inputs.double()), targets)
        gradients = torch.autograd.grad(loss, [*task.model[0].parameters()])
        norm = torch.cat([each.flatten() for each in gradients]).norm().item()
        lines = (directory / "metrics.jsonl").read_text().splitlines()
        return norm, next(e["optim/grad_norm"] for e in map(json.loads, lines) if "train/loss" in e)

    ((norm, logged),) = on_ranks(1, body)
    assert logged == pytest.approx(norm, rel=1e-9)


# Exact --------------------------------------------------------------------------------------------


def leaf(global_batch, norm_rows=None, most_rows=None):
    data = SimpleNamespace(global_batch=global_batch, most_rows=most_rows)
    split = Exact.batch_split(SimpleNamespace(data=data, norm_rows=norm_rows))
    assert split.is_fixed and split.unit == split.micro_batch
    return split.unit


def test_a_leaf_by_default_gives_a_global_batch_eight_leaves_if_it_has_such_divisors():
    batches = (1024, 64, 24, 22, 20, 8, 7, 4)
    assert [leaf(n) for n in batches] == [128, 8, 3, 2, 2, 1, 1, 1]
    assert [leaf(64, norm_rows=4), leaf(64, norm_rows=16)] == [8, 16]
    assert leaf(64, most_rows=16) == 16


def test_exact_computes_on_one_thread_of_a_cpu():
    def body():
        torch.set_num_threads(2)
        threads = Exact.set_threads(SimpleNamespace(device=HERE))
        return threads, torch.get_num_threads()

    assert on_ranks(1, body) == [(1, 1)]


REFUSED = {
    "strategy.devices_per_rank=2": "strategy.devices_per_rank=2: must be 1 under strategy=exact",
    "data.micro_batch=auto": "data.micro_batch=auto: belongs to the run under strategy=exact, so it"
    " cannot depend on the memory; set 2",
    "strategy.device_ids=[0]": "strategy.device_ids=[0]: must be null without strategy=dp",
}


def test_what_exact_cannot_sum_in_order_is_refused(tmp_path):
    def body():
        said = {}
        for word in REFUSED:
            with pytest.raises(ConfigError) as error:
                fit(tmp_path, "task=tiny", "strategy=exact", word)
            said[word] = str(error.value)
        return said

    (said,) = on_ranks(1, body)
    assert [word for word in REFUSED if not said[word].startswith(REFUSED[word])] == []
    assert not any(tmp_path.iterdir())


def test_leaves_of_training_and_evaluation_belong_to_an_exact_run():
    assert {*Exact.of_the_run} == {"strategy.name", "data.micro_batch", "eval.micro_batch"}
    assert Strategy.of_the_run == ()
