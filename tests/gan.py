"""A GAN: two networks, two optimizers, and two updates in a step."""

import torch
import torch.nn.functional as F
from torch import nn

from trainer import ResidentDataset, Trainer


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.make = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 2))
        self.judge = nn.Sequential(nn.Linear(2, 16), nn.GELU(), nn.Linear(16, 1))

    def forward(self, real):
        noise = torch.randn(len(real), 4, dtype=real.dtype, device=real.device)
        made = self.make(noise)
        return self.judge(real), self.judge(made.detach()), self.judge(made)


class Gan(Trainer):
    def build_dataset(self, split):
        if split == "eval":
            return None
        generator = torch.Generator().manual_seed(0)
        angle = 6.3 * torch.rand(90, generator=generator)
        circle = torch.stack([angle.cos(), angle.sin()], dim=1)
        return ResidentDataset(circle, torch.zeros(90))

    def build_model(self):
        return Both()

    def build_optimizer(self, model):
        return [torch.optim.Adam(part.parameters(), lr=0.01) for part in (model.judge, model.make)]

    def loss(self, outputs, targets):
        real, made, _ = outputs
        self.record("real", real[:, 0].sigmoid())
        return F.softplus(-real[:, 0]) + F.softplus(made[:, 0])

    def fool(self, outputs, targets):
        return F.softplus(-outputs[2][:, 0])

    def train_step(self, batch):
        judge, make = self.optimizers
        outcome = self.update(batch, self.loss, [judge])
        return outcome + self.update(batch, self.fool, [make], "make")
