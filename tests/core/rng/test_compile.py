"""Compiled models and losses: the same draws, one graph, few kernels."""

from contextlib import suppress

import pytest
import torch
import torch._inductor.metrics as metrics
import torch.nn.functional as F
from harness.training import check_parity, fit_on
from tiny import Tiny
from torch import nn
from torch._dynamo.utils import counters

from trainer.core.rng import keys, philox
from trainer.core.rng.compiled import compiled
from trainer.core.rng.forward import ExampleRng
from trainer.core.rng.keys import RowKeys

with suppress(ImportError):  # torch's compiler shows its progress with it
    from tqdm import tqdm

    tqdm.monitor_interval = 0  # else it starts a thread
CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.slow,  # torch's compiler and g++
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute"),  # torch reads it of a graph's inputs
    pytest.mark.filterwarnings("ignore:Dropout mask should only be used"),
]


class Net(nn.Module):
    """A layer, and a function of its outputs that draws."""

    def __init__(self, function):
        super().__init__()
        self.layer = nn.Linear(16, 16)
        self.function = function

    def forward(self, inputs):
        return self.function(self.layer(inputs))


def twice(x):
    """Drop the same values twice: a compiler joins equal operations."""
    return F.dropout(x, 0.3) + F.dropout(x, 0.3)


def attention(x):
    heads = x.unflatten(1, (4, 2, 2)).movedim(2, 1)
    return F.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.2, is_causal=True)


def noise(x):
    drawn = torch.rand(len(x), 16) + torch.randn_like(x) + torch.randint(0, 5, x.shape)
    return x * drawn + torch.empty_like(x).normal_() + F.gumbel_softmax(x) + torch.bernoulli(x**0)


def on_weights(x):
    """Draw what all rows share, between draws of the rows."""
    return F.dropout(x, 0.2) * F.dropout(torch.ones(16), 0.5) + torch.randn(16) + torch.rand_like(x)


def recomputed(x):
    inner = lambda y: F.dropout(F.gelu(F.dropout(y, 0.3)), 0.3)  # noqa: E731
    return torch.utils.checkpoint.checkpoint(inner, x, use_reentrant=False) + F.dropout(x, 0.1)


def row_by_row(x):
    return F.rrelu(x, training=True) + F.dropout(x, 0.1)


ENCODER = nn.TransformerEncoderLayer(16, 2, 32, 0.2, batch_first=True)
CASES = {
    "twice": twice,
    "attention": attention,
    "noise": noise,
    "on weights": on_weights,
    "recomputed": recomputed,
    "row by row": row_by_row,
    "encoder": lambda x: ENCODER(x.unsqueeze(1)),
    "channels": lambda x: F.dropout1d(x.unflatten(1, (4, 4)), 0.3) + F.alpha_dropout(x, 0.2).sum(),
}


def steps_of(model, forward, draws, steps=2):
    """Return outputs and gradients of a few steps, and how many draws each made."""
    found = []
    inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    for step in range(steps):
        model.zero_grad()
        with draws.update("loss"):
            draws.begin(step, 0, torch.arange(8))
            outputs = forward(inputs)
            outputs.square().sum().backward()
            found += [torch.tensor(draws.position()), outputs.detach()]
        found += [p.grad.clone() for p in model.parameters()]
    return found


def check_case(name):
    torch.manual_seed(0)
    model = Net(CASES[name])
    draws = ExampleRng(1, CPU, True, True)
    draws.trace_draws("loss", lambda inputs, _: model(inputs), (torch.randn(8, 16),) * 2)
    eager = steps_of(model, model.forward, draws)
    assert not torch.equal(eager[1], eager[4]), "each step has draws of its own"
    torch._dynamo.reset()
    counters.clear()
    graph = steps_of(model, compiled(model.forward), draws)
    torch.testing.assert_close(graph, eager, rtol=1e-5, atol=1e-5)
    assert counters["stats"]["unique_graphs"] == 1 and not counters["graph_break"]


@pytest.mark.parametrize("name", CASES)
def test_a_compiled_model_draws_as_an_eager_one(name):
    check_case(name)


