"""A mean carries its weight: values that a loss may return, and sums over ranks, micro-batches and
resumes."""

import io
import math

import numpy
import pytest
import torch
import torch.distributed as dist
from harness import CONF, on_ranks

from trainer import load_config
from trainer.base.errors import ConfigError
from trainer.core.data.order import Leaves
from trainer.core.distributed.group import Group, process_group
from trainer.core.distributed.world import World
from trainer.core.engine import objective as objectives
from trainer.core.engine.means import Means
from trainer.core.engine.objective import Objective, UpdateLoss
from trainer.core.engine.values import sum_up, weigh
from trainer.core.micro_batch import count_rows

ALONE = Group(World(), dist.HashStore())
STEPS = 7


def share(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and weights of one rank at one step; each rank has another number of rows."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    values = torch.rand(3 + 2 * rank + step, 4, dtype=torch.float64, generator=generator)
    return values, torch.rand(values.shape, dtype=torch.float64, generator=generator)


def count(means: Means, rank: int, steps: range) -> None:
    """Count two micro-batches per step: plain values, and values with weights."""
    for step in steps:
        values, weights = share(step, rank)
        for part in (slice(0, 2), slice(2, None)):
            means.add("plain", values[part], None)
            means.add("weighted", values[part], weights[part])
        means.end_row()


def in_group(ranks: int, body) -> list:
    config = load_config(["task=tiny"], [CONF]).dist

    def on_rank():
        with process_group(config, World.from_environment()) as group:
            return body(group, group.world.rank)

    return on_ranks(ranks, on_rank)


def mean_of(*values: float, weights: torch.Tensor | None = None) -> float:
    means = Means()
    means.add("value", torch.tensor(values), weights)
    return means.read(ALONE)["value"]


# Return values ------------------------------------------------------------------------------------


def test_scalar_is_refused_naming_the_reduction():
    text = (
        r'^loss returned a scalar: must be a value per example; use reduction="none", and '
        r"leave out \.mean\(\) and \.item\(\)$"
    )
    with pytest.raises(ConfigError, match=text):
        weigh("loss", torch.tensor(1.0), 4)
    with pytest.raises(ConfigError, match=r'^loss returned a float: .* use reduction="none"'):
        weigh("loss", 1.0, 4)


@pytest.mark.parametrize(("values", "given"), [(None, "None"), (numpy.ones(4), "a numpy array")])
def test_what_is_no_tensor_is_refused_by_name(values, given):
    line = f"^loss returned {given}: must be a tensor with a value per example$"
    with pytest.raises(ConfigError, match=line):
        weigh("loss", values, 4)


def test_first_axis_other_than_the_batch_is_refused():
    text = (
        r"^accuracy returned values of shape \(3, 2\): the first axis must be the 4 examples "
        r"of the batch$"
    )
    with pytest.raises(ConfigError, match=text):
        weigh("accuracy", torch.ones(3, 2), 4)


def test_weights_of_another_shape_are_refused():
    text = (
        r"^loss returned weights with shape \(4,\): must be detached and of the values' "
        r"shape \(4, 2\)$"
    )
    with pytest.raises(ConfigError, match=text):
        weigh("loss", (torch.ones(4, 2), torch.ones(4)), 4)


def test_weights_with_a_gradient_are_refused():
    text = (
        r"^loss returned weights with a gradient: must be detached and of the values' shape \(4,\)$"
    )
    with pytest.raises(ConfigError, match=text):
        weigh("loss", (torch.ones(4), torch.ones(4, requires_grad=True)), 4)


def test_values_of_16_bits_are_counted_in_32():
    for dtype in (torch.bfloat16, torch.float16):
        assert weigh("loss", torch.ones(4, dtype=dtype), 4)[0].dtype == torch.float32
    assert weigh("loss", torch.ones(4, dtype=torch.float64), 4)[0].dtype == torch.float64


def test_rows_are_those_of_the_first_tensor_with_a_batch_axis():
    assert count_rows({"a": torch.tensor(1.0), "b": torch.ones(5, 2)}, torch.ones(6)) == 5
    assert count_rows(None, torch.ones(6)) == 6
    with pytest.raises(
        ConfigError,
        match=r"^neither targets nor outputs contain a tensor with a batch axis; one must$",
    ):
        count_rows(None, torch.tensor(1.0))


# Means --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_mean_over_ranks_is_the_mean_over_the_joined_data(ranks):
    def body(group, rank):
        means = Means()
        count(means, rank, range(STEPS))
        return means.read(group)

    parts = [share(step, rank) for step in range(STEPS) for rank in range(ranks)]
    values, weights = (
        torch.cat(tensors).flatten().tolist() for tensors in zip(*parts, strict=True)
    )
    products = math.fsum(value * weight for value, weight in zip(values, weights, strict=True))
    expected = {"plain": math.fsum(values) / len(values), "weighted": products / math.fsum(weights)}
    for means in in_group(ranks, body):
        assert means.keys() == expected.keys()
        for name, value in expected.items():
            assert abs(means[name] - value) <= 1e-15 * value


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_interrupted_mean_has_the_bits_of_an_uninterrupted_one(ranks):
    def body(group, rank):
        through, before, after = Means(), Means(), Means()
        count(through, rank, range(STEPS))
        count(before, rank, range(3))
        buffer = io.BytesIO()
        torch.save(before.reduced(group), buffer)
        buffer.seek(0)
        after.load(torch.load(buffer, weights_only=True))
        for means in (before, after):
            count(means, rank, range(3, STEPS))
        return [means.read(group) for means in (through, before, after)]

    for through, saved, resumed in in_group(ranks, body):
        assert saved == through and resumed == through


def test_mean_does_not_depend_on_how_often_it_is_saved():
    once, often = Means(), Means()
    for means in (once, often):
        for step in range(STEPS):
            count(means, 0, range(step, step + 1))
            if means is often:
                means.reduced(ALONE)
                means.reduced(ALONE)
    assert often.read(ALONE) == once.read(ALONE)


def test_rows_saved_on_two_ranks_resume_on_one_without_counting_twice():
    def body(group, rank):
        means = Means()
        means.add("value", torch.tensor([1.0, 2.0]) + 10 * rank, None)
        return means.reduced(group)

    rows = in_group(2, body)
    assert torch.equal(rows[0]["value"], rows[1]["value"])
    means = Means()
    means.load(rows[0])
    means.add("value", torch.tensor([4.0]), None)
    assert means.read(ALONE) == {"value": (1 + 2 + 11 + 12 + 4) / 5}


def test_loaded_rows_replace_what_was_counted():
    means = Means()
    means.add("value", torch.tensor([9.0]), None)
    means.end_row()
    means.load({"value": torch.tensor([[3.0, 2.0]], dtype=torch.float64)})
    assert means.read(ALONE) == {"value": 1.5}


def test_reading_begins_a_new_mean():
    means = Means()
    means.add("value", torch.tensor([1.0]), None)
    means.read(ALONE)
    assert means.read(ALONE) == {}
    means.add("value", torch.tensor([5.0]), None)
    assert means.read(ALONE) == {"value": 5.0}


def test_values_are_summed_in_fp64():
    assert mean_of(*[0.1] * 1000) == pytest.approx(float(torch.tensor(0.1)), rel=1e-15)


def test_mean_without_weight_is_nan():
    assert math.isnan(mean_of(1.0, 2.0, weights=torch.zeros(2)))
    assert mean_of(1.0, 2.0, weights=torch.tensor([0.0, 0.5])) == 2.0


def test_metric_of_no_rows_counts_nothing():
    values = torch.tensor([7.0, 8.0])
    means = Means()
    means.add("value", values[:0], None)
    assert math.isnan(means.read(ALONE)["value"])
    for part, weights in [(values[:0], None), (values[:1], None), (values[:0], values[:0])]:
        means.add("value", part, weights)
    assert means.read(ALONE) == {"value": 7.0}


@pytest.mark.parametrize(
    "pair", [(math.inf, -math.inf), (1.5e308, 1.5e308)], ids=["both infinities", "overflow"]
)
def test_non_finite_means_are_read_without_an_error(pair):
    means = Means()
    for value in pair:
        means.add("value", torch.tensor([value], dtype=torch.float64), None)
        means.end_row()
    assert not math.isfinite(means.read(ALONE)["value"])


def test_counted_values_keep_no_graph():
    values = torch.ones(3, requires_grad=True)
    means = Means()
    means.add("value", values * 2, values.detach())
    assert not means.reduced(ALONE)["value"].requires_grad


# The loss -----------------------------------------------------------------------------------------


def made(loss, global_batch: int = 4, ranks: int = 1, wants_stop=bool) -> UpdateLoss:
    objective = Objective("loss", Means(), global_batch, ranks, wants_stop=wants_stop)
    return objective.of(loss)


def outputs_of(*shape):
    return torch.ones(shape, requires_grad=True)


def plain(outputs, targets):
    return outputs * targets


def weighted(outputs, targets):
    return outputs * targets, targets


def test_gradient_of_plain_values_is_that_of_their_mean():
    outputs, targets = (
        torch.rand(4, 3, dtype=torch.float64, requires_grad=True),
        torch.rand(4, 3, dtype=torch.float64),
    )
    objective = made(plain)
    for part in (slice(0, 1), slice(1, None)):
        (objective(outputs[part], targets[part])[0] * objective.scale).backward()
    assert objective.objective.factor(torch.zeros(2)) is None
    torch.testing.assert_close(outputs.grad, targets / 12, rtol=1e-15, atol=0)


def test_gradient_of_weighted_values_is_that_of_their_mean():
    outputs, targets = (
        torch.rand(4, 3, dtype=torch.float64, requires_grad=True),
        torch.rand(4, 3, dtype=torch.float64),
    )
    objective = made(weighted)
    totals = torch.zeros(2, dtype=torch.float64)
    for part in (slice(0, 1), slice(1, None)):
        total, carried = objective(outputs[part], targets[part])
        (total * objective.scale).backward()
        totals += carried
    torch.testing.assert_close(
        outputs.grad * objective.objective.factor(totals),
        targets**2 / targets.sum(),
        rtol=1e-14,
        atol=0,
    )


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_targets_of_other_rows_are_refused_also_where_values_were_checked_before(rows):
    """Values of a form that was checked take a short way, in which targets are looked at too."""
    objective = made(lambda outputs, targets: outputs)
    for _ in range(2):  # the second one takes it
        objective(outputs_of(4), torch.ones(4))
    with pytest.raises(ConfigError, match=f"the first axis must be the {rows} examples"):
        objective(outputs_of(4), torch.ones(rows))


def test_backward_is_scaled_by_the_ranks_that_will_average():
    outputs, targets = torch.rand(4, requires_grad=True), torch.rand(4)
    one, three = made(plain, ranks=1), made(plain, ranks=3)
    assert torch.equal(one(outputs, targets)[0], three(outputs, targets)[0])
    assert three.scale == pytest.approx(3 * one.scale)


def test_request_to_stop_is_reduced_with_the_weight():
    for loss, weight in [(plain, 12.0), (weighted, 24.0)]:
        asked: list[bool] = []
        objective = made(loss, wants_stop=lambda asked=asked: bool(asked))
        arguments = (outputs_of(4, 3), torch.full((4, 3), 2.0))
        first = objective(*arguments)[1].tolist()
        asked.append(True)
        assert [first, objective(*arguments)[1].tolist()] == [[weight, 0.0], [weight, 1.0]]


@pytest.mark.parametrize("order", [[plain, weighted], [weighted, plain]])
def test_change_between_weighted_and_plain_is_refused(order):
    losses = iter(order)
    objective = made(lambda outputs, targets: next(losses)(outputs, targets))
    objective(outputs_of(4), torch.ones(4))
    text = (
        r"^loss returned weights in one step and none in another: always return "
        r"\(values, weights\), or never$"
    )
    with pytest.raises(ConfigError, match=text):
        objective(outputs_of(4), torch.ones(4))


def test_changing_number_of_values_per_example_is_refused():
    objective = made(plain)
    objective(outputs_of(4, 3), torch.ones(4, 3))
    text = (
        r"^loss returned 2 values per example after 3: return \(values, weights\), so that "
        r"each value counts equally$"
    )
    with pytest.raises(ConfigError, match=text):
        objective(outputs_of(4, 2), torch.ones(4, 2))


def test_weighted_values_may_change_their_number():
    objective = made(weighted)
    first, scale = objective(outputs_of(4, 3), torch.ones(4, 3))[0], objective.scale
    second = objective(outputs_of(4, 2), torch.ones(4, 2))[0]
    assert second.item() == pytest.approx(first.item() * 2 / 3)
    assert objective.scale == scale


# What is decided once -----------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [plain, weighted])
def test_values_of_one_form_are_checked_once(loss, monkeypatch):
    """Of (values, weights) each micro-batch was checked: no test counted the checks."""
    checked = []

    def counted(*arguments):
        checked.append(arguments)
        return weigh(*arguments)

    monkeypatch.setattr(objectives, "weigh", counted)
    objective = made(loss)
    targets = torch.rand(4, 3)
    totals = [objective(outputs_of(4, 3), targets) for _ in range(5)]
    assert len(checked) == 1
    assert all(torch.equal(total, totals[0][0]) for total, _ in totals)
    assert all(torch.equal(carried, totals[0][1]) for _, carried in totals)
    objective(outputs_of(3, 3), targets[:3])
    objective(outputs_of(3, 3).double(), targets[:3].double())
    assert len(checked) == 3, "values of another form are checked"


ROWS = "the first axis must be the 3 examples of the batch"
LATER = {
    "fewer targets": (lambda out, y: out * 1, (4, 3), ROWS),
    "fewer targets of weights": (lambda out, y: (out * 1, torch.ones(4)), (4, 3), ROWS),
    "detached": (lambda out, y: out.detach(), (4, 4), "loss returned float32 values without a"),
    "detached of weights": (
        lambda out, y: (out.detach(), y),
        (4, 4),
        "loss returned float32 values without a",
    ),
    "weights with a gradient": (
        lambda out, y: (out * y, out * 1),
        (4, 4),
        "weights with a gradient: must be detached",
    ),
    "weights of another shape": (
        lambda out, y: (out * y, y[:, None]),
        (4, 4),
        r"weights with shape \(4, 1\): must be detached and of the values' shape \(4,\)",
    ),
    "no weights": (lambda out, y: out * y, (4, 4), "weights in one step and none in another"),
    "three": (lambda out, y: (out, y, y), (4, 4), "loss returned a tuple of 3"),
    "a list": (lambda out, y: [out, y], (4, 4), "loss returned a list: must be a value per"),
    "sparse": (lambda out, y: out.to_sparse(), (4, 4), "loss returned values in a sparse"),
}


@pytest.mark.parametrize("name", LATER)
def test_a_loss_that_is_wrong_in_a_later_update_is_one_line(name):
    """Also where its values have the form of those that were checked."""
    later, (rows, examples), line = LATER[name]
    is_weighted = isinstance(later(outputs_of(4), torch.ones(4)), tuple) or name == "no weights"
    losses = iter([weighted if is_weighted else plain, later])
    objective = made(lambda outputs, targets: next(losses)(outputs, targets))
    objective(outputs_of(4), torch.ones(4))
    with pytest.raises(ConfigError, match=line):
        objective(outputs_of(rows), torch.ones(examples))


def test_a_resumed_objective_keeps_the_elements_per_example():
    """The factor of weighted values is rounded, so it must be that of the run's first batch."""
    objective = Objective("loss", Means(), 4, 1, elements=3).of(weighted)
    objective(outputs_of(4, 5), torch.ones(4, 5))
    assert objective.objective.elements == 3
    assert objective.scale == 1 / 12


def test_weights_may_be_zero_and_not_negative():
    objective = made(lambda outputs, targets: (outputs * 1, targets))
    objective(outputs_of(4), torch.tensor([0.0, 1.0, 0.0, 2.0]))
    with pytest.raises(ConfigError, match=r"^loss returned a weight of -0.5: must be at least 0"):
        made(weighted)(outputs_of(4), torch.tensor([0.0, 1.0, -0.5, 2.0]))
    means = Means()
    weights = torch.tensor([1.0, 2.0**-40], dtype=torch.float64)
    means.add("value", torch.tensor([1.0, 1.0], dtype=torch.float64), weights)
    assert means.reduced(ALONE)["value"].tolist() == [[1 + 2.0**-40] * 2]


def test_sizes_of_sums_are_those_of_the_values():
    """Checks of the start compare sums relative to them: values that cancel are not zero."""
    values, weights = torch.tensor([3.0, -1.0, -2.0]), torch.tensor([1.0, 1.0, 0.5])
    assert sum_up(values, weights).tolist() == [1.0, 5.0, 2.5]


def test_a_value_of_some_micro_batches_only_is_refused_with_a_fixed_tree():
    means = Means(Leaves(0, 2, 2))
    means.add("value", torch.ones(3), None)
    with pytest.raises(ConfigError, match=r"^strategy=exact: a metric or loss was returned for"):
        means.read(ALONE)
