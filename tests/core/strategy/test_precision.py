"""Every precision trains; the loss scale of fp16 is that of GradScaler, counts its skipped steps
and continues after a resume."""

import itertools
import re

import pytest
import torch
from harness import CONF, fit, fit_on, newest, on_ranks, slow_but
from harness.stored import plain_of, tensors_of
from tiny import Tiny
from torch import nn

from trainer import load_config
from trainer.core.checkpoints.run_directory import BAD_STEP
from trainer.core.engine.precision import Precision
from trainer.core.engine.step import step_unless

MLP = ["task=tiny", "optim.lr=0.3", "run.steps=30", "log.every_steps=1"]
HERE = torch.device("cpu")


LAYOUTS = {
    "single": (1, ["strategy=single"]),
    "dp": (1, ["strategy=dp"]),
    "ddp": (2, []),
    "parameter_server": (2, ["strategy.comm_hook=parameter_server"]),
    "syncbn": (2, ["strategy.sync_batchnorm=true", "task.options.norm=true"]),
}


PRECISIONS = ["fp64", "fp32", "amp_bf16", "amp_fp16", "bf16", "fp16"]


def cells(rows, columns):
    """Return all pairs; those that cover each row and each column once are default tests, the
    others are slow."""
    pairs = itertools.product(enumerate(rows), enumerate(columns))
    most = max(len(rows), len(columns))
    quick = {(n % len(rows), n % len(columns)) for n in range(most)}
    return [
        pytest.param(row, column, marks=([pytest.mark.slow] if (m, n) not in quick else []))
        for (m, row), (n, column) in pairs
    ]


@pytest.mark.parametrize(("name", "layout"), cells(PRECISIONS, list(LAYOUTS)))
def test_every_precision_trains_with_every_strategy(name, layout, tmp_path):
    """Loss and dtype in each cell; fit_on compares the ranks bit for bit."""
    ranks, overrides = LAYOUTS[layout]
    asked = [
        *overrides,
        f"strategy.precision={name}",
        "run.clip_norm=1.0",
        "task.options.weights=true",
    ]
    run = fit_on(ranks, tmp_path, *MLP, *asked)
    losses = [loss for loss in run["losses"].values() if loss is not None]
    assert len(losses) >= 20 and min(losses) < 0.9 * losses[0]
    dtype = {"fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}.get(
        name, torch.float32
    )
    assert run["weights"]["0.weight"].dtype == dtype


class OwnOptimizer(Tiny):
    is_fused = False

    def build_optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, fused=self.is_fused)


class Fused(OwnOptimizer):
    is_fused = True


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_sgd_steps_every_element_of_16_bits(name, tmp_path):
    """torch 2.13's fused SGD for CPUs leaves most of them as they are (pytorch/pytorch#191763)."""
    words = [*MLP, f"strategy.precision={name}", "optim.lr=0.3", "optim.momentum=0.9"]
    words += ["run.steps=4", "schedule=constant"]
    own = fit_on(1, tmp_path / "own", *words)["weights"]
    plain = fit_on(1, tmp_path / "plain", *words, task=OwnOptimizer)["weights"]
    assert all(torch.equal(own[key], plain[key]) for key in plain)
    with pytest.raises(AssertionError, match=r"SGD\(fused=True\) skips elements of 16 bits"):
        fit_on(1, tmp_path / "fused", *words, task=Fused)


@pytest.mark.parametrize("layout", slow_but(["tp", "pp", "zero1", "fsdp"], "pp"))
def test_sgd_of_16_bits_learns_in_divided_models_what_one_rank_learns(layout, tmp_path):
    words = ["task=meshed", "strategy.precision=bf16", "optim.lr=0.01", "run.steps=6"]
    one = fit_on(1, tmp_path / "one", *words, "strategy=single")["losses"]
    two = fit_on(2, tmp_path / "two", *words, f"strategy={layout}")["losses"]
    assert all(two[step] == pytest.approx(loss, rel=0.02) for step, loss in one.items())


class Averaged(Tiny):
    """Task that averages its weights in 32 bits, and compares the weights of evaluations."""

    average = None
    evaluated = 0

    def train_step(self, batch):
        if self.average is None:
            self.average = [p.detach().float() for p in self.model.parameters()]
        outcome = super().train_step(batch)
        self.last = [p.detach().clone() for p in self.model.parameters()]
        for mean, weight in zip(self.average, self.last, strict=True):
            mean.lerp_(weight.float(), 0.001)
        return outcome

    def metrics(self, outputs, targets):
        if self.average is not None and not self.model.training:
            type(self).evaluated = self.step
            for weight, mean in zip(self.model.parameters(), self.average, strict=True):
                assert torch.equal(weight, mean.to(weight.dtype))
        return {}


AVERAGED = [*MLP, "strategy.precision=bf16", "run.ema_decay=0.999", "run.steps=12"]
AVERAGED += ["optim.lr=0.01", "eval.every_steps=5"]


def test_moving_averages_of_16_bits_are_kept_in_32(tmp_path):
    """In 16 bits they would stay what they were."""
    run = fit(tmp_path, *AVERAGED, "strategy=single", task=Averaged)
    assert Averaged.evaluated == 12
    ema, model = (tensors_of(newest(run["directory"]), kind) for kind in ("ema", "model"))
    assert all(not torch.equal(mean, model[name].float()) for name, mean in ema.items())
    words = ["strategy=single", "run.steps=14", "run.resume=auto"]
    assert fit(tmp_path, *AVERAGED, *words)["step"] == 14


