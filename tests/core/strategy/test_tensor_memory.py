"""Parameters and buffers that are views: slices, transposes, expanded and shared memory."""

import numpy as np
import pytest
import torch
from harness import check_equal_bits, fit, fit_on, on_ranks, relative_distance
from tiny import Tiny
from torch import nn

from trainer.base.errors import ConfigError
from trainer.core.strategy.modules.tensor_memory import convert_dtype, make_dense

WORDS = (
    *("task=tiny", "optim=adamw", "optim.lr=0.01", "data.global_batch=22", "log.every_steps=1"),
    *("strategy.precision=fp32", "eval.every_epochs=null"),
)


class Net(nn.Module):
    """Parameters in every order of memory, with gaps between the elements of some."""

    def __init__(self, is_dense=False):
        super().__init__()
        form = torch.contiguous_format if is_dense else torch.preserve_format
        weights = {
            "sliced": torch.randn(16, 8)[:, :4],
            "filter": torch.randn(8, 4, 3, 3)[:, :1],
            "transposed": torch.randn(4, 16).t(),
            "channels_last": torch.randn(4, 4, 3, 3).to(memory_format=torch.channels_last),
        }
        for name, weight in weights.items():
            setattr(self, name, nn.Parameter(weight.clone(memory_format=form)))
            assert getattr(self, name).shape == weight.shape
        if not is_dense:
            self.sliced = nn.Parameter(weights["sliced"])
            self.filter = nn.Parameter(weights["filter"])
        self.scale = nn.Parameter(torch.ones(1).expand(16), requires_grad=False)
        self.register_buffer("shift", torch.zeros(1, 16).expand(2, 16))
        self.register_buffer("phases", torch.polar(torch.ones(8), torch.arange(8.0)))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        hidden = x @ self.sliced.t() + x @ self.transposed.t()
        hidden = hidden + self.filter.square().sum() + self.channels_last.square().sum()
        pairs = torch.view_as_complex(hidden.float().unflatten(1, (8, 2)))
        turned = torch.view_as_real(pairs * self.phases).flatten(1).to(x.dtype)
        return self.head(torch.tanh(turned * self.scale + self.shift[1]))


class Views(Tiny):
    def build_model(self):
        return Net()


class Dense(Tiny):
    def build_model(self):
        return Net(is_dense=True)


def distances(one, other):
    """Return the relative distance of each weight of two runs by name."""
    pairs = {name: (value, other["weights"][name]) for name, value in one["weights"].items()}
    return {
        name: relative_distance(*pair) for name, pair in pairs.items() if not pair[0].is_complex()
    }


def test_views_and_complex_buffers_train_as_dense_ones_do(tmp_path):
    def fits():
        words = (*WORDS, "run.steps=12", "strategy=single")
        dense = fit(tmp_path / "dense", *words, task=Dense)
        views = fit(tmp_path / "views", *words, task=Views)
        exact = fit(tmp_path / "exact", *words[:-1], "strategy=exact", task=Views)
        return dense, views, exact

    ((dense, *others),) = on_ranks(1, fits)
    for other in others:
        assert max(distances(dense, other).values()) < 1e-5
        assert torch.equal(other["weights"]["phases"], Net().phases)
    sharded = fit_on(2, tmp_path, *WORDS, "run.steps=12", "strategy=fsdp", task=Views)
    assert max(distances(dense, sharded).values()) < 1e-5


def test_a_resume_keeps_the_order_in_memory_of_the_optimizers_state(tmp_path):
    def fits():
        words = (*WORDS, "strategy=single")
        whole = fit(tmp_path / "whole", *words, "run.steps=8", task=Views)
        fit(tmp_path, *words, "run.steps=4", task=Views)
        return whole, fit(tmp_path, *words, "run.steps=8", "run.resume=auto", task=Views)

    ((whole, resumed),) = on_ranks(1, fits)
    check_equal_bits(whole, resumed)


class Marked(nn.Parameter):
    pass


SHARED = torch.randn(4, 4)
ARRAY = np.ones((4, 4), dtype=np.float32)
COPY = "pass a copy of the tensor to nn.Parameter (.clone())"
REFUSED = {
    "expanded": (
        {"a": torch.randn(4, 1).expand(4, 8)},
        f"the parameter a has elements that share memory; {COPY}",
    ),
    "windows": (
        {"a": torch.randn(9).as_strided((3, 5), (2, 1))},
        f"the parameter a has elements that share memory; {COPY}",
    ),
    "complex": (
        {"a": torch.randn(4, dtype=torch.complex64)},
        "the parameter a is complex, which no strategy trains; store torch.view_as_real of it, and"
        " use torch.view_as_complex in forward",
    ),
    "the same memory": (
        {"a": SHARED, "b": SHARED},
        f"a and b share memory, and are two tensors; tie them as one nn.Parameter, or {COPY}",
    ),
    "parts in common": (
        {"a": SHARED[:, :3], "b": SHARED[:, 2:].t()},
        f"a and b share memory, and are two tensors; tie them as one nn.Parameter, or {COPY}",
    ),
    "two storages over one array": (
        {"a": torch.from_numpy(ARRAY[:3]), "b": torch.from_numpy(ARRAY[2:])},
        f"a and b share memory, and are two tensors; tie them as one nn.Parameter, or {COPY}",
    ),
    "a class of parameters": (
        {"a": Marked(SHARED[:3]), "b": Marked(SHARED[2:])},
        f"a and b share memory, and are two tensors; tie them as one nn.Parameter, or {COPY}",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_memory_that_a_trained_parameter_shares_is_refused(kind):
    tensors, line = REFUSED[kind]
    model = nn.Module()
    for name, tensor in tensors.items():
        is_made = isinstance(tensor, nn.Parameter)
        setattr(model, name, tensor if is_made else nn.Parameter(tensor))
    with pytest.raises(ConfigError) as error:
        make_dense(model)
    assert str(error.value) == f"build_model: {line}"
    model.requires_grad_(False)
    make_dense(model)


def test_complex_tensors_keep_their_imaginary_parts():
    model = Net()
    before = model.phases.clone()
    convert_dtype(model, torch.float64)
    assert {p.dtype for p in model.parameters()} == {torch.float64}
    assert torch.equal(model.phases, before)


def test_parts_of_one_tensor_and_tied_weights_are_not_shared_memory():
    model = nn.Module()
    whole = torch.randn(4, 6)
    model.a = nn.Parameter(whole[:, :2])
    model.b = nn.Parameter(whole[:, 2:])
    model.tied = model.a
    model.register_buffer("c", torch.arange(6).expand(4, 6))
    before = model.state_dict(keep_vars=True)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    make_dense(model)
    for name, value in model.state_dict(keep_vars=True).items():
        assert value is before[name]
        assert value.is_contiguous()
        assert torch.equal(value, values[name])
