"""Random numbers are a function of their purpose: they are the same in any batch, on any rank and
in any order of calls."""

import random

import numpy
import pytest
import torch
from torch.nn.functional import dropout
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.core.rng import seed_example, seed_layers
from trainer.core.rng.keys import RowKeys
from trainer.core.rng.philox import Random, key_of, philox

CPU = torch.device("cpu")
FULL = 0xFFFFFFFF
PI = [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344]
KNOWN = {  # Random123, tests/kat_vectors: philox4x32 10
    "zeros": ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
    "ones": ([FULL] * 4, (FULL, FULL), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
    "pi": (PI, (0xA4093822, 0x299F31D0), [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]),
}
DRAWS = {
    "bits": lambda r, **kw: r.bits("a", 3, **kw),
    "uniform": lambda r, **kw: r.uniform("a", 2, 3, **kw),
    "integers": lambda r, **kw: r.integers("a", -4, 9, **kw),
    "normal": lambda r, **kw: r.normal("a", 5, **kw),
}


def rows(indices, seed=1, split="train", epoch=2) -> Random:
    return Random(seed, split, epoch, torch.as_tensor(indices))


@pytest.mark.parametrize("name", KNOWN)
def test_philox_gives_the_known_answers(name):
    counter, key, expected = KNOWN[name]
    assert philox(torch.tensor(counter).unsqueeze(1), key).squeeze(1).tolist() == expected


def test_philox_counts_each_column_separately():
    counters = torch.tensor([[0] * 4, PI, [FULL] * 4]).t()
    for column in range(3):
        assert torch.equal(
            philox(counters, (5, 6))[:, column], philox(counters[:, [column]], (5, 6))[:, 0]
        )


def test_key_does_not_depend_on_the_process():
    assert key_of(1, "train", "flip") == 0x127336FEF845FB95
    assert key_of(1, "train", "flip") != key_of(11, "train", "flip") != key_of(1, "train", "lip")


@pytest.mark.parametrize("draw", DRAWS)
def test_row_does_not_depend_on_the_batch_around_it(draw):
    together = DRAWS[draw](rows([5, 900, 7, 2**40 + 7]))
    for place, index in enumerate([5, 900, 7, 2**40 + 7]):
        assert torch.equal(DRAWS[draw](rows([index]))[0], together[place])
    assert torch.equal(DRAWS[draw](rows([7, 5])), together[[2, 0]])


@pytest.mark.parametrize("draw", DRAWS)
def test_draw_does_not_depend_on_the_calls_before_it(draw):
    used = rows([5, 6])
    for other in ("uniform", "normal", "bits"):
        getattr(used, other)("b", 9)
    first = DRAWS[draw](used)
    assert torch.equal(DRAWS[draw](used), first)
    assert torch.equal(DRAWS[draw](rows([5, 6])), first)


def test_seed_split_name_epoch_and_index_each_make_other_numbers():
    one = rows([3])
    others = [
        rows([3], seed=2).bits("a", 4),
        rows([3], split="eval").bits("a", 4),
        rows([3], epoch=0).bits("a", 4),
        rows([4]).bits("a", 4),
        rows([3 + 2**32]).bits("a", 4),
        one.bits("b", 4),
        one.bits("a", 4, per="run"),
        one.bits("a", 4),
    ]
    assert len({tuple(drawn.flatten().tolist()) for drawn in others}) == len(others)


@pytest.mark.parametrize("draw", DRAWS)
def test_draw_per_run_is_the_same_in_every_epoch(draw):
    drawn = [DRAWS[draw](rows(range(20), epoch=epoch), per="run") for epoch in (0, 1, 50)]
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])
    assert not torch.equal(
        DRAWS[draw](rows(range(20), epoch=0)), DRAWS[draw](rows(range(20), epoch=1))
    )


@pytest.mark.parametrize("shape", [(), (1,), (4,), (5,), (2, 3), (0,)])
def test_draw_has_a_row_per_example_and_the_shape_asked_for(shape):
    for drawn in (rows([1, 2, 3]).bits("a", *shape), rows([1, 2, 3]).normal("a", *shape)):
        assert drawn.shape == (3, *shape)
    assert rows(torch.empty(0, dtype=torch.int64)).uniform("a", *shape).shape == (0, *shape)


