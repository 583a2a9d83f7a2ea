"""run.norm_rows: BatchNorm over groups of the global batch, equal in any layout (law 12)."""

import copy
from functools import partial

import pytest
import torch
from harness import CONF, PARITY, check_parity, fit, fit_on, on_ranks, slow_but
from tiny import Tiny
from torch import nn

from trainer import load_config
from trainer.base.errors import ConfigError
from trainer.core.data.order import BatchPlan, BatchSplit, check_batch
from trainer.core.record.startup import describe_model
from trainer.core.state.sandbox import BufferCopies
from trainer.core.strategy.modules.batchnorm import SMALL_GROUP, normalize_groups, synchronize
from trainer.core.strategy.modules.running_statistics import RunningStatistics

GROUPS, ROWS = 4, 3
KINDS = {
    "1d": (nn.BatchNorm1d, (5,), torch.contiguous_format),
    "1d with length": (nn.BatchNorm1d, (5, 7), torch.contiguous_format),
    "2d": (nn.BatchNorm2d, (5, 4, 6), torch.contiguous_format),
    "2d channels_last": (nn.BatchNorm2d, (5, 4, 6), torch.channels_last),
    "2d large": (nn.BatchNorm2d, (16, 32, 32), torch.channels_last),
    "3d": (nn.BatchNorm3d, (5, 2, 3, 4), torch.contiguous_format),
    "3d channels_last": (nn.BatchNorm3d, (5, 2, 3, 4), torch.channels_last_3d),
}
OPTIONS = [{}, {"affine": False}, {"track_running_stats": False}, {"momentum": None}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_each_group_is_normalised_as_torch_does(kind, options):
    layer_type, sizes, memory_format = KINDS[kind]
    torch.manual_seed(0)
    plain = layer_type(sizes[0], **options).double()
    ours = copy.deepcopy(plain)
    normalize_groups(ours, ROWS)
    x = torch.randn(GROUPS * ROWS, *sizes, dtype=torch.float64) * 3 + 1
    assert (kind == "2d large") == (x.numel() > GROUPS * SMALL_GROUP)
    x = x.contiguous(memory_format=memory_format).requires_grad_()
    twin = x.detach().clone(memory_format=memory_format).requires_grad_()
    outputs = []
    statistics = []
    for group in twin.chunk(GROUPS):
        one = copy.deepcopy(plain)
        one.weight, one.bias = plain.weight, plain.bias
        outputs.append(one(group))
        statistics.append(dict(one.named_buffers()))
    output = ours(x)
    torch.testing.assert_close(output, torch.cat(outputs))
    assert output.is_contiguous(memory_format=memory_format)
    output.cos().sum().backward()
    torch.cat(outputs).cos().sum().backward()
    torch.testing.assert_close(x.grad, twin.grad)
    for one, other in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)
    for name, buffer in ours.named_buffers():
        mean = torch.stack([each[name] for each in statistics]).double().mean(0)
        torch.testing.assert_close(buffer.double(), mean)
    ours.eval()
    plain.load_state_dict(ours.state_dict())
    torch.testing.assert_close(ours(x), plain.eval()(x))


class WithReLU(nn.BatchNorm2d):
    def forward(self, input):
        return super().forward(input).relu()


class Named(nn.BatchNorm2d):
    def name(self):
        return f"{self.num_features} channels"


class ByFunction(nn.Module):
    def __init__(self, function, *sizes):
        super().__init__()
        self.function = function
        self.sizes = sizes

    def forward(self, x):
        x = x.unflatten(1, self.sizes) if self.sizes else x
        return self.function(x, None, None).flatten(1)


def convert(model, how):
    if how == "norm_rows":
        normalize_groups(model, 2)
    else:
        synchronize(model, None)


@pytest.mark.parametrize("how", ["norm_rows", "sync"])
def test_converted_layers_keep_their_class_methods_and_hooks(how):
    model = nn.Sequential(nn.BatchNorm1d(5), Named(5), nn.BatchNorm3d(5))
    hook = model[1].register_forward_hook(lambda *_: None)
    layers = list(model)
    convert(model, how)
    for layer, kind in zip(model, (nn.BatchNorm1d, Named, nn.BatchNorm3d), strict=True):
        assert isinstance(layer, kind)
    assert list(model) == layers
    assert model[1].name() == "5 channels" and hook.id in model[1]._forward_hooks


def test_the_start_advises_no_setting_that_refuses_the_models_layers():
    config = load_config(["task=tiny"], [CONF])
    (_, plain) = describe_model(config, nn.BatchNorm2d(5), False, accumulation=1)
    assert plain.endswith("; set run.norm_rows=11 or strategy.sync_batchnorm=true")
    (_, cut) = describe_model(config, nn.BatchNorm2d(5), False, accumulation=2)
    assert cut.endswith("number of ranks; set run.norm_rows=11")
    (_, own) = describe_model(config, WithReLU(5), False, accumulation=1)
    assert own.endswith("; use strategy=exact, which fixes the micro-batches")


