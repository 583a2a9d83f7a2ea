"""Every strategy and switch trains the same run; those that change it, and unsupported ones, are
reported."""

import itertools

import pytest
import torch
from harness import (
    CONF,
    PARITY,
    check_equal_bits,
    check_parity,
    fit,
    fit_on,
    on_ranks,
    relative_distance,
)
from tiny import Tiny
from torch import nn
from torch.optim import SGD, Adam

from trainer import ConfigError, ResidentDataset, World, load_config
from trainer.core.setup.early_checks import check_layout
from trainer.core.strategy import find_name, find_strategy
from trainer.core.strategy.ddp import share_start
from trainer.core.strategy.modules.batchnorm import SyncBatchNorm, synchronize

TINY = ["task=tiny", "optim.lr=0.3", *PARITY]
NORM = [*TINY, "task.options.norm=true", "strategy.sync_batchnorm=true"]
EMA = [*TINY, "task.options.weights=true", "run.ema_decay=0.9", "eval.every_steps=12"]


class Two(Tiny):
    """Task with two optimizers of different kinds, each for a part of the parameters."""

    def build_optimizer(self, model):
        first, *others = model.parameters()
        return [Adam([first], lr=0.01, eps=1e-3), SGD(others, lr=0.3, momentum=0.9)]


class Pooled(Tiny):
    """Task with a convolutional net with average pooling, on images of 8 x 8."""

    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(int(split == "train"))
        images = torch.randn(203, 3, 8, 8, generator=generator)
        return ResidentDataset(images, (images.mean((1, 2, 3)) > 0).long())

    def augment(self, inputs, targets, random, train):
        return inputs, targets

    def build_model(self):
        pool, flat = nn.AvgPool2d(2), nn.Flatten()
        return nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.GELU(), pool, flat, nn.Linear(128, 3)
        )


class LooksAtImages(Pooled):
    """Task whose model tells the memory format of its inputs."""

    def build_model(self):
        model = super().build_model()
        model.register_forward_pre_hook(lambda _, inputs: FORMATS.add(inputs[0].stride()[1] == 1))
        return model


FORMATS = set()


def test_images_come_in_the_memory_format_of_the_model(tmp_path):
    def body(*words):
        FORMATS.clear()
        fit(tmp_path, *TINY, "run.steps=2", *words, task=LooksAtImages)
        return FORMATS

    assert on_ranks(1, body, "run.name=a") == [{False}]
    assert on_ranks(1, body, "run.name=b", "strategy.channels_last=true") == [{True}]


class Parted(Tiny):
    """Task that places the parts of its model on the rank's devices itself."""

    def build_model(self):
        assert len(self.world.devices) == 2
        first, second = self.world.devices
        return nn.Sequential(
            nn.Linear(4, 16, device=first), nn.GELU(), nn.Linear(16, 3, device=second)
        )


class Frozen(Tiny):
    """Task with a parameter that the loss does not depend on."""

    def build_model(self):
        model = super().build_model()
        model.register_parameter("spare", nn.Parameter(torch.ones(2)))
        return model


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    made = {}

    def get(task, *recipe):
        if (task, recipe) not in made:
            made[task, recipe] = fit_on(1, tmp_path_factory.mktemp("one"), *recipe, task=task)
        return made[task, recipe]

    return get


CELLS = {
    "dp": (1, None, TINY, ["strategy=dp", "strategy.precision=fp64"]),
    "parameter_server x 2": (2, None, TINY, ["strategy.comm_hook=parameter_server"]),
    "parameter_server x 3": (3, None, TINY, ["strategy.comm_hook=parameter_server"]),
    "syncbn x 2": (2, None, NORM, []),
    "syncbn x 3": (3, None, NORM, []),
    "ema x 2": (2, None, EMA, []),
    "ema x 3": (3, None, EMA, []),
    "zero1 x 2": (2, Two, [*TINY, "run.clip_norm=0.1"], ["strategy=zero1"]),
    "zero1 x 3": (3, None, EMA, ["strategy=zero1", "data.micro_batch=6"]),
    "two optimizers x 2": (2, Two, TINY, []),
    "two optimizers x 3": (3, Two, TINY, []),
    "small buckets": (2, None, TINY, ["strategy.bucket_mb=0.0001"]),
    "static graph": (2, None, TINY, ["strategy.static_graph=true", "data.micro_batch=6"]),
    "unused parameters": (
        2,
        Frozen,
        TINY,
        ["strategy.find_unused_parameters=true", "data.micro_batch=6"],
    ),
    "two devices per rank": (2, Parted, [*TINY, "strategy.devices_per_rank=2"], []),
    "channels_last": (2, Pooled, [*TINY, "optim.lr=0.1", "strategy.channels_last=true"], []),
    "clipping, linear rule": (
        2,
        None,
        [*TINY, "run.clip_norm=0.1", "run.lr_scaling=linear", "run.lr_batch=11"],
        [],
    ),
}


