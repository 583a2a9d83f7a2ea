"""Distances of results, limits of rounding and the odd rank: one rule for NaN, zeros and gaps."""

from math import inf, nan

import pytest
import torch

from trainer.base.same import RUNS, Limits, find_odd_rank, gap, relative
from trainer.base.same.distance import apart, digest_rows, norms_apart, weigh


def test_numbers_that_are_not_finite_are_equal_to_each_other_alone():
    assert gap(nan, nan) == gap(inf, nan) == gap(inf, -inf) == gap(None, None) == 0
    assert gap(nan, 1.0) == gap(1.0, inf) == gap(None, 1.0) == gap(1.0, None) == inf
    assert relative(nan, nan) == relative(None, None) == 0
    assert relative(nan, 1.0) == relative(0.0, inf) == relative(None, 0.0) == inf


def test_a_distance_is_relative_to_the_first_number_but_to_no_less_than_told():
    assert relative(2.0, 3.0) == 0.5
    assert relative(2.0, 3.0, 4.0) == 0.25
    assert relative(0.0, 0.0) == 0
    assert relative(0.0, 1e-12, 1e-6) == 1e-6


def test_tensors_have_nan_and_infinities_at_the_same_places():
    one = torch.tensor([1.0, nan, inf])
    assert apart(one, one.clone()) == 0
    assert apart(one, torch.tensor([1.5, nan, inf])) == 0.5
    assert apart(one, torch.tensor([1.0, nan, -inf])) == inf
    assert apart(one, torch.tensor([1.0, 0.0, inf])) == inf
    assert apart(one, one[:2]) == inf
    assert apart(torch.tensor([1, 2]), torch.tensor([1, 3])) == inf
    assert apart(torch.zeros(2), torch.zeros(2)) == 0


def test_a_norm_counts_as_a_part_of_all_norms_and_a_missing_tensor_is_infinitely_apart():
    large, small = torch.tensor([3.0, 4.0]), torch.tensor([1e-9])
    found = norms_apart({"a": large, "b": small}, {"a": large, "b": 2 * small}, 1e-6)
    assert found["a"] == 0
    assert found["b"] == pytest.approx(1e-9 / 5e-6)
    assert norms_apart({"a": large}, {}, 1e-6)["a"] == inf
    assert not norms_apart({"a": large * nan}, {"a": large * nan}, 1e-6)["a"] <= 1


def test_limits_are_found_by_the_name_of_a_precision_and_by_a_dtype():
    limits = Limits(1.0, 2.0, 3.0)
    assert [limits.of(kind) for kind in ("fp64", torch.float64)] == [1.0, 1.0]
    assert [limits.of(kind) for kind in ("fp32", torch.float32)] == [2.0, 2.0]
    assert [limits.of(kind) for kind in ("amp_bf16", torch.float16, "fp16")] == [3.0] * 3
    assert RUNS.fp64 < RUNS.fp32 < RUNS.narrower


def test_the_odd_rank_is_the_first_one_that_differs_from_rank_0():
    assert find_odd_rank([[1.0, 2.0], [1.0, 2.0 + 1e-9]], 1e-6) is None
    assert find_odd_rank([[1.0, 2.0], [1.0, 2.0], [1.0, 3.0]], 1e-6) == (2, 1)
    assert find_odd_rank([[1.0, inf], [1.0, inf], [1.0, 3.0]], 1e-6) == (2, 1)
    assert find_odd_rank([[nan], [3.0]], 1e-6) is None


def test_a_digest_changes_with_the_values_of_a_row_and_with_their_places():
    rows = torch.tensor([[1.0, 2.0], [2.0, 1.0], [1.0, 2.0]])
    digests = digest_rows((rows, torch.tensor([7, 7, 7])))
    assert digests[0] == digests[2] != digests[1]
    assert digest_rows(torch.tensor(1.0)) == []
    assert weigh(torch.zeros(2, 0)).tolist() == [0.0, 0.0]