@pytest.mark.parametrize("how", ["norm_rows", "sync"])
def test_layers_with_a_forward_pass_of_their_own_are_refused(how):
    given = "run.norm_rows=2" if how == "norm_rows" else "strategy.sync_batchnorm=true"
    own = (
        "with a forward pass of its own; use nn.BatchNorm2d, and the rest beside it, or "
        "strategy=exact instead"
    )
    patched = nn.BatchNorm2d(5)
    patched.forward = lambda x: x
    refused = {
        f"0 is a WithReLU {own}": WithReLU(5),
        f"0 is a BatchNorm2d {own}": patched,
        "0 is a LazyBatchNorm2d; use nn.BatchNorm2d": nn.LazyBatchNorm2d(),
    }
    if how != "norm_rows":
        why = "0 is a InstanceNorm2d, whose running statistics are not"
        refused[f"{why}; set track_running_stats=False"] = nn.InstanceNorm2d(
            5, track_running_stats=True
        )
    for line, layer in refused.items():
        with pytest.raises(ConfigError) as error:
            convert(nn.Sequential(layer), how)
        assert str(error.value) == f"{given}: {line}"


BATCH_NORM = partial(nn.functional.batch_norm, training=True)
FUNCTIONS = {
    "batch_norm": (ByFunction(BATCH_NORM), True),
    "frozen": (
        ByFunction(lambda x, *_: nn.functional.batch_norm(x, torch.zeros(16), torch.ones(16))),
        False,
    ),
    "instance_norm": (ByFunction(nn.functional.instance_norm, 4, 4), False),
    "InstanceNorm": (
        nn.Sequential(nn.Unflatten(1, (4, 4)), nn.InstanceNorm1d(4), nn.Flatten()),
        False,
    ),
}


class Functional(Tiny):
    def build_model(self):
        middle = FUNCTIONS[self.config.run.name][0]
        return nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), middle, nn.Linear(16, 3))


def test_batch_norm_by_a_function_is_refused_before_training(tmp_path):
    """Functions that normalise a row by itself are not."""

    def fits():
        lines = []
        for name in FUNCTIONS:
            for how in ("run.norm_rows=2", "strategy.sync_batchnorm=true"):
                if how != "run.norm_rows=2" and name != "batch_norm":
                    continue
                words = ("task=tiny", "run.steps=1", "data.global_batch=24", how)
                precision = "strategy.precision=fp32"
                try:
                    fit(tmp_path / how, *words, precision, f"run.name={name}", task=Functional)
                except ConfigError as error:
                    lines.append(str(error))
        return lines

    (lines,) = on_ranks(1, fits)
    why = "2 calls batch_norm, for the rows of a micro-batch; use a layer such as nn.BatchNorm2d"
    assert lines == [f"run.norm_rows=2: {why}", f"strategy.sync_batchnorm=true: {why}"]


def test_layer_that_is_called_twice_counts_twice_and_parts_of_examples_are_theirs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.BatchNorm1d(5)).double()
    ours = copy.deepcopy(model)
    calls = lambda m, x: m[1](m[1](m[0](x.flatten(0, 1))) * 2)  # noqa: E731
    ours.forward = lambda x: calls(ours, x)
    normalize_groups(ours, ROWS)
    x = torch.randn(GROUPS * ROWS, 7, 2, dtype=torch.float64)
    parts = torch.cat([calls(model, group) for group in x.chunk(GROUPS)])
    torch.testing.assert_close(ours(x), parts)
    assert ours[1].num_batches_tracked == 2
    with pytest.raises(ConfigError, match=r"got 70 rows for 10 examples; must be whole groups"):
        ours(x[:10])


def test_statistics_of_a_step_are_the_mean_over_its_micro_batches():
    model = nn.BatchNorm1d(2)
    statistics = RunningStatistics(rows=6)
    before = BufferCopies(model)
    batches = [torch.randn(4, 2), torch.randn(2, 2) + 3]
    model(batches[0])
    statistics.find(model, before)
    model.load_state_dict(model.state_dict() | before)
    statistics.begin()
    found = []
    for batch in batches:
        statistics.rewind()
        model(batch)
        found.append(model.running_mean.clone())
        statistics.note(batch, batch)
    statistics.write(statistics.read())
    torch.testing.assert_close(model.running_mean, found[0] * 4 / 6 + found[1] * 2 / 6)
    assert model.num_batches_tracked == 1
    statistics.undo(torch.ones(()))
    assert torch.equal(model.running_mean, torch.zeros(2))