@pytest.mark.slow
def test_moving_averages_of_16_bits_are_those_of_one_rank_with_fsdp(tmp_path):
    one = fit_on(1, tmp_path / "one", *AVERAGED, "strategy=single")
    two = fit_on(2, tmp_path / "two", *AVERAGED, "strategy=fsdp")
    ours, theirs = (tensors_of(newest(run["directory"]), "ema") for run in (one, two))
    for name, mean in ours.items():
        assert mean.dtype == torch.float32
        torch.testing.assert_close(mean, theirs[name], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("name", "hook"), cells(["fp32", "amp_bf16", "amp_fp16"], ["fp16", "powersgd"])
)
def test_compressing_hooks_train_in_every_precision_with_float32_gradients(name, hook, tmp_path):
    run = fit_on(2, tmp_path, *MLP, f"strategy.comm_hook={hook}", f"strategy.precision={name}")
    assert min(loss for loss in run["losses"].values() if loss is not None) < 0.9 * run["losses"][1]


@pytest.mark.parametrize("name", slow_but(["bf16", "fp16"], "bf16"))
def test_weights_of_a_batch_are_exact_in_a_16_bit_model(name, tmp_path):
    """bfloat16 cannot represent 201 rows, so weights are reduced in float32."""
    words = [*MLP, "data.global_batch=201", f"strategy.precision={name}", "run.steps=2"]
    one = fit_on(1, tmp_path / "1", *words)
    three = fit_on(3, tmp_path / "3", *words)
    assert three["losses"][1] == pytest.approx(one["losses"][1], rel=1e-2)


class Overflowing(Tiny):
    """Task whose gradients overflow fp16 at a scale of 2**16, but not at 2**10."""

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3))

    def loss(self, outputs, targets):
        values, weights = (
            super().loss(outputs * 40, targets),
            torch.full_like(targets, 2.0, dtype=torch.float32),
        )
        return values, weights


@pytest.mark.parametrize("ranks", slow_but([1, 2], 1))
def test_overflow_is_skipped_counted_and_the_scale_resumes(ranks, tmp_path, capfd):
    recipe = [*MLP, "strategy.precision=amp_fp16", "optim.lr=0.001"]
    whole = fit_on(ranks, tmp_path / "whole", *recipe, task=Overflowing)
    why = "the scaled gradient is not finite, so the update was skipped"
    said = re.findall(rf"warning: step (\d+): {why}\n", capfd.readouterr().out)
    noted = {e["step"]: e[BAD_STEP] for e in whole["record"] if BAD_STEP in e}
    assert noted == {int(step): why for step in said} and len(noted) >= 3
    fit_on(ranks, tmp_path / "parts", *recipe, "run.steps=13", task=Overflowing)
    saved = plain_of(newest(tmp_path / "parts/tiny/run"))["precision"]
    assert saved["scale"] < 2.0**16 and saved["growth"] > 0
    parts = fit_on(ranks, tmp_path / "parts", *recipe, "run.resume=auto", task=Overflowing)
    assert (
        parts["losses"] == whole["losses"]
        and parts["metrics"] == whole["metrics"]
        and whole["step"] == 30
    )
    assert all(
        torch.equal(parts["weights"][name], tensor) for name, tensor in whole["weights"].items()
    )


def backward(precision, loss):
    loss.backward(precision.root(loss, 1.0))


def test_scale_is_that_of_grad_scaler():
    torch.manual_seed(0)
    ours, theirs = nn.Linear(3, 2), nn.Linear(3, 2)
    theirs.load_state_dict(ours.state_dict())
    precision, scaler = Precision("amp_fp16", HERE), torch.amp.GradScaler("cpu")
    mine = torch.optim.SGD(ours.parameters(), lr=0.1)
    other = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(8):
        rows = torch.randn(5, 3) * (float("inf") if step in (2, 5) else 1)
        backward(precision, ours(rows).square().mean())
        found_inf = precision.unscale([[p.grad for p in ours.parameters()]], None)
        step_unless([mine], found_inf)
        precision.update_scale(found_inf)
        scaler.scale(theirs(rows).square().mean()).backward()
        scaler.step(other)
        scaler.update()
        mine.zero_grad()
        other.zero_grad()
        assert precision.state_dict()["scale"] == scaler.get_scale()
    assert precision.state_dict()["growth"] == scaler._get_growth_tracker()
    assert all(
        torch.equal(a, b) for a, b in zip(ours.parameters(), theirs.parameters(), strict=True)
    )


def moved(name, folder):
    """Return how far one clipped step of SGD with learning rate 1 moves the weights."""
    words = [f"run.dir={folder}", f"run.name={name}", f"strategy.precision={name}"]
    step = ["run.steps=1", "run.clip_norm=0.05", "optim.lr=1", "optim.momentum=0"]
    task = Tiny(load_config(["task=tiny", *words, *step], [CONF]))
    task.fit()
    torch.manual_seed(task.config.run.seed)
    pairs = zip(task.model.parameters(), task.build_model().parameters(), strict=True)
    return torch.cat([(p.detach() - q.detach()).flatten() for p, q in pairs])


def test_clipping_comes_after_unscaling(tmp_path):
    plain, scaled = on_ranks(1, lambda: [moved(n, tmp_path) for n in ("fp32", "amp_fp16")])[0]
    assert torch.allclose(plain, scaled, rtol=1e-2, atol=1e-4)
    assert plain.norm() == pytest.approx(0.05, rel=1e-3)
