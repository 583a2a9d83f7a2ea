"""A task with all that is hard to shard: uneven sizes, tied, frozen and scalar parameters, dropout,
BatchNorm, buffers, weights, and initial values that torch's meta device would skip."""

from dataclasses import dataclass

import torch
from torch import nn

from trainer import ResidentDataset, Trainer


class Layer(nn.Module):
    """A residual layer whose sizes no number of ranks from 2 to 4 divides."""

    def __init__(self, width: int, dropout: float, has_norm: bool):
        super().__init__()
        self.widen = nn.Linear(width, 13)
        self.norm = nn.BatchNorm1d(13) if has_norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.narrow = nn.Linear(13, width, bias=False)
        nn.init.trunc_normal_(self.narrow.weight, std=0.2)  # does nothing on the meta device

    def forward(self, hidden):
        return hidden + self.narrow(self.drop(torch.tanh(self.norm(self.widen(hidden)))))


class Net(nn.Module):
    """Two layers between an embedding and a head that share their weights."""

    def __init__(self, width: int, dropout: float, has_norm: bool, reads: bool):
        super().__init__()
        self.embed = nn.Embedding(10, width)
        self.layers = nn.ModuleList(Layer(width, dropout, has_norm) for _ in range(2))
        self.head = nn.Linear(width, 10, bias=False)
        self.head.weight = self.embed.weight
        self.temperature = nn.Parameter(torch.tensor(1.0))
        self.few = nn.Parameter(torch.randn(2, width) / 4)  # fewer rows than ranks
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width), persistent=False)
        self.layers[0].widen.bias.requires_grad_(False)
        if reads:  # cannot be built without values
            self.gain = float(self.embed.weight.abs().max().item())

    def forward(self, tokens):
        hidden = self.embed(tokens).mean(1) * self.scale + self.few.sum(0)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden) * self.temperature


class Sharded(Trainer):
    """Classify 107 sequences of 5 tokens; a part of the options makes it harder to shard."""

    @dataclass
    class Options:
        width: int = 7
        dropout: float = 0.0
        norm: bool = False
        weights: bool = False
        blocks: bool = True
        reads: bool = False
        muon: bool = False

    def build_model(self):
        o = self.options
        return Net(o.width, o.dropout, o.norm, o.reads)

    def blocks(self, model):
        return list(model.layers) if self.options.blocks else []

    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(int(split == "train"))
        tokens = torch.randint(10, (107, 5), generator=generator)
        return ResidentDataset(tokens, tokens.sum(1) % 10)

    def build_optimizer(self, model):
        if not self.options.muon:
            return super().build_optimizer(model)
        trained = [p for p in model.parameters() if p.requires_grad]
        muon = torch.optim.Muon([p for p in trained if p.dim() == 2], lr=0.02)
        return [muon, torch.optim.AdamW([p for p in trained if p.dim() != 2], lr=0.01)]

    def loss(self, outputs, targets):
        values = nn.functional.cross_entropy(outputs, targets, reduction="none")
        if not self.options.weights:
            return values
        return values, (targets > 4).to(values.dtype)  # some ranks have weight 0 in some steps

    def metrics(self, outputs, targets):
        return {"accuracy": (outputs.argmax(1) == targets).double()}