TWICE = ("parameter_server x 2", "syncbn x 2", "ema x 3", "two optimizers x 3", "static graph")
TWICE += ("zero1 x 3", "two devices per rank", "small buckets", "unused parameters")


@pytest.mark.parametrize(
    "cell",
    [pytest.param(cell, marks=([pytest.mark.slow] if cell in TWICE else [])) for cell in CELLS],
)
def test_run_does_not_depend_on_the_strategy(cell, references, tmp_path):
    ranks, task, recipe, overrides = CELLS[cell]
    check_parity(references(task, *recipe), fit_on(ranks, tmp_path, *recipe, *overrides, task=task))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_average_pooling_under_sgd_in_fp32_agrees_to_a_thousandth(ranks, references, tmp_path):
    recipe = [*TINY, "optim.lr=0.1", "strategy.precision=fp32"]
    check_parity(
        references(Pooled, *recipe), fit_on(ranks, tmp_path, *recipe, task=Pooled), 1e-3, 1e-3
    )


def test_plain_batchnorm_does_depend_on_the_number_of_ranks(references, tmp_path):
    recipe = [*TINY, "task.options.norm=true"]
    one, two = references(None, *recipe), fit_on(2, tmp_path, *recipe)
    assert abs(one["losses"][24] - two["losses"][24]) > 1e-6


def test_plain_and_synchronised_batchnorm_are_the_same_on_one_rank(references):
    one, other = references(None, *NORM), references(None, *TINY, "task.options.norm=true")
    assert one["losses"] == other["losses"]


