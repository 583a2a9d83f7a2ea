"""Random draws by example: dropout and noise do not depend on how rows are split (law 11)."""

import math
import random as of_python
from collections.abc import Callable
from functools import partial

import numpy
import pytest
import torch
import torch.nn.functional as F
from harness import check_parity, fit_on
from tiny import Tiny
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.core.rng.forward import ExampleRng

CPU = torch.device("cpu")
ROWS = 12
CUTS = ([6, 6], [5, 4, 3], [2, 8, 2], [1] * ROWS)


class Model(nn.Module):
    def __init__(self, layer: nn.Module, compute: Callable):
        super().__init__()
        self.layer = layer.double()
        self.compute = compute

    def forward(self, x):
        return self.compute(self.layer, x)


def linear(compute):
    return Model(nn.Linear(8, 8), lambda layer, x: compute(layer(x)))


def attention(**options):
    layer = nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True)
    return Model(layer, lambda layer, x: layer(x, x, x, **options)[0])


def noise_on_weights(layer, x):
    return F.linear(x, F.dropout(layer.weight, 0.3), layer.bias + torch.randn(8))


def of_probabilities(h):
    return h * torch.bernoulli(h.detach().sigmoid())


FLAT = {
    "dropout": lambda: linear(lambda h: F.dropout(h, 0.3)),
    "dropout in place": lambda: linear(lambda h: F.dropout(h, 0.3, inplace=True)),
    "nn.Dropout": lambda: Model(
        nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3)), lambda layer, x: layer(x)
    ),
    "alpha_dropout": lambda: linear(lambda h: F.alpha_dropout(h, 0.3, True)),
    "dropout1d of (rows, channels)": lambda: linear(lambda h: F.dropout1d(h, 0.3)),
    "a VAE's noise": lambda: linear(lambda h: h + torch.randn_like(h) * h.exp()),
    "a distribution": lambda: linear(lambda h: torch.distributions.Normal(h, 1.0).rsample()),
    "stochastic depth": lambda: linear(lambda h: h * h.new_empty(len(h), 1).bernoulli_(0.7)),
    "steps of diffusion": lambda: linear(lambda h: h * torch.randint(0, 10, (len(h), 1))),
    "rand": lambda: linear(lambda h: h * torch.rand(len(h), 8)),
    "exponential_": lambda: linear(lambda h: h * torch.empty_like(h).exponential_(2.0)),
    "gumbel_softmax": lambda: linear(lambda h: F.gumbel_softmax(h)),
    "bernoulli of probabilities": lambda: linear(of_probabilities),
    "rrelu": lambda: linear(lambda h: F.rrelu(h, training=True)),
    "gamma, row by row": lambda: linear(
        lambda h: torch.distributions.Gamma(h.exp(), 1.0).rsample()
    ),
    "categories, row by row": lambda: linear(
        lambda h: h * torch.distributions.Categorical(logits=h).sample()[:, None]
    ),
    "cauchy_, row by row": lambda: linear(lambda h: h * torch.empty_like(h).cauchy_()),
    "noise on weights": lambda: Model(nn.Linear(8, 8), noise_on_weights),
    "one number for all": lambda: linear(lambda h: h * torch.rand(1) + torch.rand(())),
    "checkpoint": lambda: linear(
        lambda h: checkpoint(lambda t: F.dropout(t, 0.3), h, use_reentrant=False)
    ),
    "reentrant checkpoint": lambda: linear(
        lambda h: checkpoint(lambda t: F.dropout(t, 0.3), h, use_reentrant=True)
    ),
}
DEEP = {
    "MultiheadAttention": attention,
    "MultiheadAttention without weights": lambda: attention(need_weights=False),
    "attention with learned queries": lambda: linear(
        lambda h: F.scaled_dot_product_attention(
            torch.ones(1, 2, 8, dtype=h.dtype), h, h, dropout_p=0.3
        )
    ),
    "attention with groups of heads": lambda: linear(
        lambda h: F.scaled_dot_product_attention(
            h.unflatten(2, (4, 2)).transpose(1, 2),
            *[h[..., :4].unflatten(2, (2, 2)).transpose(1, 2)] * 2,
            dropout_p=0.3,
            enable_gqa=True,
        )
    ),
    "sequence first": lambda: Model(
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3),
        lambda layer, x: layer(x.transpose(0, 1)).transpose(0, 1),
    ),
    "batch x time, channels": lambda: linear(lambda h: F.dropout(h.flatten(0, 1), 0.3).view_as(h)),
    "dropout of channels": lambda: linear(lambda h: F.dropout1d(h, 0.3)),
    "feature_alpha_dropout": lambda: linear(lambda h: F.feature_alpha_dropout(h, 0.3, True)),
}


