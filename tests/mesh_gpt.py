"""A small GPT for every mesh: packed attention, positions and a mask as inputs of each block, tied
weights, dropout in and outside the divided layers, padding with weight 0."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from trainer import ResidentDataset, Trainer

LENGTH = 8
WORDS = 11  # which 2 and 4 do not divide


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float, has_positions: bool):
        super().__init__()
        self.has_positions = has_positions
        self.norm_1 = nn.LayerNorm(width)
        self.norm_2 = nn.LayerNorm(width)
        self.attend = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)
        self.size = width // heads
        self.dropout = dropout

    def forward(self, x, positions, *, mask):
        if self.has_positions:
            x = x + torch.sin(positions)[..., None] / 8
        packed = self.attend(self.norm_1(x))
        rows, length, _ = packed.shape
        packed = packed.view(rows, length, 3, -1, self.size)
        query, key, value = packed.permute(2, 0, 3, 1, 4)
        rate = self.dropout * self.training
        if mask is None:
            mixed = F.scaled_dot_product_attention(
                query, key, value, is_causal=True, dropout_p=rate
            )
        else:
            mixed = F.scaled_dot_product_attention(query, key, value, mask, dropout_p=rate)
        mixed = mixed.transpose(1, 2).reshape(rows, length, -1)
        x = x + F.dropout(self.project(mixed), self.dropout, self.training)
        hidden = F.dropout(torch.tanh(self.widen(self.norm_2(x))), self.dropout, self.training)
        return x + self.narrow(hidden)


class Net(nn.Module):
    def __init__(self, options):
        super().__init__()
        o = options
        self.embed = nn.Embedding(WORDS, o.width)
        self.position = nn.Parameter(torch.randn(LENGTH, o.width) / 4)
        self.dropout = o.dropout
        self.blocks = nn.ModuleList(Block(o.width, 4, o.dropout, o.inner) for _ in range(o.layers))
        self.norm = nn.LayerNorm(o.width)
        self.head = nn.Linear(o.width, WORDS, bias=False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        if o.tied:
            self.head.weight = self.embed.weight
        self.is_masked = o.masked

    def forward(self, tokens, positions):
        x = self.embed(tokens) * self.scale + F.embedding(positions, self.position)
        x = F.dropout(x, self.dropout, self.training)
        mask = None
        if self.is_masked:
            mask = ((tokens != 0) | (positions == 0))[:, None, None, :]
        for block in self.blocks:
            x = block(x, positions.to(x.dtype), mask=mask)
        return self.head(self.norm(x))


class Meshed(Trainer):
    @dataclass
    class Options:
        width: int = 16
        layers: int = 4
        dropout: float = 0.0
        tied: bool = True
        masked: bool = False
        inner: bool = True
        muon: bool = False
        smoothing: float = 0.0

    def build_model(self):
        return Net(self.options)

    def blocks(self, model):
        return list(model.blocks)

    def tensor_plan(self):
        return {
            "blocks.*.attend": "columns/3",
            "blocks.*.widen": "columns",
            "blocks.*.project|narrow": "rows",
            "embed|head": "vocabulary",
        }

    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(int(split == "train"))
        tokens = torch.randint(WORDS, (107, LENGTH), generator=generator)
        tokens[:, -2:] = tokens[:, :2]
        return ResidentDataset(tokens, torch.randint(3, LENGTH + 1, (107,), generator=generator))

    def split_batch(self, batch):
        tokens, lengths = batch
        positions = torch.arange(LENGTH, device=tokens.device).expand_as(tokens)
        before = F.pad(tokens[:, :-1], (1, 0))
        return (before, positions), (tokens, positions < lengths[:, None])

    def build_optimizer(self, model):
        if not self.options.muon:
            return super().build_optimizer(model)
        every = list(model.parameters())
        muon = torch.optim.Muon([p for p in every if p.dim() == 2], lr=0.02)
        return [muon, torch.optim.AdamW([p for p in every if p.dim() != 2], lr=0.01)]

    def loss(self, outputs, targets):
        tokens, is_there = targets
        smoothing = self.options.smoothing
        values = F.cross_entropy(
            outputs.transpose(1, 2), tokens, reduction="none", label_smoothing=smoothing
        )
        return values, is_there.to(values.dtype)

    def metrics(self, outputs, targets):
        tokens, is_there = targets
        return {"accuracy": ((outputs.argmax(2) == tokens).double(), is_there.double())}
