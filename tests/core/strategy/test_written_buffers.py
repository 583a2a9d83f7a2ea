"""Buffers that a forward pass writes, under strategy=exact: the same on any number of ranks."""

import pytest
import torch
import torch.nn.functional as F
from harness import check_equal_bits, fit_on, on_ranks, slow_but
from mesh_gpt import LENGTH, Meshed, Net
from test_divided_parameters import refusals
from tiny import Tiny
from torch import nn
from torch.ao.quantization import (
    FakeQuantize,
    FusedMovingAvgObsFakeQuantize,
    HistogramObserver,
    MinMaxObserver,
    MovingAverageMinMaxObserver,
    PerChannelMinMaxObserver,
)


class Written(nn.Module):
    """Writes buffers of many kinds, in place and by assignment."""

    def __init__(self):
        super().__init__()
        integers = {"dtype": torch.long}
        self.register_buffer("passes", torch.zeros((), **integers))
        self.register_buffer("rows", torch.zeros((), **integers))
        self.register_buffer("histogram", torch.zeros(4, **integers))
        self.register_buffer("small", torch.zeros((), dtype=torch.uint8))
        self.register_buffer("assigned", torch.zeros((), **integers))
        self.register_buffer("is_set", torch.zeros((), dtype=torch.bool))
        self.register_buffer("is_rare", torch.zeros(16, dtype=torch.bool))
        self.register_buffer("largest", torch.full((16,), -9.0))
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("complex", torch.zeros(16, dtype=torch.complex64))
        self.register_buffer("queue", torch.zeros(6, 16))
        self.register_buffer("codes", torch.linspace(-1, 1, 64).view(4, 16))
        self.register_buffer("used", torch.zeros(4))
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    @torch.no_grad()
    def forward(self, x):
        if not self.training:
            return x
        rows = x.detach().float()
        self.passes += 1
        self.rows += len(rows)
        self.histogram += (rows[:, 0] * 3).long().clamp(0, 3).bincount(minlength=4)
        self.small += 1
        self.assigned = self.assigned + 1
        self.is_set.fill_(True)
        self.is_rare |= (rows > 2.2).any(0)
        torch.maximum(self.largest, rows.amax(0), out=self.largest)
        self.mean = 0.9 * self.mean + 0.1 * rows.mean(0)
        self.complex += rows.sum(0)
        self.queue.copy_(torch.cat([rows, self.queue])[:6])
        if len(self.cache) < len(rows):
            self.cache = torch.arange(len(rows)).float()
        chosen = F.one_hot(torch.cdist(rows, self.codes).argmin(1), 4).float()
        self.used.lerp_(chosen.sum(0), 0.1)
        self.codes.lerp_(chosen.T @ rows / self.used.clamp_min(1e-3)[:, None], 0.1)
        return x


class Observed(nn.Module):
    def __init__(self):
        super().__init__()
        kinds = (MinMaxObserver, MovingAverageMinMaxObserver, HistogramObserver)
        self.observers = nn.ModuleList(kind() for kind in kinds)
        moving = {"observer": MovingAverageMinMaxObserver, "quant_min": 0, "quant_max": 255}
        self.fake = nn.ModuleList([FakeQuantize(**moving), FusedMovingAvgObsFakeQuantize(**moving)])

    def forward(self, x):
        y = x.float()
        for each in self.observers:
            each(y.detach())
        for each in self.fake:
            y = each(y)
        return y.to(x.dtype)


class Buffered(Tiny):
    middle = nn.Identity

    def build_model(self):
        return nn.Sequential(nn.Linear(4, 16), self.middle(), nn.GELU(), nn.Linear(16, 3))


class WithWritten(Buffered):
    middle = Written


class WithObservers(Buffered):
    middle = Observed


WORDS = ["task=tiny", "task.options.dropout=0", "data.global_batch=24", "eval.every_steps=2"]
WORDS += ["strategy.precision=fp32", "run.steps=6", "strategy=exact", "dist.drift_every_steps=1"]
CASES = [(task, ranks) for task in (WithWritten, WithObservers) for ranks in (2, 3, 4)]


@pytest.mark.parametrize(("task", "ranks"), slow_but(CASES, CASES[0]))
def test_written_buffers_are_the_same_on_any_ranks_under_exact(task, ranks, tmp_path):
    one = fit_on(1, tmp_path / "one", *WORDS, task=task)
    check_equal_bits(one, fit_on(ranks, tmp_path / "more", *WORDS, task=task))
    if task is WithWritten:
        found = {name.removeprefix("1."): each for name, each in one["weights"].items()}
        assert found["passes"] == found["small"] == found["assigned"] == 6  # once a step
        assert found["rows"] == 6 * 3  # of a leaf
        assert found["is_set"] and found["is_rare"].any() and found["mean"].any()


def test_a_running_mean_by_assignment_is_that_of_all_ranks(tmp_path):
    words = [*WORDS[:-2], "strategy=ddp", "dist.drift_every_steps=1", "strategy.precision=fp64"]
    one = fit_on(1, tmp_path / "one", *words, task=WithMean)
    two = fit_on(2, tmp_path / "two", *words, task=WithMean)
    torch.testing.assert_close(two["weights"]["1.mean"], one["weights"]["1.mean"])


class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))

    def forward(self, x):
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x


class WithMean(Buffered):
    middle = Mean


class PerChannel(PerChannelMinMaxObserver):
    def forward(self, x):
        super().forward(x.detach())
        return x


class WithChannels(Buffered):
    middle = PerChannel


def test_a_buffer_of_the_state_that_gets_another_shape_is_refused_before_step_1(tmp_path):
    line = "1.min_val gets another shape in the forward pass, so no resume could load a"
    line += " checkpoint; build it with its final shape, or use persistent=False"
    for words in ("strategy=exact", "strategy=ddp"):
        for lines in on_ranks(2, refusals, tmp_path / words, [WithChannels], words):
            assert lines == [line]


class Rotary(Net):
    """Net with a cache of positions, which is longer on the ranks with later positions."""

    def __init__(self, options):
        super().__init__(options)
        self.register_buffer("cache", torch.zeros(0), persistent=False)

    def forward(self, tokens, positions):
        length = int(positions.max()) + 1
        if len(self.cache) != length:
            self.cache = torch.arange(length) / LENGTH
        return super().forward(tokens, positions) + self.cache[positions][..., None]


class WithRotary(Meshed):
    def build_model(self):
        return Rotary(self.options)


@pytest.mark.slow
def test_a_cache_may_have_another_size_on_each_rank(tmp_path):
    words = ["task=meshed", "experiment=parity", "run.steps=4", "data.global_batch=24"]
    mesh = ["strategy=parallel", "strategy.mesh.replicate=1", "strategy.mesh.context=2"]
    one = fit_on(1, tmp_path / "one", *words, task=WithRotary)
    two = fit_on(2, tmp_path / "two", *words, *mesh, task=WithRotary)
    for name, weight in one["weights"].items():
        torch.testing.assert_close(two["weights"][name], weight, rtol=1e-9, atol=1e-11)