def draw(model, x, cuts, name="loss", step=5):
    """Return outputs and gradients of the rows, computed in pieces."""
    draws = ExampleRng(3, CPU, True)
    draws.trace_draws(name, lambda inputs, _: model(inputs), (x, x))
    model.zero_grad()
    outputs = []
    first = 0
    for number, rows in enumerate(cuts):
        with draws.update(name):
            draws.begin(step, number, torch.arange(first, first + rows))
            out = model(x[first : first + rows])
            torch.autograd.backward(out.square().sum())
        outputs.append(out.detach())
        first += rows
    return torch.cat(outputs), [p.grad for p in model.parameters()], draws


@pytest.mark.parametrize("name", [*FLAT, *DEEP])
def test_rows_draw_the_same_however_they_are_split(name):
    torch.manual_seed(0)
    model = {**FLAT, **DEEP}[name]().train()
    x = torch.randn(ROWS, *((6, 8) if name in DEEP else (8,)), dtype=torch.float64)
    whole, gradients, _ = draw(model, x, [ROWS])
    assert not torch.equal(whole, draw(model, x, [ROWS], step=6)[0])
    for cuts in CUTS:
        parts, others, _ = draw(model, x, cuts)
        torch.testing.assert_close(parts, whole, rtol=1e-10, atol=1e-10)
        for one, other in zip(gradients, others, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("is_reentrant", [True, False])
def test_recomputation_draws_what_the_forward_pass_drew(is_reentrant):
    torch.manual_seed(0)
    x = torch.randn(ROWS, 8, dtype=torch.float64)

    def block(h):
        return F.dropout(torch.tanh(F.dropout(h, 0.3)) * torch.rand_like(h), 0.5)

    kept = linear(block)
    again = Model(
        kept.layer, lambda layer, x: checkpoint(block, layer(x), use_reentrant=is_reentrant)
    )
    ours, theirs = (draw(model, x, [ROWS])[:2] for model in (kept, again))
    torch.testing.assert_close(ours, theirs)


def test_an_update_of_another_name_draws_other_numbers():
    model, x = linear(lambda h: F.dropout(h, 0.5)), torch.ones(ROWS, 8, dtype=torch.float64)
    assert not torch.equal(draw(model, x, [ROWS])[0], draw(model, x, [ROWS], "critic")[0])


def test_kernel_with_its_own_draws_is_named_and_keyed_by_the_micro_batch():
    lstm = Model(nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True), lambda layer, x: layer(x)[0])
    x = torch.ones(ROWS, 6, 8, dtype=torch.float64)
    _, _, draws = draw(lstm, x, [ROWS])
    assert "lstm" in draws.traces.names
    halves, _, _ = draw(lstm, x, [6, 6])
    assert torch.equal(halves, draw(lstm, x, [6, 6])[0])
    assert not torch.equal(halves[:6], halves[6:]), "two micro-batches had one mask"
    without = Model(nn.LSTM(8, 8, 2, batch_first=True), lambda layer, x: layer(x)[0])
    assert "lstm" not in draw(without, x, [ROWS])[2].traces.names


def test_layers_with_their_own_draws_have_separate_masks():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(8, 8, 2, dropout=0.5, batch_first=True).double()

        def forward(self, x):
            return torch.stack([self.lstm(x)[0], self.lstm(x)[0]], 1)

    outputs, _, _ = draw(Two(), torch.ones(ROWS, 6, 8, dtype=torch.float64), [ROWS])
    assert not torch.equal(outputs[:, 0], outputs[:, 1])


@pytest.mark.parametrize("length", [8, 16, 24])
def test_axis_of_the_rows_is_found_where_another_one_fits(length):
    """Attention weights have heads x rows first, later tensors have the sequence first."""
    layer = nn.TransformerEncoderLayer(8, 4, 16, dropout=0.3)
    layer.self_attn.forward = partial(layer.self_attn.forward)  # no fast path
    weights = nn.MultiheadAttention(8, 4, dropout=0.3)

    def compute(layer, x):
        x = layer(x.transpose(0, 1))
        return F.dropout(weights(x, x, x)[0], 0.3).transpose(0, 1)

    torch.manual_seed(0)
    weights.double()
    model = Model(layer, compute).train()
    x = torch.randn(ROWS, length, 8, dtype=torch.float64)
    whole = draw(model, x, [ROWS])[0]
    for cuts in ([4, 4, 4], [2] * 6, [6, 6]):
        torch.testing.assert_close(draw(model, x, cuts)[0], whole, rtol=1e-10, atol=1e-10)