@pytest.mark.slow
def test_ema_is_evaluated_and_restored(tmp_path):
    """A decay of 0 gives the weights themselves, 0.9 does not; a resume has the same bits, and
    evaluate uses them."""
    plain = fit_on(2, tmp_path / "plain", *TINY)
    none = fit_on(2, tmp_path / "none", *TINY, "run.ema_decay=0")
    assert none["metrics"] == plain["metrics"]
    whole = fit_on(2, tmp_path / "whole", *EMA)
    assert whole["metrics"] != fit_on(2, tmp_path / "off", *EMA, "run.ema_decay=null")["metrics"]
    fit_on(2, tmp_path / "parts", *EMA, "run.steps=15")
    parts = fit_on(2, tmp_path / "parts", *EMA, "run.resume=auto")
    assert parts["metrics"] == whole["metrics"]

    def evaluated():
        config = load_config([*EMA, f"run.resume={whole['directory']}"], [CONF])
        return Tiny(config).evaluate()

    assert on_ranks(1, evaluated)[0] == pytest.approx(whole["metrics"], rel=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("hook", ["fp16", "powersgd"])
def test_compressing_hook_trains_and_keeps_the_ranks_equal(hook, tmp_path):
    """fit_on compares the ranks.

    Weights and stop requests are reduced without compression, so the loss is exact.
    """
    recipe = [
        "task=tiny",
        "optim.lr=0.3",
        "strategy.precision=fp32",
        "run.steps=40",
        "task.options.weights=true",
    ]
    plain = fit_on(2, tmp_path / "plain", *recipe)
    run = fit_on(2, tmp_path / "hook", *recipe, f"strategy.comm_hook={hook}")
    losses = list(run["losses"].values())
    assert losses[-1] < 0.8 * losses[0]
    assert run["losses"] != plain["losses"] and run["losses"][5] == pytest.approx(
        plain["losses"][5], rel=1e-2
    )


def normalized(sizes, affine, dims):
    """Return forward, backward and running statistics of this rank's rows in Lockstep's layer;
    fp64."""
    rank = World.from_environment().rank
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(sum(sizes), 5, *dims, generator=generator, dtype=torch.float64) * 3 + 7
    factor = torch.randn(rows.shape, generator=generator, dtype=torch.float64)
    kind = {0: nn.BatchNorm1d, 2: nn.BatchNorm2d}[len(dims)]
    outcomes = []
    for synchronised in (True, False):
        layer = kind(5, affine=affine, momentum=0.3, dtype=torch.float64)
        torch.manual_seed(1)
        if affine:
            nn.init.normal_(layer.weight)
            nn.init.normal_(layer.bias)
        start = sum(sizes[:rank])
        part = slice(start, start + sizes[rank]) if synchronised else slice(None)
        model = nn.Sequential(layer)
        if synchronised:
            synchronize(model, None)
        assert isinstance(model[0], SyncBatchNorm) == synchronised
        inputs = rows[part].clone().requires_grad_()
        outputs = model(inputs)
        (outputs * factor[part]).sum().backward()
        gradients = [p.grad for p in layer.parameters()]
        if synchronised:
            for gradient in gradients:
                torch.distributed.all_reduce(gradient)
        whole = slice(start, start + sizes[rank]) if not synchronised else slice(None)
        kept = [
            outputs.detach()[whole],
            inputs.grad[whole],
            *gradients,
            layer.running_mean,
            layer.running_var,
        ]
        outcomes.append(kept)
    return max(relative_distance(a, b) for a, b in zip(*outcomes, strict=True))


def in_group(body, *arguments):
    from trainer.core.distributed.group import process_group

    config = load_config(["task=tiny"], [CONF])
    with process_group(config.dist, World.from_environment()):
        return body(*arguments)


@pytest.mark.parametrize("sizes", [(5, 3), (4, 1, 6)])
def test_synchronised_batchnorm_is_batchnorm_of_the_joined_batch(sizes):
    def each():
        cases = itertools.product([True, False], [(), (4, 3)])
        return max(normalized(sizes, affine, dims) for affine, dims in cases)

    assert max(on_ranks(len(sizes), in_group, each)) <= 1e-12


REFUSED = {
    "device_ids": (["strategy.device_ids=[0]"], 1, "strategy.device_ids=[0]: must be null without"),
    "dp x 2": (["strategy=dp"], 2, "strategy=dp: must be one process, and 2 ranks were started"),
    "dp syncbn": (
        ["strategy=dp", "strategy.sync_batchnorm=true"],
        1,
        "strategy.sync_batchnorm=true: is not supported by torch's Data",
    ),
    "dp parted": (
        ["strategy=dp", "strategy.devices_per_rank=2"],
        1,
        "strategy.devices_per_rank=2: is not supported by torch's Data",
    ),
    "bf16 hook": (
        ["strategy.comm_hook=bf16", "strategy.precision=fp32"],
        2,
        "strategy.comm_hook=bf16: needs",
    ),
    "fp64 hook": (
        ["strategy.comm_hook=fp16"],
        2,
        "strategy.comm_hook=fp16: compresses float32 gradients",
    ),
    "fp16 hook": (
        ["strategy.comm_hook=fp16", "strategy.precision=fp16"],
        2,
        "strategy.comm_hook=fp16: compresses float32 gradients",
    ),
    "powersgd hook": (
        ["strategy.comm_hook=powersgd", "strategy.precision=bf16"],
        2,
        "strategy.comm_hook=powersgd: compresses float32 gradients",
    ),
    "single hook": (
        ["strategy=single", "strategy.comm_hook=fp16"],
        1,
        "strategy.comm_hook=fp16: strategy=single",
    ),
    "tf32": (["strategy.precision=tf32"], 1, "strategy.precision=tf32: needs a CUDA GPU"),
    "name": (["strategy.name=zero"], 1, "strategy.name=zero: must be one of"),
    "rule": (["run.lr_scaling=linear"], 1, "run.lr_scaling=linear: give run.lr_batch"),
    "batch": (
        ["run.lr_batch=10"],
        1,
        "run.lr_scaling=none: must be linear or sqrt if run.lr_batch is given",
    ),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is refused without a GPU")
@pytest.mark.parametrize("cell", REFUSED)
def test_unsupported_combination_is_refused(cell, tmp_path):
    overrides, ranks, line = REFUSED[cell]

    def refused():
        with pytest.raises(ConfigError) as error:
            fit(tmp_path, "task=tiny", *overrides)
        return str(error.value)

    for said in on_ranks(ranks, refused):
        assert said.startswith(line), said
    assert not any(tmp_path.iterdir())


def test_parameter_without_gradient_is_named(tmp_path):
    def refused():
        with pytest.raises(ConfigError) as error:
            fit(tmp_path, *TINY, task=Frozen)
        return str(error.value)

    for said in on_ranks(2, refused):
        assert said.startswith(
            "strategy=ddp: the loss does not depend on the parameter spare; use it"
        )


def test_start_prints_what_the_strategy_does(tmp_path, capfd):
    recipe = ["task=tiny", "strategy.precision=fp32", "run.steps=2"]
    fit_on(1, tmp_path / "dp", *recipe, "strategy=dp")
    assert "\nwithout a GPU, dp runs as strategy=single\n" in capfd.readouterr().out
    hook = [*recipe, "strategy.comm_hook=powersgd", "strategy.sync_batchnorm=true"]
    fit_on(2, tmp_path / "hook", *hook)
    said = capfd.readouterr().out
    assert "2 ranks on 1 node, CPU, fp32, SyncBN, comm hook powersgd, " in said
    remark = "PowerSGD starts with an empty error memory, so this resume is not exact"
    assert remark not in said
    fit_on(2, tmp_path / "hook", *hook, "run.resume=auto", "run.steps=3")
    assert remark in capfd.readouterr().out
    fit_on(2, tmp_path / "hook", *recipe, "run.resume=auto", "run.steps=4")
    assert remark not in capfd.readouterr().out


def test_checks_need_no_group():
    config = load_config(["task=tiny", "strategy=ddp_syncbn_amp"], [CONF])
    check_layout(config, World())
    assert config.strategy.name == "ddp" and config.strategy.sync_batchnorm


def test_preset_that_is_asked_for_wins_over_the_task():
    given = ["task=tiny", "strategy=ddp_syncbn_amp"]
    assert load_config(["task=tiny"], [CONF]).strategy.precision == "fp64"
    assert load_config(given, [CONF]).strategy.precision == "amp_bf16"
    assert load_config([*given, "strategy.precision=fp32"], [CONF]).strategy.precision == "fp32"


def test_a_resume_with_another_strategy_keeps_what_belongs_to_the_run(tmp_path):
    words = ["task=tiny", "run.steps=2", "strategy=single", "strategy.sync_batchnorm=false"]
    run = fit_on(1, tmp_path, *words)["directory"]
    place = f"run.resume={run}"
    assert load_config([place, "strategy=fsdp"], [CONF]).strategy.precision == "fp64"
    assert load_config([place, "strategy=fsdp"], [CONF]).strategy.mesh.shard == "auto"
    assert load_config([place, "strategy=ddp_syncbn_amp"], [CONF]).strategy.precision == "amp_bf16"
    fp32 = [place, "strategy=ddp", "strategy.precision=fp32"]
    assert load_config(fp32, [CONF]).strategy.precision == "fp32"


def test_a_subclass_of_ddp_does_not_become_another_strategy_on_a_mesh():
    divided = ["strategy.mesh.shard=2"]
    for strategy, stands_in in (("ddp", "parallel"), ("zero1", "zero1")):
        settings = load_config([*TINY, f"strategy={strategy}", *divided], [CONF]).strategy
        assert find_name(settings) == stands_in


def test_the_start_names_a_strategy_as_its_setting_does():
    """A class may move to another file: what a user reads is the setting, or its stand-in."""
    names = {}
    for strategy in ("ddp", "fsdp", "zero1", "exact", "tp"):
        settings = load_config([*TINY, f"strategy={strategy}"], [CONF]).strategy
        names[strategy] = find_name(settings)
        assert find_strategy(settings).__name__ != names[strategy]
    assert names == {**{name: name for name in ("ddp", "fsdp", "zero1", "exact")}, "tp": "parallel"}


class Built(Tiny):
    def build_model(self):
        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3), Scaled())
        if self.world.rank and self.is_other:
            nn.init.constant_(model[1].bias, 7.0)
            model[2].factors.fill_(9.0)
            model[2].places += 1
        return model

    is_other = False


