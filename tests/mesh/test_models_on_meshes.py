"""Models of users on meshes: frozen stages, recurrent layers, torch's own layers, and plans whose
gradients or outputs would be wrong."""

import pytest
import torch
import torch.nn.functional as F
from harness import check_parity, fit_on, newest, slow_but
from harness.stored import tensors_of
from mesh_gpt import WORDS, Meshed
from torch import nn
from torch.utils.checkpoint import checkpoint

from trainer.mesh.division_check import trees_apart

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


@pytest.mark.parametrize("strategy", slow_but(["tp", "fsdp_tp"], "tp"))
def test_a_parameter_between_divided_layers_is_refused_by_name(strategy, tmp_path):
    line = "mesh.tensor=2: each rank would find a part of the gradient of blocks.0.narrow.curve"
    ranks = 2 if strategy == "tp" else 4
    with pytest.raises(AssertionError, match=line):
        fit_on(ranks, tmp_path, *PRECISE, f"strategy={strategy}", task=Curved)


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_torchs_encoder_layer_on_a_tensor_axis(tmp_path):
    one = fit_on(1, tmp_path / "one", *PRECISE, "strategy=single", task=Encoding)
    two = fit_on(2, tmp_path / "two", *PRECISE, "strategy=tp", task=Encoding)
    check_parity(one, two, falls=False)


def test_outputs_are_compared_beside_infinities():
    torch.manual_seed(0)
    expected = torch.randn(4, 5)
    expected[:, 2] = -torch.inf
    assert trees_apart(expected, expected.clone()) == 0
    other = F.relu(expected) + 1
    other[:, 2] = -torch.inf
    assert trees_apart(expected, other) > 0.1
    assert trees_apart(expected, torch.full_like(expected, torch.nan)) == float("inf")
    assert trees_apart(expected, expected.nan_to_num()) == float("inf")


# Losses that a divided model would compute otherwise ---------------------------------------------


