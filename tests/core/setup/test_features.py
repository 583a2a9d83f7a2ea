"""Optional features of a task: metrics that are not means, several updates per step, compilation,
images and traces."""

import json
import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from harness import CONF, PARITY, check_parity, ended, fit, fit_on, join, launch, on_ranks
from harness.training import compose
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import Tiny, points
from torch import nn
from torch.nn.functional import softplus

from trainer import ConfigError, ResidentDataset, Trainer, World, load_config
from trainer.core.distributed.launchers import Launcher
from trainer.core.strategy.modules.dry_run import FlopCounter, FrozenKept, uncounted

TINY = ["task=tiny", "optim.lr=0.3", *PARITY]


class Measured(Tiny):
    """Task with the area under the curve, which is not a mean of values."""

    def build_metrics(self, split):
        from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score

        return {"auroc": MulticlassAUROC(3), "f1": MulticlassF1Score(3)}

    def build_dataset(self, split):
        return ResidentDataset(
            *points(self.options.examples if split == "train" else self.examples, split)
        )


class Prepared(Tiny):
    """Its `prepare` notes the rank that it runs on."""

    def prepare(self):
        Path(self.config.run.dir, f"by-{self.world.rank}").touch()


def test_data_is_prepared_once_on_a_node(tmp_path):
    words = ["task=tiny", "run.steps=1", "eval.every_epochs=null"]
    fit_on(3, tmp_path, *words, task=Prepared)
    assert [path.name for path in tmp_path.rglob("by-*")] == ["by-0"]


def measured(examples):
    task = type("Task", (Measured,), {"examples": examples})(load_config(["task=tiny"], [CONF]))
    return task.evaluate()


@pytest.mark.parametrize(
    ("examples", "sizes"), [pytest.param(203, (1, 2, 3), marks=pytest.mark.slow), (4, (1, 3, 5))]
)
def test_torchmetrics_see_each_row_once_on_any_number_of_ranks(examples, sizes):
    """With 4 examples on 5 ranks, one rank has only padding."""
    pytest.importorskip("torchmetrics")
    found = [on_ranks(size, measured, examples) for size in sizes]
    for results in found:
        assert results == [pytest.approx(found[0][0], rel=1e-6)] * len(results)
    assert 0 < found[0][0]["eval/auroc"] <= 1 and set(found[0][0]) >= {"eval/loss", "eval/f1"}


class Unwritten(Trainer):
    pass


class NoSchedule(Tiny):
    def build_schedule(self, num_steps):
        return None


class NoOptimizer(Tiny):
    def build_optimizer(self, model):
        return (super().build_optimizer(model),)


class OptimizerAndSchedule(Tiny):
    def build_optimizer(self, model):
        optimizer = super().build_optimizer(model)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)


class MetricsFailOnRank0(Tiny):
    def metrics(self, outputs, targets):
        if self.world.rank == 0:
            raise KeyError("mine")
        return super().metrics(outputs, targets)


MISTAKES = [
    (Unwritten, "has no build_dataset(split); define it in the class"),
    (
        NoSchedule,
        "build_schedule returned a NoneType: must return one factor(step), a number, for all "
        "optimizers; for one alone, multiply its param_groups' lr in train_step",
    ),
    (NoOptimizer, "build_optimizer returned a tuple: must be an optimizer, or a list of them"),
    (
        OptimizerAndSchedule,
        "a tuple: must be an optimizer, or a list of them; return the schedule in build_schedule",
    ),
]


def fails(task, folder):
    with pytest.raises(Exception) as raised:
        fit(folder, "task=tiny", task=task)
    return type(raised.value).__name__, str(raised.value)


@pytest.mark.parametrize(("task", "told"), MISTAKES, ids=lambda case: getattr(case, "__name__", ""))
def test_mistake_in_a_method_is_one_line_that_names_it(task, told, tmp_path):
    for kind, line in on_ranks(2, fails, task, tmp_path):
        assert kind == "ConfigError" and line.endswith(told)


def test_metrics_that_fail_on_one_rank_end_all(tmp_path):
    told = on_ranks(2, fails, MetricsFailOnRank0, tmp_path)
    assert told == [
        ("KeyError", "'mine'"),
        ("RuntimeError", "rank 0 failed computing metrics: KeyError: 'mine'"),
    ]