def test_bits_are_32_and_each_is_set_half_the_time():
    drawn = rows(range(10_000)).bits("a")
    assert int(drawn.min()) >= 0 and int(drawn.max()) <= FULL
    for bit in range(32):
        assert 0.47 < (drawn >> bit & 1).double().mean() < 0.53


def test_uniforms_fill_zero_to_one_evenly():
    drawn = rows(range(100_000)).uniform("a").double()
    assert drawn.min() >= 0 and drawn.max() < 1
    assert abs(drawn.mean() - 0.5) < 0.005 and abs(drawn.var() - 1 / 12) < 0.001


def test_largest_uniform_is_below_one(monkeypatch):
    monkeypatch.setattr(
        Random, "bits", lambda self, name, *shape, per: torch.full((1, *shape), FULL)
    )
    assert rows([0]).uniform("a").item() == 1 - 2**-24
    assert rows([0]).integers("a", 0, 2**31).item() == 2**31 - 1
    assert torch.isfinite(rows([0]).normal("a"))


def test_smallest_bits_make_a_finite_normal(monkeypatch):
    monkeypatch.setattr(
        Random, "bits", lambda self, name, *shape, per: torch.zeros((1, *shape), dtype=torch.int64)
    )
    assert 6.6 < rows([0]).normal("a").item() < 6.7  # sqrt(64 ln 2), the largest possible


def test_integers_take_every_value_in_range_and_no_other():
    drawn = rows(range(12_000)).integers("a", -3, 9)
    found, counts = drawn.unique(return_counts=True)
    assert found.tolist() == list(range(-3, 9))
    assert counts.min() > 850 and counts.max() < 1150  # 1000 expected, standard deviation 30


def test_normals_have_mean_zero_and_deviation_one():
    drawn = rows(range(50_000)).normal("a", 2).double()
    assert abs(drawn.mean()) < 0.015 and abs(drawn.std() - 1) < 0.01
    assert abs((drawn**4).mean() - 3) < 0.15 and abs((drawn[:, 0] * drawn[:, 1]).mean()) < 0.02


def test_numbers_of_a_wide_row_do_not_repeat():
    drawn = rows(range(4)).bits("a", 10, 60)
    assert drawn.unique().numel() == drawn.numel()


def test_wide_row_begins_like_a_narrow_one():
    assert torch.equal(rows([8, 9]).bits("a", 11)[:, :3], rows([8, 9]).bits("a", 3))


def test_seeded_example_repeats_random_numpy_and_torch():
    def drawn(seed, epoch, index):
        seed_example(seed, epoch, index)
        return random.random(), float(numpy.random.random()), float(torch.rand(()))

    first = drawn(0, 1, 2)
    others = [drawn(1, 1, 2), drawn(0, 2, 2), drawn(0, 1, 3), drawn(0, 2, 1)]
    assert drawn(0, 1, 2) == first
    for kind in range(3):
        assert len({values[kind] for values in [first, *others]}) == 5


def test_seeded_layers_repeat_their_dropout_masks():
    def mask(seed, step, number):
        seed_layers(seed, step, number, CPU)
        return dropout(torch.ones(64), 0.5)

    first = mask(0, 7, 1)
    torch.rand(100)
    assert torch.equal(mask(0, 7, 1), first)
    assert 0 < first.count_nonzero() < 64
    for other in [(1, 7, 1), (0, 8, 1), (0, 7, 2), (0, 1, 7)]:
        assert not torch.equal(mask(*other), first), other


class Unchanged(TorchDispatchMode):
    """A dispatch mode that changes nothing."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bool, torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 128])
def test_numpy_draws_the_bits_of_torch(width, dtype):
    """A dispatch mode has torch's operations, such as those of fake tensors."""
    own = RowKeys()
    device = torch.device("cpu")
    own.begin(torch.tensor([0, 5, 2**40, 3])[::2])

    def draw():
        words = own.words(2**62 + 5, width, device)
        mask = own.mask(2**62 + 5, width, 2**29, 1 / 0.9, dtype, device)
        return words, mask, own.bits(3, width, device)

    of_numpy = draw()
    with Unchanged():
        of_torch = draw()
    assert all(map(torch.equal, of_numpy, of_torch))
    assert [each.dtype for each in of_numpy] == [torch.int32, dtype, torch.int64]
