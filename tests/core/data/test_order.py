"""Sample order is a function of (seed, epoch, position), and a global batch is split without
padding or loss."""

import itertools

import pytest
import torch
from harness import slow_but

from trainer.base.errors import ConfigError
from trainer.core.data import order
from trainer.core.data.eval_batches import ShardSampler
from trainer.core.data.order import BatchPlan, BatchSplit, EpochSampler, check_batch
from trainer.core.data.sampling import Shuffle
from trainer.core.rng.philox import Order

SIZES = [1, 2, 3, 5, 203, 5000, 65537]
CPU = torch.device("cpu")
FIRST_SEED = 20_000


def whole(size: int, epoch: int = 0, seed: int = 0) -> list[int]:
    return Order(seed, epoch, size)(torch.arange(size)).tolist()


def accepted(most: int) -> list[BatchPlan]:
    """Return every plan that check_batch accepts, up to `most` rows and 9 ranks."""
    plans = []
    for rows, micro_batch, ranks in itertools.product(
        range(1, most + 1), range(1, most + 1), range(1, 10)
    ):
        try:
            plans.append(
                BatchPlan(1000, rows, check_batch(rows, BatchSplit(1, micro_batch), ranks), ranks)
            )
        except ConfigError:
            continue
    return plans


def steps_of(plan: BatchPlan, epoch: int, start: int) -> list[list[int]]:
    """Return the examples of each global batch, from the samplers of all ranks."""
    parts = []
    for rank in range(plan.ranks):
        sampler = EpochSampler(plan, Shuffle(plan.num_examples), 7, rank, CPU)
        sampler.set_epoch(epoch, start)
        batches = list(sampler)
        assert len(batches) == len(sampler) == (plan.steps_per_epoch - start) * plan.accumulation
        size = plan.accumulation
        parts.append([torch.cat(batches[i : i + size]) for i in range(0, len(batches), size)])
    return [torch.cat(shares).tolist() for shares in zip(*parts, strict=True)]


# The order ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_every_epoch_visits_each_example_exactly_once(size):
    for epoch in (0, 1, 2, 1000):
        assert sorted(whole(size, epoch)) == list(range(size))


def test_order_is_a_permutation_at_every_small_size():
    for size in range(1, 300):
        assert sorted(whole(size)) == list(range(size)), size


@pytest.mark.parametrize("size", SIZES)
def test_position_of_an_index_is_found_without_a_search(size):
    order = Order(5, 2, size)
    positions = torch.randint(0, size, (1000,), generator=torch.Generator().manual_seed(size))
    assert torch.equal(order.invert(order(positions)), positions)


def test_order_differs_by_epoch_and_by_seed():
    orders = {tuple(whole(203, epoch, seed)) for epoch in range(5) for seed in range(5)}
    assert len(orders) == 25


@pytest.mark.parametrize("size", SIZES)
def test_random_access_equals_sequential(size):
    positions = torch.randint(size, (4, 25), generator=torch.Generator().manual_seed(0))
    sequential = torch.tensor(whole(size, epoch=3))
    assert torch.equal(Order(0, 3, size)(positions), sequential[positions])
    assert Order(0, 3, size)(torch.tensor([size - 1])).item() == sequential[-1]


@pytest.mark.parametrize("size", SIZES)
def test_a_position_takes_fewer_than_two_tries_on_average(size):
    tries = []
    counted = Order(0, 0, size)
    encrypt = counted._encrypt
    counted._encrypt = lambda values: tries.append(values.numel()) or encrypt(values)  # type: ignore[method-assign]
    counted(torch.arange(size))
    assert size <= sum(tries) < 2 * size


def test_domain_of_the_permutation_is_less_than_twice_its_size():
    for size in [*range(1, 5000), 10**6 + 3, 10**9 + 7, 10**12 + 39]:
        made = Order(0, 0, size)
        assert size <= made.a * made.b < 2 * size, size