class Pair(nn.Module):
    """Generator and discriminator; one forward returns the logits of real and generated images."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid())
        self.discriminator = nn.Sequential(nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))

    def forward(self, real, noise):
        fake = self.generator(noise)
        return self.discriminator(real).squeeze(1), self.discriminator(fake).squeeze(1), fake


class Gan(Tiny):
    """GAN of Goodfellow et al., arXiv:1406.2661, on the digits of scikit-learn: two losses and two
    optimizers in one step."""

    def build_model(self):
        return Pair()

    def build_dataset(self, split):
        from sklearn.datasets import load_digits

        digits = torch.tensor(load_digits().data, dtype=torch.float32) / 16
        return ResidentDataset(digits, torch.zeros(len(digits))) if split == "train" else None

    def augment(self, inputs, targets, random, train):
        return (inputs, random.normal("noise", 8)), targets

    def build_optimizer(self, model):
        parts = (model.discriminator, model.generator)
        return [
            torch.optim.Adam(part.parameters(), lr=0.002, betas=(0.5, 0.99), eps=1e-4)
            for part in parts
        ]

    def loss(self, outputs, targets):
        real, fake, _ = outputs
        return softplus(-real) + softplus(fake)

    def generator_loss(self, outputs, targets):
        return softplus(-outputs[1])

    def train_step(self, batch):
        discriminator, generator = self.optimizers
        judged = self.update(batch, optimizers=[discriminator])
        made = self.update(batch, self.generator_loss, [generator], name="generator")
        return join(judged, made)


GAN = ["task=tiny", *PARITY, "data.global_batch=100", "run.steps=50", "run.clip_norm=5"]


@pytest.fixture(scope="module")
def gan(tmp_path_factory):
    pytest.importorskip("sklearn")
    return fit_on(1, tmp_path_factory.mktemp("gan"), *GAN, task=Gan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (2, ["data.micro_batch=25"]),
        (2, []),
        (3, []),
    ],
)
def test_gan_is_the_same_run_on_any_layout(ranks, overrides, gan, tmp_path):
    other = fit_on(ranks, tmp_path, *GAN, *overrides, task=Gan)
    for run in (gan, other):
        run["seen"] = [sorted(step) for step in run["seen"]]  # each example once per update
    check_parity(
        {**gan, "metrics": {}}, other, falls=False
    )  # the losses of two adversaries need not fall
    assert min(gan["losses"].values()) < 0.9 * gan["losses"][1]
    generator = [entry["train/generator"] for entry in gan["record"] if "train/generator" in entry]
    assert len(generator) == 50 and generator[-1] > generator[0], (
        "the discriminator should have learned something"
    )


@pytest.mark.slow
def test_gan_learns_the_digits_mean(tmp_path):
    """After 400 steps the generated images look more like digits on average than at the start."""
    pytest.importorskip("sklearn")

    def distance(steps):
        task = Gan(
            load_config(
                [*GAN, f"run.dir={tmp_path}", f"run.steps={steps}", "strategy.precision=fp32"],
                [CONF],
            )
        )
        task.fit()
        with torch.no_grad():
            fake = task.model.generator(
                torch.randn(500, 8, generator=torch.Generator().manual_seed(0))
            )
        return float((fake.mean(0) - task.build_dataset("train").tensors[0].mean(0)).norm())

    before, after = on_ranks(1, lambda: (distance(1), distance(400)))[0]
    assert after < 0.6 * before


class Idle(Tiny):
    def train_step(self, batch):
        self.update(batch)


def test_step_that_returns_no_outcome_is_refused(tmp_path):
    def body():
        with pytest.raises(
            ConfigError,
            match=r"^train_step returned NoneType: end it with return self.update\(batch\)$",
        ):
            fit(tmp_path, *TINY, task=Idle)

    on_ranks(1, body)


class Crowded(Tiny):
    """Task that uses names which a framework might use; Lockstep uses none of them."""

    skipped = "mine"
    _session = _group = _writer = _engine = "mine"

    def _refuse(self, *arguments):
        raise AssertionError("a method of the user's was called")

    _log = _train = _fit = _finish = _evaluate = step_once = check = save = _refuse


def test_names_of_a_user_class_are_the_users_own(tmp_path):
    plain = fit_on(1, tmp_path / "plain", *TINY)
    crowded = fit_on(1, tmp_path / "crowded", *TINY, task=Crowded)
    assert crowded["losses"] == plain["losses"] and crowded["metrics"] == plain["metrics"]


class Compiled(Tiny):
    def fit(self):
        summary = super().fit()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
        return summary


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch reads it of a loss's inputs
def test_compiled_model_is_the_same_run_with_the_same_names(ranks, tmp_path):
    one = fit_on(1, tmp_path / "one", *TINY)
    compiled = fit_on(ranks, tmp_path / "compiled", *TINY, "run.compile=true", task=Compiled)
    check_parity(one, compiled, 1e-9, 1e-9)
    assert list(compiled["weights"]) == list(one["weights"])


PICTURED = """import torch
from tiny import Tiny
from torch import nn
from trainer import ResidentDataset

class Pictured(Tiny):
    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(0)
        return ResidentDataset(torch.rand(64, 3, 8, 8, generator=generator), torch.arange(64) % 3)

    def augment(self, inputs, targets, random, train):
        return inputs, targets

    def build_model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