RECIPE = [
    *("task=tiny", "task.options.norm=true", "task.options.dropout=0.2"),
    *("data.global_batch=24", "run.norm_rows=4", "optim.lr=0.3", *PARITY),
]
LAYOUTS = [
    pytest.param(2, [], marks=pytest.mark.slow),
    pytest.param(3, [], marks=pytest.mark.slow),
    (3, ["data.micro_batch=4"]),
    pytest.param(4, [], marks=pytest.mark.slow),
    pytest.param(1, ["data.micro_batch=4"], marks=pytest.mark.slow),
    pytest.param(
        *(1, ["data.micro_batch=8", "strategy=single", "strategy.precision=fp64"]),
        marks=pytest.mark.slow,
    ),
    (2, ["data.micro_batch=4", "data.path=streamed"]),
]


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return fit_on(1, tmp_path_factory.mktemp("one"), *RECIPE)


@pytest.mark.parametrize(("ranks", "overrides"), LAYOUTS, ids=str)
def test_run_with_batchnorm_and_dropout_is_the_same_in_any_layout(
    ranks, overrides, reference, tmp_path
):
    other = fit_on(ranks, tmp_path, *RECIPE, *overrides)
    check_parity(reference, other)
    assert other["weights"]["1.num_batches_tracked"] == 24


def test_ranks_and_micro_batches_take_whole_groups():
    plan = BatchPlan(1000, 240, check_batch(240, BatchSplit(10), 7), 7, 10)
    pieces = [piece for rank in range(7) for piece in plan.micro_batches(rank)]
    assert [first for first, _ in pieces[1:]] == [last for _, last in pieces[:-1]]
    assert {last - first for first, last in pieces} == {30, 40}
    assert check_batch(240, BatchSplit(10, 50), 2) == 50
    with pytest.raises(ConfigError) as error:
        check_batch(240, BatchSplit(30), 9)
    why = "must be at least 9 groups of 30 rows, one for each rank"
    assert str(error.value) == f"data.global_batch=240: {why}"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["run.norm_rows=4"],
            "data.global_batch=22: must be a multiple of run.norm_rows=4, such as 20 or 24; or give"
            " run.norm_rows=null",
        ),
        (
            ["run.norm_rows=2", "data.micro_batch=5"],
            "data.micro_batch=5: must be a multiple of run.norm_rows=2",
        ),
    ],
)
def test_norm_rows_that_do_not_divide_are_refused(words, line, command):
    code, _, err = command("--config-dir", CONF, "task=tiny", *words)
    assert code == 2
    assert f"error: {line}" in err.splitlines()


def test_syncbn_normalises_over_all_rows(command, tmp_path):
    words = ["task=tiny", "task.options.norm=true", "run.norm_rows=2", "run.steps=1"]
    for more, is_grouped in (([], True), (["strategy.sync_batchnorm=true"], False)):
        code, out, _ = command("--config-dir", CONF, *words, *more)
        assert code == 0
        assert ("BatchNorm over 2 rows" in out) == is_grouped


class Unfrozen(Tiny):
    """Task whose norm layer is frozen until step 6."""

    def build_model(self):
        model = super().build_model()
        model[1].eval().train = lambda mode=True: model[1]
        return model

    def train_step(self, batch):
        if self.step == 6:
            del self.model[1].train
            self.model[1].train()
        return super().train_step(batch)


UNFROZEN = {
    "ddp x 2": (2, ["strategy=ddp"]),
    "ddp x 1": (1, ["strategy=ddp", "data.micro_batch=4"]),
    "ddp x 3": (3, ["strategy=ddp", "data.micro_batch=4"]),
    "exact": (2, ["strategy=exact"]),
    "fsdp": (2, ["strategy=fsdp"]),
}


@pytest.mark.parametrize("case", slow_but(UNFROZEN, "ddp x 2"))
def test_statistics_that_change_later_are_combined_from_then_on(case, tmp_path):
    ranks, words = UNFROZEN[case]
    words = [*RECIPE, *words, "dist.drift_every_steps=4"]
    one = fit_on(1, tmp_path / "one", *RECIPE, task=Unfrozen)
    check_parity(one, fit_on(ranks, tmp_path / "two", *words, task=Unfrozen), falls=False)
    assert one["weights"]["1.num_batches_tracked"] == 24 - 6


