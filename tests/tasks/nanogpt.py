"""A model of nanoGPT's shape: tied weights, and no weight decay on vectors."""

import math

import torch
import torch.nn.functional as F
from torch import nn

from trainer import ResidentDataset, Trainer


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.c_attn, self.c_proj = nn.Linear(16, 48), nn.Linear(16, 16)
        self.mlp = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16), nn.Dropout(0.1))

    def forward(self, x):
        rows, length, width = x.shape
        parts = self.c_attn(self.ln_1(x)).split(width, dim=2)
        q, k, v = (part.view(rows, length, 2, -1).transpose(1, 2) for part in parts)
        rate = 0.1 if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(20, 16), nn.Embedding(8, 16)
        self.h = nn.ModuleList(Block() for _ in range(2))
        self.ln_f, self.lm_head = nn.LayerNorm(16), nn.Linear(16, 20, bias=False)
        self.wte.weight = self.lm_head.weight
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight"):
                nn.init.normal_(p, mean=0.0, std=0.02 / math.sqrt(4))

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x))


class NanoGPT(Trainer):
    def build_dataset(self, split):
        tokens = torch.randint(20, (80, 9), generator=torch.Generator().manual_seed(0))
        return ResidentDataset(tokens[:, :-1], tokens[:, 1:])

    def build_model(self):
        return GPT()

    def blocks(self, model):
        return list(model.h)

    def build_optimizer(self, model):
        every = [p for p in model.parameters() if p.requires_grad]
        decayed = {"params": [p for p in every if p.dim() >= 2], "weight_decay": 0.1}
        others = {"params": [p for p in every if p.dim() < 2], "weight_decay": 0.0}
        return torch.optim.AdamW([decayed, others], lr=0.003, betas=(0.9, 0.95))

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs.transpose(1, 2), targets, reduction="none")