def test_draws_of_one_update_do_not_determine_those_of_another():
    draws = ExampleRng(3, CPU, True)
    x = torch.ones(4, 8)
    draws.trace_draws("loss", lambda x, _: torch.rand_like(x), (x, x))
    draws.trace_draws("critic", lambda x, _: torch.rand(4, 8), (x, x))

    def drawn_by(name):
        with draws.update(name):
            draws.begin(0, 0, torch.arange(4))
            return torch.rand(4, 8)

    with draws.update("critic"):
        draws.begin(0, 0, torch.arange(4, 8))
        other = torch.rand(4, 8)
    assert torch.equal(drawn_by("critic"), other), "a draw without rows is one for all rows"
    with draws.update("loss"):
        draws.begin(0, 0, torch.arange(4, 8))
        assert not torch.equal(drawn_by("loss"), torch.rand(4, 8))


def test_draws_of_a_foreign_function_change_nothing_after_it():
    def compute(h):
        torch.empty(len(h), 3).fill_(0).log_normal_(generator=torch.default_generator)
        return F.dropout(h, 0.5)

    model, x = linear(compute), torch.ones(ROWS, 8, dtype=torch.float64)
    torch.testing.assert_close(draw(model, x, [5, 7])[0], draw(model, x, [ROWS])[0])


def test_module_without_random_draws_is_not_entered():
    model = linear(torch.tanh)
    draws = ExampleRng(0, CPU, True)
    draws.trace_draws("loss", lambda x, _: model(x), (torch.ones(4, 8, dtype=torch.float64), None))
    with draws.update("loss"):
        assert torch.overrides._get_current_function_mode_stack() == []


def test_own_generator_and_torchs_dropout_are_not_changed():
    own = torch.Generator()

    def compute(h):
        return h * torch.rand(len(h), 8, generator=own.manual_seed(1), dtype=h.dtype)

    x = torch.ones(4, 8, dtype=torch.float64)
    model = linear(compute)
    with torch.no_grad():
        expected = model(x)
        draws = ExampleRng(0, CPU, True)
        draws.trace_draws("loss", lambda x, _: model(x), (x, x))
        with draws.update("loss"):
            draws.begin(0, 0, torch.arange(4))
            assert torch.equal(model(x), expected)
    assert ExampleRng(0, CPU, False).is_known("loss"), "run.dropout=torch rehearses nothing"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # dynamo warns at graph breaks
@pytest.mark.parametrize("more", [[], ["data.micro_batch=8"]], ids=str)
def test_compiled_model_draws_the_same(more, tmp_path):
    words = [*("task=tiny", "task.options.dropout=0.2", "task.options.norm=true"), "optim.lr=0.3"]
    words += ["data.global_batch=24", "run.norm_rows=4", "experiment=parity"]
    plain = fit_on(1, tmp_path / "plain", *words)
    check_parity(plain, fit_on(1, tmp_path / "compiled", *words, "run.compile=true", *more))


# Statistics ---------------------------------------------------------------------------------------

WIDE = 4096


def drawn(compute, rows=64, step=0, calls=1):
    """Return the draws of `compute` for a tensor of ones, shape (calls, rows, WIDE)."""
    draws = ExampleRng(0, CPU, True)
    x = torch.ones(rows, WIDE)
    draws.trace_draws("loss", lambda x, _: compute(x), (x, x))
    with draws.update("loss"):
        draws.begin(step, 0, torch.arange(rows))
        return torch.stack([compute(x) for _ in range(calls)])


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.9])
def test_masks_have_their_rate(rate):
    kept = drawn(lambda x: F.dropout(x, rate)) > 0
    deviation = math.sqrt(rate * (1 - rate) / kept.numel())
    assert abs(1 - kept.double().mean() - rate) < 5 * deviation
    of_rows = 1 - kept.double().mean(2)
    assert (of_rows - rate).abs().max() < 5 * math.sqrt(rate * (1 - rate) / WIDE)
    values = drawn(lambda x: F.dropout(x, rate))[kept]
    torch.testing.assert_close(values, torch.full_like(values, 1 / (1 - rate)))


