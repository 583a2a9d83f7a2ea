"""A variational autoencoder: noise in the forward pass, and a loss of two parts."""

import torch
import torch.nn.functional as F
from torch import nn

from trainer import ResidentDataset, Trainer


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(16, 24), nn.GELU(), nn.Linear(24, 8))
        self.decode = nn.Sequential(nn.Linear(4, 24), nn.GELU(), nn.Linear(24, 16))

    def forward(self, inputs):
        mean, spread = self.encode(inputs).chunk(2, dim=1)
        code = mean + torch.randn_like(mean) * (spread / 2).exp() if self.training else mean
        return self.decode(code), mean, spread


class Vae(Trainer):
    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(int(split == "train"))
        code = torch.randn(81, 2, generator=generator)
        mixing = torch.randn(2, 16, generator=torch.Generator().manual_seed(9))
        return ResidentDataset(torch.tanh(code @ mixing))

    def build_model(self):
        return Autoencoder()

    def split_batch(self, batch):
        return batch[0], batch[0]

    def loss(self, outputs, targets):
        made, mean, spread = outputs
        divergence = (mean**2 + spread.exp() - spread - 1).sum(1) / 2
        self.record("divergence", divergence)
        return F.mse_loss(made, targets, reduction="none").sum(1) + 0.1 * divergence

    def predict(self, outputs):
        return {"code": outputs[1]}