def test_draws_inside_of_a_recurrent_layer_are_made_between_graphs():
    class Recurrent(nn.LSTM):
        def forward(self, inputs):
            return F.dropout(super().forward(F.dropout(inputs, 0.2))[0], 0.2)

    model = Recurrent(16, 16, 2, dropout=0.3)
    draws = ExampleRng(1, CPU, True, True)
    draws.trace_draws("loss", lambda inputs, _: model(inputs), (torch.randn(8, 16),) * 2)
    eager = steps_of(model, model.forward, draws)
    torch._dynamo.reset()
    torch.testing.assert_close(steps_of(model, compiled(model.forward), draws), eager)


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [1.0, 1 / 0.9])
def test_fused_functions_draw_the_bits_of_the_host_in_two_kernels(dtype, value):
    indices = torch.randint(0, 2**40, (37,))
    rows = RowKeys()
    rows.begin(indices)
    key, call = (123456789, 987654321), 2**62 + 12345
    last = -5
    counters_of = rows._count(17, CPU)
    start = rows.on(CPU)
    random = philox.Random(0, "train", 3, indices)
    for function, given, expected in (
        (
            philox.draw_words,
            (indices, 4, 3, *philox._constants(key, CPU)),
            random._words(key, 4, 3),
        ),
        (keys.seed_rows, (indices,), start),
        (keys.draw_bits, (start, call, counters_of), rows.bits(call, 17, CPU)),
        (
            keys.draw_mask,
            (start, call, counters_of, 33, last, value, dtype),
            rows.mask(call, 33, last, value, dtype, CPU),
        ),
    ):
        metrics.reset()
        drawn = torch.compile(function.__wrapped__, dynamic=True)(*given)
        assert torch.equal(drawn, expected) and drawn.dtype == expected.dtype, function
        assert metrics.generated_kernel_count <= 2, "as the simulated accelerator counts it"


def test_alike_blocks_are_compiled_once():
    blocks = [Net(F.gelu) for _ in range(12)]
    torch._dynamo.reset()
    counters.clear()
    x = torch.randn(8, 16)
    for block in blocks:
        x = compiled(block.forward, "blocks")(x)
    assert counters["stats"]["unique_graphs"] <= 2, "the first one's input has no gradient"


class CompiledByItsUser(Tiny):
    """A task that compiles a part of its model itself, as one graph."""

    def build_model(self):
        first = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2))
        return nn.Sequential(
            torch.compile(first, backend="eager", fullgraph=True), super().build_model()
        )


def test_model_that_its_user_compiles_as_one_graph_starts(tmp_path):
    words = ["task=tiny", "run.steps=2", "task.options.dropout=0.2"]
    assert fit_on(1, tmp_path, *words, task=CompiledByItsUser)["code"] == 0


TEXT = ["task=text", "task.options.layers=2", "task.options.context=32", "task.options.width=32"]
TEXT += ["run.steps=24", "data.global_batch=8", "task.options.files=20", "eval.every_steps=null"]
TEXT += ["checkpoint.every_steps=null", "strategy.precision=fp32", "log.every_steps=1"]


@pytest.mark.parametrize("how", ["true", "blocks"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_text_with_dropout_trains_the_same_compiled(how, ranks, tmp_path):
    eager = fit_on(1, tmp_path / "eager", *TEXT)
    check_parity(
        eager, fit_on(ranks, tmp_path / how, *TEXT, f"run.compile={how}"), 1e-3, 1e-3, False
    )


@pytest.mark.parametrize("strategy", ["tp", "cp", "pp", "exact"])
def test_divided_text_with_dropout_trains_the_same_compiled(strategy, tmp_path):
    words = [*TEXT, f"strategy={strategy}", "run.compile=true", "data.micro_batch=2"]
    eager = fit_on(1, tmp_path / "eager", *TEXT)
    check_parity(eager, fit_on(2, tmp_path / strategy, *words), 1e-3, 1e-3, False)


def test_a_machine_without_a_compiler_is_told_in_one_line(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    told = r"ConfigError: run\.compile=true: torch cannot compile here: .*; use run\.compile=false"
    without = torch._inductor.config.patch({"cpp.cxx": (None, "/nowhere/g++")})
    with without, pytest.raises(AssertionError, match=told):
        fit_on(1, tmp_path, *TEXT, "run.compile=true")