def test_masks_of_rows_calls_steps_and_places_are_independent():
    first = drawn(lambda x: F.dropout(x, 0.5), calls=2)
    other = drawn(lambda x: F.dropout(x, 0.5), step=1)
    signs = [(mask > 0).double() * 2 - 1 for mask in (*first, *other)]
    limit = 5 / math.sqrt(WIDE)
    of_rows = signs[0] @ signs[0].T / WIDE - torch.eye(64)
    assert of_rows.abs().max() < limit
    for one in (signs[1], signs[2]):  # another call, another step
        assert (signs[0] @ one.T / WIDE).abs().max() < limit
    for shift in (1, 2, 3, 64):
        assert (signs[0] * signs[0].roll(shift, 1)).mean(1).abs().max() < limit


def test_noise_has_its_distribution():
    normal = drawn(lambda x: torch.randn_like(x)).double()
    assert abs(normal.mean()) < 0.01
    assert abs(normal.std() - 1) < 0.01
    assert abs(normal.pow(4).mean() - 3) < 0.1
    uniform = drawn(lambda x: torch.rand_like(x)).double()
    assert 0 <= uniform.min() < 1e-4
    assert 1 - 1e-4 < uniform.max() < 1
    counts = torch.histc(uniform, 64, 0, 1)
    assert (counts / counts.mean() - 1).abs().max() < 0.1
    exponential = drawn(lambda x: torch.empty_like(x).exponential_(4.0)).double()
    assert abs(exponential.mean() - 0.25) < 0.005
    assert exponential.min() >= 0
    half = drawn(lambda x: torch.empty_like(x, dtype=torch.bfloat16).exponential_())
    assert half.min() > 0, "a user takes its logarithm"
    for whole in (
        lambda x: torch.randint_like(x, 3, 7),
        lambda x: torch.randint(3, 7, x.shape),
        lambda x: torch.randint(3, high=7, size=x.shape),
        lambda x: torch.randint(low=3, high=7, size=x.shape),
    ):
        assert torch.equal(drawn(whole).unique().double(), torch.arange(3.0, 7).double())
    assert torch.equal(drawn(lambda x: torch.randint(4, x.shape)).unique(), torch.arange(4))
    spread = drawn(lambda x: torch.empty_like(x).uniform_(2, to=5))
    assert 2 <= spread.min() < 2.001 and 4.999 < spread.max() < 5


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_uniform_numbers_stay_below_1(dtype):
    uniform = drawn(lambda x: torch.rand_like(x, dtype=dtype))
    assert uniform.dtype == dtype
    assert uniform.max() < 1
    assert abs(uniform.double().mean() - 0.5) < 0.005


def test_a_boolean_mask_of_attention_hides_keys_under_dropout():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 5, 4).unbind(0)
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    mask[:, 3] = False
    draws = ExampleRng(3, CPU, True)

    def attend(inputs, _=None):
        return F.scaled_dot_product_attention(query, key, inputs, mask, 0.3)

    draws.trace_draws("loss", attend, (value, value))
    other = value.clone()
    other[:, :, 3] += 100
    results = []
    for values in (value, other):
        with draws.update("loss"):
            draws.begin(0, 0, torch.arange(2))
            results.append(attend(values))
    assert torch.equal(*results)
    assert not torch.equal(results[0], F.scaled_dot_product_attention(query, key, value, mask))


class Shaken(Tiny):
    """Draws from the global generators where it should from its own `random`."""

    def augment(self, inputs, targets, random, train):
        shift = of_python.random() + float(torch.rand(())) + float(numpy.random.rand())
        return (inputs + 0.1 * shift if train else inputs), targets


def test_global_draws_of_a_hook_are_seeded_for_each_step(tmp_path):
    words = ["task=tiny", "run.prove=false", "run.steps=7"]
    whole = fit_on(1, tmp_path / "whole", *words, task=Shaken)
    fit_on(1, tmp_path / "parts", *words, "run.steps=3", task=Shaken)
    words += ["run.steps=7", "run.resume=auto"]
    parts = fit_on(1, tmp_path / "parts", *words, task=Shaken)
    for name, tensor in whole["weights"].items():
        assert torch.equal(tensor, parts["weights"][name])