class Shifted(Meshed):
    """The loss compares each position with the next target, as in nanoGPT."""

    def loss(self, outputs, targets):
        tokens, _ = targets
        return F.cross_entropy(outputs[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none")


class Neighbours(Meshed):
    def loss(self, outputs, targets):
        values, weights = super().loss(outputs, targets)
        return values + F.pad((outputs[:, 1:] - outputs[:, :-1]).square().sum(2), (1, 0)), weights


class PerRow(Meshed):
    def loss(self, outputs, targets):
        values, weights = super().loss(outputs, targets)
        return values, weights / weights.sum(1, keepdim=True)


class Decayed(Meshed):
    def loss(self, outputs, targets):
        values, weights = super().loss(outputs, targets)
        return values + sum(p.square().sum() for p in self.model.parameters()) / 1000, weights


@pytest.mark.parametrize(
    "task, mesh, line",
    [
        (Shifted, "cp", "loss of the divided model is .*shift targets in"),
        (Neighbours, "cp", "the loss of the divided model is .*from its own row and position"),
        (PerRow, "cp", "loss of the divided model is "),
        (Decayed, "tp", "the loss uses embed.weight, which this mesh divides"),
    ],
)
def test_a_loss_that_a_division_changes_is_refused(task, mesh, line, tmp_path):
    with pytest.raises(AssertionError, match=line):
        fit_on(2, tmp_path, *PRECISE, f"strategy={mesh}", task=task)


# What belongs to several stages ------------------------------------------------------------------


class Counting(Recurrent):
    """Buffers that change before, between and after the blocks; a rotation that blocks share."""

    def __init__(self):
        super().__init__()
        self.seen = nn.BatchNorm1d(12, affine=False)
        self.ends = nn.BatchNorm1d(12, affine=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("center", torch.zeros(12, dtype=torch.float64))
        self.turn = Rotation()
        self.layers = nn.ModuleList(Mixed(self.turn) for _ in range(4))
        self.condition = nn.Linear(12, 12)

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        x = self.seen(x.transpose(1, 2)).transpose(1, 2)
        conditions = torch.tanh(self.condition(x.mean(1)))
        for layer in self.layers:
            x = layer(x, conditions)
        if self.training:
            self.calls += 1
            with torch.no_grad():
                self.center = 0.9 * self.center + 0.1 * torch.ones_like(self.center)
        return self.head(self.ends(x.transpose(1, 2)).transpose(1, 2) + 0 * self.center)


class Rotation(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("angles", torch.arange(12, dtype=torch.float64) / 7)

    def forward(self, x):
        return x * self.angles.cos()


class Mixed(nn.Module):
    """A block that begins in place, keeps a tensor, and gets an argument made of parameters."""

    def __init__(self, turn):
        super().__init__()
        self.turn = turn
        self.linear = nn.Linear(12, 12)
        self.norm = nn.LayerNorm(12)
        self.kept = None

    def forward(self, x, conditions):
        x = F.leaky_relu(x, 0.3, inplace=True)
        if self.kept is None:
            self.kept = torch.linspace(0.5, 1.5, 12, device=x.device, dtype=x.dtype)
        return self.norm(x + self.turn(self.linear(x)) * self.kept + conditions[:, None])


class CountingTask(Recurring):
    def build_model(self):
        return Counting()

    def loss(self, outputs, targets):
        outputs /= 1.3
        return super().loss(outputs, targets)


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_buffers_arguments_and_caches_over_a_pipeline(ranks, tmp_path):
    words = [*PRECISE, "data.micro_batch=11", "run.norm_rows=11", "run.steps=20"]
    words.append("checkpoint.every_steps=20")
    one = fit_on(1, tmp_path / "one", *words, "strategy=single", task=CountingTask)
    mesh = f"strategy.mesh.pipeline={ranks}"
    other = fit_on(ranks, tmp_path / "many", *words, mesh, task=CountingTask)
    check_parity(one, other, falls=False)
    kept = [tensors_of(newest(run["directory"])) for run in (one, other)]
    assert kept[0].keys() == kept[1].keys()
    for name, value in kept[0].items():
        torch.testing.assert_close(kept[1][name], value, rtol=1e-10, atol=1e-12, msg=name)
    assert kept[0]["calls"] > 20 and kept[0]["ends.running_mean"].abs().max() > 1e-3


class InPlace(Meshed):
    def loss(self, outputs, targets):
        outputs /= 1.3
        return super().loss(outputs, targets)

    def tensor_plan(self):
        return {**super().tensor_plan(), "embed": "vocabulary"}


@pytest.mark.slow
def test_gathered_outputs_may_be_changed_in_place(tmp_path):
    one = fit_on(1, tmp_path / "one", *PRECISE, "strategy=single", task=InPlace)
    check_parity(one, fit_on(2, tmp_path / "two", *PRECISE, "strategy=tp", task=InPlace))


class Anew(Counting):
    def forward(self, tokens, positions):
        x = self.embed(tokens)
        conditions = self.condition(x.mean(1))
        for layer in self.layers:
            x = layer(x, conditions * 2)
        return self.head(x)


class AnewTask(CountingTask):
    def build_model(self):
        return Anew()


class Spread(Counting):
    """A buffer that is read before the blocks and changes after them."""

    def forward(self, tokens, positions):
        x = self.embed(tokens) - self.center
        conditions = self.condition(x.mean(1))
        for layer in self.layers:
            x = layer(x, conditions)
        if self.training:
            self.center.mul_(0.9).add_(0.1)
        return self.head(x)


class SpreadTask(CountingTask):
    def build_model(self):
        return Spread()


class Again(Recurrent):
    def forward(self, tokens, positions):
        x = self.embed(tokens)
        for layer in [*self.layers, *self.layers]:
            x = layer(x)[0]
        return self.head(x)


class AgainTask(Recurring):
    def build_model(self):
        return Again()


@pytest.mark.parametrize(
    "task, line",
    [
        (AnewTask, "a block gets an argument that is computed anew for it, .*compute it once"),
        (SpreadTask, "center changes, and several stages use it; use it in one place"),
        (AgainTask, "the model runs its blocks 2 times in training, and a stage runs once; choose"),
    ],
)
def test_what_a_pipeline_cannot_run_is_refused(task, line, tmp_path):
    with pytest.raises(AssertionError, match=line):
        fit_on(2, tmp_path, *PRECISE, "strategy=pp", task=task)
