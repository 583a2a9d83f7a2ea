"""Learning-rate factors are pure functions of the step."""

import math

import pytest
import torch

from trainer.core.schedule import constant, cosine, linear, multistep, one_cycle

WARMED = [constant, linear, cosine, multistep]


def curve(factor, num_steps: int) -> list[float]:
    return [factor(step) for step in range(num_steps)]


def test_constant_is_one_throughout():
    assert curve(constant(50), 50) == [1.0] * 50


def test_linear_falls_evenly_to_its_final_value_just_past_the_last_step():
    assert curve(linear(4), 5) == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert curve(linear(4, final=0.2), 5) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_cosine_falls_slowly_then_fast_then_slowly():
    factor = cosine(100)
    assert (
        factor(0) == 1.0
        and factor(50) == pytest.approx(0.5)
        and factor(100) == pytest.approx(0, abs=1e-15)
    )
    assert factor(99) == pytest.approx(0.5 * (1 + math.cos(0.99 * math.pi)))
    assert curve(factor, 100) == sorted(curve(factor, 100), reverse=True)
    assert factor(25) - factor(26) < factor(50) - factor(51) > factor(75) - factor(76)


def test_cosine_ends_at_its_final_value():
    factor = cosine(100, final=0.1)
    assert (
        factor(0) == 1.0 and factor(50) == pytest.approx(0.55) and factor(100) == pytest.approx(0.1)
    )


@pytest.mark.parametrize("schedule", WARMED)
def test_warm_up_rises_evenly_and_never_starts_at_zero(schedule):
    assert curve(schedule(20, warmup_steps=4), 4) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert schedule(20, warmup_steps=4)(4) == 1.0


@pytest.mark.parametrize("schedule", [linear, cosine])
def test_decline_begins_where_the_warm_up_ends(schedule):
    after = [schedule(20, warmup_steps=4)(step) for step in range(4, 21)]
    assert after == pytest.approx([schedule(16)(step) for step in range(17)])


@pytest.mark.parametrize("schedule", [*WARMED, one_cycle])
def test_negative_warm_up_is_refused(schedule):
    with pytest.raises(ValueError, match=r"^warmup_steps=-1: must be an integer of at least 0$"):
        schedule(10, warmup_steps=-1)


@pytest.mark.parametrize("schedule", [*WARMED, one_cycle])
@pytest.mark.parametrize(("num_steps", "warmup_steps"), [(1, 0), (1, 1), (3, 10), (2, 2)])
def test_factor_stays_between_zero_and_one_in_runs_of_few_steps(schedule, num_steps, warmup_steps):
    assert all(
        0 <= value <= 1
        for value in curve(schedule(num_steps, warmup_steps=warmup_steps), num_steps + 3)
    )


@pytest.mark.parametrize("schedule", [linear, cosine])
def test_factor_past_the_last_step_stays_at_the_final_value(schedule):
    assert schedule(10, final=0.3)(25) == schedule(10, final=0.3)(10) == pytest.approx(0.3)


@pytest.mark.parametrize("schedule", [linear, cosine, one_cycle])
def test_longer_run_declines_more_slowly(schedule):
    short, long = schedule(100), schedule(200)
    assert long(140) == pytest.approx(short(70)) and long(199) == pytest.approx(short(99.5))
    assert long(80) > short(80)


def test_factor_does_not_depend_on_the_steps_asked_before():
    for schedule in [*WARMED, one_cycle]:
        forward, backward = schedule(30), schedule(30)
        assert curve(forward, 30) == [backward(step) for step in reversed(range(30))][::-1]


def test_multistep_at_parts_of_the_run():
    factor = multistep(100, milestones=[0.5, 0.75], gamma=0.1)
    assert [factor(step) for step in (0, 49, 50, 74, 75, 99)] == pytest.approx(
        [1, 1, 0.1, 0.1, 0.01, 0.01]
    )
    assert multistep(200, milestones=[0.5])(99) == 1.0


def test_multistep_at_steps_in_any_order():
    factor = multistep(100, milestones=[60, 30], gamma=0.5)
    assert [factor(step) for step in (0, 29, 30, 59, 60, 99)] == [1, 1, 0.5, 0.5, 0.25, 0.25]
    assert multistep(200, milestones=[60, 30], gamma=0.5)(60) == 0.25
    assert multistep(10, milestones=[1])(1) == pytest.approx(0.1)


def test_part_of_the_run_that_is_a_whole_step_is_that_step():
    first_lower = {
        percent: next(
            step for step in range(101) if multistep(100, milestones=[percent / 100])(step) < 1
        )
        for percent in range(1, 100)
    }
    assert {percent: step for percent, step in first_lower.items() if percent != step} == {}


def test_multistep_warms_up_first():
    factor = multistep(100, warmup_steps=9, milestones=[5, 0.5])
    assert (
        factor(4) == pytest.approx(0.5)
        and factor(5) == pytest.approx(0.06)
        and factor(50) == pytest.approx(0.01)
    )


def test_one_cycle_peaks_at_three_tenths():
    factor = one_cycle(100)
    values = curve(factor, 101)
    assert (
        values[0] == pytest.approx(0.04)
        and values[30] == 1.0
        and values[100] == pytest.approx(4e-6)
    )
    assert values.index(max(values)) == 30
    assert values[:31] == sorted(values[:31]) and values[30:] == sorted(values[30:], reverse=True)
    assert values[15] == pytest.approx(0.52) and values[65] == pytest.approx(0.5, abs=1e-5)


def test_one_cycle_peaks_at_the_end_of_the_warm_up():
    values = curve(one_cycle(100, warmup_steps=10, initial=0.5), 100)
    assert values[0] == 0.5 and values[10] == 1.0 and values[9] < 1.0 > values[11]


def test_one_cycle_is_the_one_in_torch():
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(()))], lr=1.0)
    theirs = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 1.0, 101, pct_start=31 / 101, cycle_momentum=False
    )
    ours = one_cycle(100)
    for step in range(100):
        assert theirs.get_last_lr()[0] == pytest.approx(ours(step))
        optimizer.step()
        theirs.step()
    assert theirs.get_last_lr()[0] == pytest.approx(ours(100)) == 4e-6