"""


@pytest.mark.slow
def test_pictures_histograms_and_a_trace_are_written_when_asked_for(command, tmp_path):
    """Runs in a new process: the profiler of torch 2.10 does not start in a fork, and that of 2.12
    may crash there.
    """
    (tmp_path / "pictured.py").write_text(PICTURED)
    words = ("--config-dir", CONF, "task=tiny", "task.trainer=pictured.Pictured", "run.steps=8")
    asked = ("log.images=5", "log.histograms_every_steps=4", "log.profile_steps=[3,5]")
    code, _, err = ended(launch(tmp_path, *words, "run.name=looked", *asked))
    assert code == 0, err
    runs = tmp_path / "runs/tiny"
    board = runs / "looked/tensorboard"
    events = EventAccumulator(str(board), size_guidance={"images": 0, "histograms": 0}).Reload()
    (picture,) = events.Images("train/images")
    assert (picture.step, picture.width, picture.height) == (0, 8 * 5, 8)
    assert [e.step for e in events.Histograms("weights/1.weight")] == [4, 8]
    (trace,) = board.glob("*.pt.trace.json")
    assert "aten::addmm" in trace.read_text()
    assert command(*words, "run.name=plain").returncode == 0
    assert losses_of(runs / "plain") == losses_of(runs / "looked"), "looking changed the run"


def losses_of(directory):
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [entry["train/loss"] for entry in map(json.loads, lines) if "train/loss" in entry]


@pytest.mark.parametrize("given", ["[5]", "[5,5]", "[0,3]"])
def test_profile_steps_are_two_and_in_order(given):
    with pytest.raises(
        ConfigError, match=r"log.profile_steps=.*: must be \[<step to begin after>, <last step>\]"
    ):
        load_config(["task=tiny", f"log.profile_steps={given}"], [CONF])


def test_operations_of_the_model_are_counted(tmp_path):
    """The count is 2 x multiply-adds of every matrix product, forward and backward, without the
    gradient of the first layer's inputs."""

    def body():
        task = Tiny(load_config(["task=tiny", f"run.dir={tmp_path}"], [CONF]))
        summary = task.fit()
        return summary.flops_per_s / summary.examples_per_s

    macs = 4 * 16 + 16 * 3
    for found in on_ranks(2, body):
        assert math.isclose(found, 2 * (3 * macs - 4 * 16))


def test_operations_are_counted_while_another_thread_recomputes():
    def count() -> float:
        with FlopCounter() as counter:
            torch.ones(2, 3) @ torch.ones(3, 4)
        return counter.total

    with uncounted(), ThreadPoolExecutor(1) as pool:
        assert count() == 0
        assert pool.submit(count).result() == 2 * 2 * 3 * 4
    assert count() == 48


def test_launch_is_refused_under_a_launcher_and_without_ranks(tmp_path):
    config = compose(tmp_path, "task=tiny")
    world = World(world_size=2, local_world_size=2, launcher=Launcher("torchrun", {}))
    line = "launch: the ranks were already started by torchrun; call fit"
    with pytest.raises(ConfigError, match=f"^{line}$"):
        Tiny(config, world).launch(2)
    for ranks in (0, "2"):
        with pytest.raises(
            ConfigError, match=r"^launch\(ranks=.*: must be an integer of at least 1"
        ):
            Tiny(config).launch(ranks)


class Teacher(nn.Module):
    """Frozen layers that follow another one in each forward pass, each in a way of its own."""

    def __init__(self, width=600):
        super().__init__()
        self.layer = nn.Linear(width, width)
        layers = (nn.Linear(width, width).requires_grad_(False) for _ in range(7))
        self.frozen = nn.ModuleList(layers)

    def forward(self, x):
        new = self.layer.weight.detach()
        with torch.no_grad():
            self.frozen[0].weight.lerp_(new, 0.1)
            self.frozen[1].weight.data.mul_(0.5)
            torch._foreach_add_([self.frozen[2].weight], 1.0)
            torch.add(new, 1.0, out=self.frozen[3].weight)
        self.frozen[4].weight.data = new + 1
        self.frozen[5].weight.data = self.frozen[5].weight.data.bfloat16()
        return self.layer(x) + sum(each(x) for each in self.frozen if each.weight.dtype == x.dtype)


def test_frozen_weights_that_a_pass_writes_get_their_values_back():
    model = Teacher()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ZeroDivisionError), FrozenKept(model) as kept:
        model(torch.ones(2, 600)).sum().backward()
        for number, each in enumerate(model.frozen[:6]):
            there = before[f"frozen.{number}.weight"]
            assert each.weight.dtype != there.dtype or not torch.equal(each.weight, there)
        _ = 1 / 0
    assert kept.untouched == [model.frozen[6].weight] and kept.total > 0
    after = model.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
