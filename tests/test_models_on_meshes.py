"""Models of users on meshes: frozen stages, recurrent layers, torch's own layers, and plans whose
gradients or outputs would be wrong."""

import pytest
import torch
import torch.nn.functional as F
from harness import check_parity, fit_on
from meshed import WORDS, Meshed
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.strategy.reunion import distance

PRECISE = ["task=meshed", "strategy.precision=fp64"]


class Inner(nn.Module):
    """A learned function between a layer of columns and one of rows."""

    def __init__(self, narrow):
        super().__init__()
        self.narrow = narrow
        self.curve = nn.PReLU(init=0.3)

    def forward(self, hidden):
        return self.narrow(self.curve(hidden))


class Curved(Meshed):
    def build_model(self):
        model = super().build_model()
        for block in model.blocks:
            block.narrow = Inner(block.narrow)
        return model

    def tensor_plan(self):
        return {"blocks.*.widen": "columns", "blocks.*.narrow.narrow": "rows"}


@pytest.mark.parametrize("words", [["strategy=tp"], ["strategy=fsdp_tp"]])
def test_a_parameter_between_divided_layers_is_refused_by_name(words, tmp_path):
    line = "mesh.tensor=2: each rank would find a part of the gradient of blocks.0.narrow.curve"
    ranks = 2 if words == ["strategy=tp"] else 4
    with pytest.raises(AssertionError, match=line):
        fit_on(ranks, tmp_path, *PRECISE, *words, task=Curved)


@pytest.mark.parametrize(
    "frozen", ["embed.weight,position,scale,blocks.0.*,blocks.1.*", "blocks.3.*,head.*"]
)
def test_a_stage_may_be_frozen(frozen, tmp_path):
    words = [*PRECISE, "task.options.tied=false", f"run.freeze=[{frozen}]"]
    one = fit_on(1, tmp_path / "one", *words, "strategy=single")
    check_parity(one, fit_on(2, tmp_path / "two", *words, "strategy=pp"), falls=False)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 12)
        self.layers = nn.ModuleList(nn.LSTM(12, 12, batch_first=True) for _ in range(2))
        self.head = nn.Linear(12, WORDS)

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)[0]
        return self.head(x)


class Recurring(Meshed):
    def build_model(self):
        return Recurrent()

    def blocks(self, model):
        return list(model.layers)


def test_recurrent_layers_over_a_pipeline(tmp_path):
    words = [*PRECISE, "data.micro_batch=4"]
    one = fit_on(1, tmp_path / "one", *words, "strategy=single", task=Recurring)
    two = fit_on(2, tmp_path / "two", *words, "strategy=pp", task=Recurring)
    check_parity(one, two, falls=False)


class Checkpointed(Recurrent):
    def forward(self, tokens, positions):
        x = self.embed(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)[0]
        return self.head(x)


class Recomputing(Recurring):
    def build_model(self):
        return Checkpointed()


def test_a_block_that_the_model_recomputes_itself_is_refused(tmp_path):
    with pytest.raises(AssertionError, match=r"recomputed from outside.*use strategy.recompute"):
        fit_on(2, tmp_path, *PRECISE, "strategy=pp", task=Recomputing)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, WORDS)

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Encoding(Meshed):
    def build_model(self):
        return Encoder()

    def blocks(self, model):
        return list(model.layers)

    def tensor_plan(self):
        return {"layers.*.linear1": "columns", "layers.*.linear2": "rows"}


def test_torchs_encoder_layer_on_a_tensor_axis(tmp_path):
    one = fit_on(1, tmp_path / "one", *PRECISE, "strategy=single", task=Encoding)
    two = fit_on(2, tmp_path / "two", *PRECISE, "strategy=tp", task=Encoding)
    check_parity(one, two, falls=False)


def test_outputs_are_compared_beside_infinities():
    torch.manual_seed(0)
    expected = torch.randn(4, 5)
    expected[:, 2] = -torch.inf
    assert distance(expected.clone(), expected) == 0
    other = F.relu(expected) + 1
    other[:, 2] = -torch.inf
    assert distance(other, expected) > 0.1
    assert distance(torch.full_like(expected, torch.nan), expected) == float("inf")
    assert distance(expected.nan_to_num(), expected) == float("inf")