@pytest.mark.parametrize(
    ("size", "bins", "bound"),
    slow_but([(3, 3, 32), (5, 5, 63), (12, 12, 240), (203, 7, 105)], (3, 3, 32), (203, 7, 105)),
)
def test_an_example_is_at_any_position_equally_often(size, bins, bound):
    """Chi-square of a table of permutations, mean bins * (bins - 1); the bounds are more than 6
    deviations away."""
    seeds, width = 1000, size // bins
    drawn = torch.tensor([whole(size, seed=FIRST_SEED + seed) for seed in range(seeds)])
    cells = (torch.arange(size) // width) * bins + drawn // width
    expected = seeds * size / bins**2
    found = torch.bincount(cells.flatten(), minlength=bins**2)
    chi_square = ((found - expected) ** 2 / expected).sum().item()
    assert chi_square < bound, f"seeds from {FIRST_SEED}"


def test_neighbouring_epochs_share_no_more_positions_than_chance():
    epochs = torch.tensor([whole(203, epoch) for epoch in range(201)])
    same = (epochs[1:] == epochs[:-1]).sum()
    assert 120 < same < 280  # one in each of 200 pairs is expected, standard deviation 14


# The split ----------------------------------------------------------------------------------------


def test_parts_of_an_accepted_batch_are_contiguous_in_rank_order_and_differ_by_at_most_one_row():
    plans = accepted(24)
    assert len(plans) > 2000
    for plan in plans:
        pieces = [plan.micro_batches(rank) for rank in range(plan.ranks)]
        edges = [edge for piece in itertools.chain(*pieces) for edge in piece]
        assert edges[0] == 0 and edges[-1] == plan.global_batch and edges[1:-1:2] == edges[2::2], (
            plan
        )
        shares = [piece[-1][1] - piece[0][0] for piece in pieces]
        assert max(shares) - min(shares) <= 1 and sum(shares) == plan.global_batch, plan


def test_every_rank_makes_as_many_micro_batches_none_empty_none_too_large():
    for plan in accepted(24):
        for rank in range(plan.ranks):
            rows = [end - start for start, end in plan.micro_batches(rank)]
            assert (
                len(rows) == plan.accumulation and min(rows) >= 1 and max(rows) <= plan.micro_batch
            ), plan


def test_unset_micro_batch_means_one_per_rank():
    assert check_batch(22, BatchSplit(1, None), 3) == 8
    assert BatchPlan(203, 22, 8, 3).accumulation == 1


def test_micro_batch_is_no_larger_than_the_largest_part():
    assert check_batch(22, BatchSplit(1, 100), 3) == 8


def test_global_batch_below_the_ranks_is_refused():
    with pytest.raises(
        ConfigError, match=r"^data\.global_batch=3: must be at least the 4 data-parallel ranks$"
    ):
        check_batch(3, BatchSplit(1, None), 4)


def test_empty_micro_batch_is_refused_with_advice():
    text = (
        r"^data\.micro_batch=1: some ranks have 1 rows for 2 micro-batches, so one would be empty; "
        r"use data\.micro_batch=2, or a global batch divisible by 4$"
    )
    with pytest.raises(ConfigError, match=text):
        check_batch(5, BatchSplit(1, 1), 4)


def test_advised_micro_batch_and_global_batch_are_accepted():
    refused = 0
    for rows, micro_batch, ranks in itertools.product(range(1, 40), range(1, 40), range(1, 10)):
        try:
            check_batch(rows, BatchSplit(1, micro_batch), ranks)
        except ConfigError as error:
            if rows >= ranks:
                refused += 1
                advised = int(str(error).split("use data.micro_batch=")[1].split(",")[0])
                assert check_batch(rows, BatchSplit(1, advised), ranks) == advised
                assert (
                    check_batch(-(-rows // ranks) * ranks, BatchSplit(1, micro_batch), ranks)
                    == micro_batch
                )
    assert refused > 100


# The samplers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("micro_batch", "ranks"), [(22, 1), (6, 1), (11, 2), (4, 2), (8, 3), (3, 3), (5, 5)]
)
def test_ranks_together_take_each_global_batch_in_order(micro_batch, ranks):
    expected = torch.tensor(whole(203, 4, 7))[: 9 * 22].view(9, 22).tolist()
    assert steps_of(BatchPlan(203, 22, micro_batch, ranks), 4, 0) == expected


@pytest.mark.parametrize("start", [1, 5, 8, 9])
def test_epoch_started_in_the_middle_is_the_tail_of_the_whole(start):
    plan = BatchPlan(203, 22, 4, 3)
    assert steps_of(plan, 2, start) == steps_of(plan, 2, 0)[start:]


@pytest.mark.parametrize("block", [1, 7, 8, 50])
def test_order_does_not_depend_on_the_block_computed_ahead(block, monkeypatch):
    plan = BatchPlan(203, 22, 4, 3)
    expected = [steps_of(plan, 1, start) for start in (0, 4)]
    monkeypatch.setattr(order, "POSITIONS_AT_ONCE", block)
    assert [steps_of(plan, 1, start) for start in (0, 4)] == expected


def test_epoch_border_is_crossed_by_set_epoch_alone():
    plan = BatchPlan(44, 22, 22, 1)
    sampler = EpochSampler(plan, Shuffle(plan.num_examples), 7, 0, CPU)
    seen = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        seen.append(torch.cat(list(sampler)).tolist())
    assert seen == [whole(44, epoch, 7) for epoch in range(3)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 203])
def test_evaluation_counts_each_example_once_in_equally_many_micro_batches(size, ranks):
    shards = [ShardSampler(size, 8, rank, ranks, CPU) for rank in range(ranks)]
    real = [
        index
        for s in shards
        for batch, rows in zip(s, s.rows(), strict=True)
        for index in batch[:rows].tolist()
    ]
    assert real == list(range(size))
    assert len({tuple(len(batch) for batch in shard) for shard in shards}) == 1
    assert all(0 <= index < size for shard in shards for batch in shard for index in batch.tolist())