def test_statistics_of_a_frozen_layer_keep_their_bits():
    model = nn.BatchNorm1d(2).eval()
    model.running_mean.copy_(torch.tensor([0.1, 1 / 3]))
    statistics = RunningStatistics(rows=9)
    before = BufferCopies(model)
    statistics.find(model, before)
    for is_training in (False, True):
        model.train(is_training)
        statistics.begin()
        for batch in torch.randn(3, 3, 2):
            statistics.rewind()
            model(batch)
            statistics.note(batch, batch)
        assert [len(value) for value in statistics.read()] == statistics.sizes
        statistics.write(statistics.read())
        is_same = all(torch.equal(b, before[name]) for name, b in model.named_buffers())
        assert is_same != is_training
    assert model.num_batches_tracked == 1


# Ranks and settings that cut a global batch of 24 rows, and the number of micro-batches
LAYOUTS = {
    "1 x 24": (1, [], 1),
    "4 x 6": (1, ["data.micro_batch=6"], 4),
    "2 ranks": (2, [], 1),
    "2 ranks x 2": (2, ["data.micro_batch=6"], 2),
}
OF_24 = ["task=tiny", "task.options.norm=true", "data.global_batch=24", "run.steps=4"]
SYNCBN = [*OF_24, "strategy.sync_batchnorm=true"]


class OfTorch(Tiny):
    """Task whose model has torch's SyncBatchNorm, which normalises on a CPU only in evaluation."""

    def build_model(self):
        return nn.Sequential(nn.SyncBatchNorm.convert_sync_batchnorm(super().build_model()))


def losses_or_line(path, words, task=None):
    try:
        return fit(path, *words, "log.every_steps=1", task=task)["losses"]
    except ConfigError as error:
        return str(error)


def test_syncbn_is_equal_in_layouts_or_refused(tmp_path):
    """The losses of 4 x 6 rows differed from those of 1 x 24 by 5e-2, under a line that nothing
    depends on the layout: no test of SyncBN had micro-batches, and the startup checks compare a few
    rows, which are one micro-batch on each rank."""
    results = {}
    for name, (ranks, cut, _) in LAYOUTS.items():
        results[name] = on_ranks(ranks, losses_or_line, tmp_path / name, [*SYNCBN, *cut])[0]
    for name, (_, cut, count) in LAYOUTS.items():
        if not cut:
            assert results[name] == pytest.approx(results["1 x 24"], rel=1e-12, abs=0)
            continue
        assert results[name] == (
            f"strategy.sync_batchnorm=true: BatchNorm sees one of {count} micro-batches at a time "
            "(data.micro_batch=6), so results depend on the layout; set data.micro_batch=null, "
            "use more ranks, or set run.norm_rows=6 without SyncBN; run.prove=warn trains all the "
            "same"
        )
        assert not (tmp_path / name / "tiny").exists()


def test_groups_of_rows_are_equal_in_the_layouts_that_syncbn_refuses(tmp_path):
    results = [
        on_ranks(ranks, losses_or_line, tmp_path / name, [*OF_24, "run.norm_rows=6", *cut])[0]
        for name, (ranks, cut, _) in LAYOUTS.items()
    ]
    for losses in results[1:]:
        assert losses == pytest.approx(results[0], rel=1e-12, abs=0)


def test_the_models_own_syncbn_is_refused_with_micro_batches(tmp_path):
    words = [*OF_24, "data.micro_batch=6"]
    (line,) = on_ranks(1, losses_or_line, tmp_path, words, OfTorch)
    assert line.startswith("nn.SyncBatchNorm: BatchNorm sees one of 4 micro-batches at a time")


@pytest.mark.companion("startup_checks")
@pytest.mark.parametrize("prove", ["warn", "false"])
def test_syncbn_with_micro_batches_is_reported_where_a_run_allows_it(command, prove):
    words = [*SYNCBN, "data.micro_batch=6", f"run.prove={prove}"]
    code, out, _ = command("--config-dir", CONF, *words)
    assert code == 0
    (line,) = [line for line in out.splitlines() if line.startswith("warning: strategy.sync")]
    assert "BatchNorm sees one of 4 micro-batches at a time (data.micro_batch=6)" in line
    proofs = [line for line in out.splitlines() if line.startswith("proof")]
    assert all("apart from BatchNorm, data" in line for line in proofs)
    assert len(proofs) == (prove == "warn")


def test_syncbn_trains_with_micro_batches_without_batchnorm_or_in_evaluation(tmp_path):
    plain = ["task=tiny", "data.global_batch=24", "run.steps=2", "strategy.sync_batchnorm=true"]
    (losses,) = on_ranks(1, losses_or_line, tmp_path / "plain", [*plain, "data.micro_batch=6"])
    assert losses.keys() == {1, 2}
    words = [*OF_24, "strategy.sync_batchnorm=true", "data.micro_batch=6"]
    (losses,) = on_ranks(1, losses_or_line, tmp_path / "frozen", words, Unfrozen)
    assert losses.keys() == {1, 2, 3, 4}
