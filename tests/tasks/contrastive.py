"""A contrastive loss: each row must find its partner among the rows of all ranks."""

import torch
import torch.nn.functional as F
from torch import nn

from trainer import ResidentDataset, Trainer


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
        self.image = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4))
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, text, image):
        text, image = (F.normalize(each, dim=1) for each in (self.text(text), self.image(image)))
        return self.scale.exp() * text, image


class Contrastive(Trainer):
    def build_dataset(self, split):
        if split == "eval":  # its micro-batches would be other rows in another layout
            return None
        generator = torch.Generator().manual_seed(0)
        clean = torch.randn(90, 6, generator=generator)
        noisy = [clean + torch.randn(90, 6, generator=generator) / 9 for _ in range(2)]
        return ResidentDataset(*noisy)

    def build_model(self):
        return Towers()

    def split_batch(self, batch):
        return (batch[0], batch[1]), batch[0]

    def loss(self, outputs, targets):
        text, image = outputs
        images, first = self.gather_rows(image)
        texts, _ = self.gather_rows(text)
        own = first + torch.arange(len(text), device=text.device)
        one = F.cross_entropy(text @ images.T, own, reduction="none")
        return one + F.cross_entropy(image @ texts.T, own, reduction="none")
