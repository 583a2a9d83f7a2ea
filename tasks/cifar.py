"""CIFAR-10 with the net and recipe of airbench94 (K. Jordan, arXiv:2404.00498) and Muon (K. Jordan et al., 2024).

A frozen whitening layer, three groups of convolutions, Muon on the filters and SGD on the rest; batches of 250.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from trainer import ConfigError, ResidentDataset, Trainer

BUNDLED = Path(__file__).parent / "data" / "cifar10-5000-1000.z"
MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
LOSS_BATCH = 2000  # the paper sums its loss over 2,000 examples; its SGD rates are for that


@dataclass
class Options:
    data: Literal["auto", "full", "bundled"]
    root: str
    widths: list[int]
    norm: Literal["batch", "none"]
    bias_lr: float
    head_lr: float
    label_smoothing: float


class Cifar(Trainer):
    Options = Options

    def build_dataset(self, split):
        images, labels, source = load(split, self.options.data, self.options.root)
        return ResidentDataset(images, labels, source=source)

    def build_model(self):
        images = load("train", self.options.data, self.options.root)[0][:5000]
        return Net(self.options.widths, self.options.norm == "batch", normalize(images))

    def augment(self, inputs, targets, random, train):
        images = normalize(inputs)
        if not train:
            return images, targets
        mirrored = (random.bits("flip", per="run") + random.epoch) % 2 == 1  # a random half, then the other, in turns
        images = torch.where(mirrored[:, None, None, None], images.flip(3), images)
        return shift(images, random.integers("shift", 0, 5, 2)), targets

    def loss(self, outputs, targets):
        return F.cross_entropy(outputs, targets, label_smoothing=self.options.label_smoothing if self.model.training else 0.0, reduction="none")

    def metrics(self, outputs, targets):
        return {"accuracy": (outputs.argmax(1) == targets).float()}

    def build_optimizer(self, model):
        if not self.config.optim["_target_"].endswith(".Muon"):
            return super().build_optimizer(model)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        head = [p for name, p in trained if name == "head.weight"]
        biases = [p for name, p in trained if p.dim() == 1]
        filters = [p for name, p in trained if p.dim() == 4]
        arguments = {name: value for name, value in self.config.optim.items() if name != "_target_"}
        groups = [{"params": p, "lr": lr * LOSS_BATCH} for p, lr in ((biases, self.options.bias_lr), (head, self.options.head_lr)) if p]
        decay = [group | {"weight_decay": 2e-6 * LOSS_BATCH / group["lr"]} for group in groups]
        return [Muon(filters, **arguments), torch.optim.SGD(decay, momentum=0.85, nesterov=True, fused=True)]


@cache
def load(split: str, data: str, root: str) -> tuple[torch.Tensor, torch.Tensor, str]:
    """uint8 images (N, 3, 32, 32) and int64 labels (N,)."""
    files = [Path(root) / f"data_batch_{i}.bin" for i in range(1, 6)] if split == "train" else [Path(root) / "test_batch.bin"]
    missing = [file for file in files if not file.is_file()]
    if missing and data == "full":
        raise ConfigError(f"task.options.root={root}: {missing[0].name} of the official binary layout is not there; use task.options.data=bundled")
    if missing or data == "bundled":
        raw = torch.frombuffer(bytearray(zlib.decompress(BUNDLED.read_bytes())), dtype=torch.uint8)
        labels, pixels = raw[:6000].long(), raw[6000:].view(6000, 3, 32, 32)
        pixels = pixels.cumsum(2, dtype=torch.uint8).cumsum(3, dtype=torch.uint8)
        pixels[:, 1:] += pixels[:, :1].clone()
        part = slice(0, 5000) if split == "train" else slice(5000, 6000)
        return pixels[part], labels[part], "the bundled part of CIFAR-10"
    records = torch.cat([torch.frombuffer(bytearray(file.read_bytes()), dtype=torch.uint8).view(-1, 3073) for file in files])
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long(), f"the full CIFAR-10 in {root}"


def normalize(images: torch.Tensor) -> torch.Tensor:
    mean, std = (torch.tensor(v, device=images.device)[:, None, None] * 255 for v in (MEAN, STD))
    return (images - mean) / std


def shift(images: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Crops of (N, 3, 36, 36), the images padded by reflection, at offsets (N, 2)."""
    padded, span = F.pad(images, (2, 2, 2, 2), "reflect"), torch.arange(32, device=images.device)
    rows, columns = offsets[:, 0, None] + span, offsets[:, 1, None] + span
    batch = torch.arange(len(images), device=images.device)
    return padded.permute(0, 2, 3, 1)[batch[:, None, None], rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class Net(nn.Module):
    """Images (N, 3, 32, 32) to logits (N, 10). In evaluation the mean over the image and its mirror."""

    def __init__(self, widths: list[int], has_norm: bool, images: torch.Tensor):
        super().__init__()
        self.whiten = nn.Conv2d(3, 24, 2)
        self.whiten.weight = nn.Parameter(whitening(images), requires_grad=False)
        nn.init.zeros_(self.whiten.bias)
        layers: list[nn.Module] = [nn.GELU()]
        for width_in, width in zip([24, *widths], widths, strict=False):
            layers += [conv(width_in, width), nn.MaxPool2d(2), norm(width, has_norm), nn.GELU()]
            layers += [conv(width, width), norm(width, has_norm), nn.GELU()]
        self.body = nn.Sequential(*layers, nn.MaxPool2d(3))
        self.head = nn.Linear(widths[-1], 10, bias=False)
        with torch.no_grad():
            self.head.weight /= self.head.weight.std()
        self.to(memory_format=torch.channels_last)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return (self.logits(images) + self.logits(images.flip(3))) / 2
        return self.logits(images)

    def logits(self, images: torch.Tensor) -> torch.Tensor:
        images = images.contiguous(memory_format=torch.channels_last)
        return self.head(self.body(self.whiten(images)).flatten(1)) / self.head.weight.shape[1]


def conv(width_in: int, width: int) -> nn.Module:
    layer = nn.Conv2d(width_in, width, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight.data[:width_in])
    return layer


def norm(width: int, has_norm: bool) -> nn.Module:
    if not has_norm:
        return nn.Identity()
    layer = nn.BatchNorm2d(width, eps=1e-12, momentum=0.4)
    layer.weight.requires_grad_(False)
    return layer


def whitening(images: torch.Tensor) -> torch.Tensor:
    """Filters (24, 3, 2, 2): the eigenvectors of the covariance of 2x2 patches over their deviations, plus and minus."""
    patches = images.double().unfold(2, 2, 1).unfold(3, 2, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 12)
    values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
    filters = (vectors / torch.sqrt(values + 5e-4)).T.flip(0).reshape(12, 3, 2, 2)
    return torch.cat([filters, -filters]).float()


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised by Newton-Schulz iterations, for filters whose norm is held at sqrt(out)."""

    def __init__(self, params, lr: float, momentum: float, iterations: int):
        super().__init__(params, {"lr": lr, "momentum": momentum, "iterations": iterations})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is None:
                    continue
                momentum = self.state[weight].setdefault("momentum", torch.zeros_like(weight))
                momentum.mul_(group["momentum"]).add_(weight.grad)
                update = weight.grad + group["momentum"] * momentum
                weight.mul_(len(weight) ** 0.5 / weight.norm())
                weight.sub_(group["lr"] * orthogonal(update.flatten(1), group["iterations"]).view_as(weight))


def orthogonal(matrix: torch.Tensor, iterations: int) -> torch.Tensor:
    """The nearest half-orthogonal matrix, roughly: a quintic iteration, in bfloat16 where the weights are fp32."""
    x = matrix.bfloat16() if matrix.dtype == torch.float32 else matrix
    x = x / (x.norm() + 1e-7)
    x = x.T if len(matrix) > matrix.shape[1] else x
    for _ in range(iterations):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.T if len(matrix) > matrix.shape[1] else x).to(matrix.dtype)
