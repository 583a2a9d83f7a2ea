"""A segmentation net: a class for each pixel, weights by class, and pixels that do not count."""

import torch
import torch.nn.functional as F
from torch import nn

from trainer import ResidentDataset, Trainer

VOID = 255


class Segments(nn.Module):
    def __init__(self):
        super().__init__()
        self.down = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.mix = nn.Sequential(nn.GroupNorm(2, 8), nn.Conv2d(8, 8, 3, padding=1), nn.GELU())
        self.up = nn.ConvTranspose2d(8, 3, 2, stride=2)

    def forward(self, images):
        return self.up(self.mix(F.gelu(self.down(images))))


class Segmentation(Trainer):
    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(int(split == "train"))
        images = torch.randn(70, 3, 8, 8, generator=generator)
        labels = images.argmax(1)
        labels[torch.rand(70, 8, 8, generator=generator) < 0.2] = VOID
        return ResidentDataset(images, labels)

    def build_model(self):
        return Segments()

    def augment(self, images, labels, random, train):
        if not train:
            return images, labels
        is_flipped = random.uniform("flip", 1)[:, 0] < 0.5
        flipped = images.flip(3), labels.flip(2)
        images = torch.where(is_flipped[:, None, None, None], flipped[0], images)
        return images, torch.where(is_flipped[:, None, None], flipped[1], labels)

    def loss(self, outputs, labels):
        values = F.cross_entropy(outputs, labels, reduction="none", ignore_index=VOID)
        weights = 1 + (labels == 2).to(values.dtype)
        return values, weights * (labels != VOID)

    def metrics(self, outputs, labels):
        is_right = (outputs.argmax(1) == labels).double()
        return {"pixels": (is_right, (labels != VOID).double())}