class BuiltByRank(Built):
    is_other = True


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("factors", torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
        self.register_buffer("places", torch.tensor([3, 1, 2, 0]), persistent=False)

    def forward(self, x):
        return x * self.factors[self.places[:3]]


def seed_by_rank(folder):
    """Train a task whose ranks build a bias and two buffers differently; return the losses, and the
    sizes of the tensors that are sent."""
    sent = []
    broadcast = torch.distributed.broadcast

    def count(tensor, *arguments, **named):
        sent.append(tensor.numel())
        return broadcast(tensor, *arguments, **named)

    def share(module, device):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torch.distributed.broadcast", count)
            share_start(module, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(f"{share_start.__module__}.share_start", share)
        found = fit(folder, "task=tiny", "strategy=ddp", "run.steps=2", task=BuiltByRank)
    return found["losses"], sent


def test_ddp_sends_at_its_start_only_what_ranks_have_built_differently(tmp_path):
    """No test had a buffer among it."""
    (losses, sent), (_, received) = on_ranks(2, seed_by_rank, tmp_path / "other")
    assert sent == received == [3 * 8, 5 * 8, 4 * 8], "in bytes"
    words = ("task=tiny", "strategy=ddp", "run.steps=2")
    assert losses == fit_on(2, tmp_path / "one", *words, task=Built)["losses"]


def count_reductions(folder, *words):
    """Return how often gradients are reduced in three steps and before them, and the losses."""
    calls = []
    reduce = torch.distributed.reduce

    def count(*arguments, **named):
        calls.append(arguments)
        return reduce(*arguments, **named)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch.distributed.reduce", count)
        own = ["run.steps=3", "log.every_steps=1", "strategy.comm_hook=parameter_server"]
        return fit(folder, "task=tiny", *own, *words)["losses"], len(calls)


def test_gradients_of_several_micro_batches_are_reduced_once(tmp_path):
    (losses, count), _ = on_ranks(2, count_reductions, tmp_path / "1")
    (others, more), _ = on_ranks(2, count_reductions, tmp_path / "4", "data.micro_batch=3")
    assert more == count and 3 <= count <= 8
    assert others == pytest.approx(losses, rel=1e-12)


class Wide(Tiny):
    def build_model(self):
        return nn.Sequential(nn.Linear(4, 301), nn.Tanh(), nn.Linear(301, 64), nn.Linear(64, 3))


def test_on_three_ranks_a_resumed_run_has_the_bits_of_a_straight_one(tmp_path):
    """DDP orders its buckets anew after the first backward, which changes the order of sums."""
    words = ["task=tiny", "strategy=ddp", "strategy.precision=fp32", "strategy.bucket_mb=0.01"]
    words += ["data.global_batch=24", "eval.every_epochs=null", "optim.lr=0.1"]
    words.append("schedule=constant")
    straight = fit_on(3, tmp_path / "straight", *words, "run.steps=4", task=Wide)
    resumed = tmp_path / "resumed"
    fit_on(3, resumed, *words, "run.steps=2", task=Wide)
    more = fit_on(3, resumed, *words, "run.steps=4", "run.resume=auto", task=Wide)
    check_equal_bits(straight, more)


def test_a_hook_compresses_gradients_on_one_rank_too_and_never_weights(tmp_path):
    """The weight of this batch is more than float16 can hold."""

    class Heavy(Tiny):
        def loss(self, outputs, targets):
            values, weights = super().loss(outputs, targets)
            return values, 5e3 * weights

    words = ["task=tiny", "task.options.weights=true", "strategy.precision=fp32", "run.steps=4"]
    words += ["log.every_steps=1", "optim.lr=0.1"]
    hook = [*words, "strategy.comm_hook=fp16"]
    plain = fit_on(1, tmp_path / "plain", *words, task=Heavy)["losses"]
    for ranks in (1, 2):
        found = fit_on(ranks, tmp_path / str(ranks), *hook, task=Heavy)["losses"]
        assert found == pytest.approx(plain, rel=1e-2)
        assert found[4] != pytest.approx(plain[4], rel=1e-7), "gradients are compressed"


class WiderOnOne(Tiny):
    def build_model(self):
        return nn.Sequential(nn.ZeroPad1d((0, self.world.rank)), nn.LazyLinear(3))


def test_lazy_layers_of_other_widths_on_some_ranks_are_one_line(tmp_path):
    def refused():
        with pytest.raises(ConfigError, match="buffers have other shapes or dtypes on some ranks"):
            fit(tmp_path, "task=tiny", "strategy=ddp", "run.prove=false", task=WiderOnOne)

    on_ranks(2, refused)
