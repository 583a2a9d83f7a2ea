"""CIFAR-10 with a ResNet-18, or with the network, Muon optimizer and recipe of airbench94.

Airbench94: K. Jordan, arXiv:2404.00498.
"""

from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import nn

from trainer import ConfigError, ResidentDataset, Trainer, limit
from trainer.tasks.data.cifar10 import load

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
Rate = Annotated[float, limit(min=0, max=1)]
LOSS_BATCH = 2000  # the paper sums the loss over this batch, so its SGD rates need this factor


class Cifar(Trainer):
    @dataclass
    class Options:
        data: Literal["auto", "full", "bundled", "download"]
        root: str
        model: Literal["airbench", "resnet18"]
        widths: list[Annotated[int, limit(min=1)]]
        norm: Literal["batch", "none"]
        bias_lr: Annotated[float, limit(above=0)]
        head_lr: Annotated[float, limit(above=0)]
        label_smoothing: Rate

        def __post_init__(self):
            if len(self.widths) != 3:
                must = "must be three numbers, one for each halving of the image"
                raise ConfigError(f"task.options.widths={self.widths}: {must}")

    def build_dataset(self, split):
        images, labels, source = load(split, self.options.data, self.options.root)
        return ResidentDataset(images, labels, source=source)

    def build_model(self):
        if self.options.model == "resnet18":
            return ResNet([2, 2, 2, 2], 10, self.options.norm == "batch")
        images = load("train", self.options.data, self.options.root)[0][:5000]
        return Net(self.options.widths, self.options.norm == "batch", normalize(images))

    def blocks(self, model):
        return [layer for layer in model.body if any(True for _ in layer.parameters())]

    def augment(self, inputs, targets, random, train):
        images = normalize(inputs)
        if not train:
            return images, targets
        # Mirror a random half of the images; in the next epoch the other half.
        coin = random.bits("flip", per="run") + random.epoch
        images = torch.where(coin[:, None, None, None] % 2 == 1, images.flip(3), images)
        images = F.pad(images, (2, 2, 2, 2), "reflect")
        places = torch.arange(32, device=images.device)
        rows, columns = (random.integers("shift", 0, 5, 2)[:, :, None] + places).unbind(1)
        batch = torch.arange(len(images), device=images.device)[:, None, None]
        shifted = images.permute(0, 2, 3, 1)[batch, rows[:, :, None], columns[:, None]]
        return shifted.permute(0, 3, 1, 2), targets

    def loss(self, outputs, targets):
        smoothing = self.options.label_smoothing * self.model.training
        return F.cross_entropy(outputs, targets, label_smoothing=smoothing, reduction="none")

    def metrics(self, outputs, targets):
        return {"accuracy": (outputs.argmax(1) == targets).float()}

    def build_optimizer(self, model):
        if self.config.optim["_target_"] != "trainer.tasks.cifar.Muon":
            return super().build_optimizer(model)
        if self.options.model != "airbench":
            why = "optim=airbench has learning rates for the model of this name only"
            advice = "give optim=sgd schedule=cosine, or another optim"
            raise ConfigError(f"task.options.model={self.options.model}: {why}; {advice}")
        if "dtype" in self.config.optim:
            raise ConfigError("optim.dtype: follows strategy.precision in this task; leave it out")
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = []
        for dim, lr in ((1, self.options.bias_lr), (2, self.options.head_lr)):
            params = [p for p in trained if p.dim() == dim]
            groups.append({"params": params, "lr": lr * LOSS_BATCH, "weight_decay": 2e-6 / lr})
        arguments = {name: value for name, value in self.config.optim.items() if name != "_target_"}
        dtype = torch.bfloat16 if "bf16" in self.config.strategy.precision else None
        muon = Muon([p for p in trained if p.dim() == 4], **arguments, dtype=dtype)
        # in 16 bits on a CPU torch's fused SGD skips elements (pytorch/pytorch#191763)
        is_fused = trained[0].dtype.itemsize > 2
        return [muon, torch.optim.SGD(groups, momentum=0.85, nesterov=True, fused=is_fused)]


def normalize(images: torch.Tensor) -> torch.Tensor:
    mean, std = statistics(images.device)
    return (images - mean) / std


@cache
def statistics(device: torch.device) -> list[torch.Tensor]:
    """Return mean and deviation, cached: a GPU waits for a tensor made of Python numbers."""
    return [torch.tensor(value, device=device)[:, None, None] * 255 for value in (MEAN, STD)]


class Net(nn.Module):
    """Images (N, 3, 32, 32) to logits (N, 10).

    The first layer whitens 2x2 patches. In evaluation the logits are averaged over the image and
    its mirror image.
    """

    def __init__(self, widths: list[int], has_norm: bool, images: torch.Tensor):
        super().__init__()
        patches = (
            images.double()
            .unfold(2, 2, 1)
            .unfold(3, 2, 1)
            .permute(0, 2, 3, 1, 4, 5)
            .reshape(-1, 12)
        )
        values, vectors = torch.linalg.eigh(patches.T @ patches / len(patches))
        filters = (vectors / torch.sqrt(values + 5e-4)).T.flip(0).reshape(12, 3, 2, 2).float()
        self.whiten = nn.Conv2d(3, 24, 2)
        self.whiten.weight = nn.Parameter(torch.cat([filters, -filters]), requires_grad=False)
        self.whiten.bias.data.zero_()
        conv = partial(nn.Conv2d, kernel_size=3, padding=1, bias=False)
        norm = partial(nn.BatchNorm2d, eps=1e-12, momentum=0.4) if has_norm else nn.Identity
        layers: list[nn.Module] = [nn.GELU()]
        for before, width in pairwise([24, *widths]):
            layers += [conv(before, width), nn.MaxPool2d(2), norm(width), nn.GELU()]
            layers += [conv(width, width), norm(width), nn.GELU()]
        for layer in layers:
            if isinstance(layer, nn.Conv2d):
                nn.init.dirac_(layer.weight.data[: layer.in_channels])
            elif isinstance(layer, nn.BatchNorm2d):
                layer.weight.requires_grad_(False)
        self.body = nn.Sequential(*layers, nn.MaxPool2d(3))
        self.head = nn.Linear(widths[-1], 10, bias=False)
        self.head.weight.data /= self.head.weight.data.std()
        self.to(memory_format=torch.channels_last)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        views = [images] if self.training else [images, images.flip(3)]
        logits = [self.head(self.body(self.whiten(view)).flatten(1)) for view in views]
        return sum(logits) / (len(views) * self.head.in_features)


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised by Newton-Schulz (Jordan, 2024).

    Each weight is rescaled to the norm sqrt(out channels) before its update. `dtype` is that of
    the orthogonalisation, by default the dtype of the weights.
    """

    def __init__(
        self,
        params,
        lr: float,
        momentum: Rate,
        iterations: Annotated[int, limit(min=1)],
        dtype: torch.dtype | None = None,
    ):
        params = list(params)
        if any(p.dim() < 2 for p in params):
            raise ValueError("takes parameters of 2 or more dimensions only; choose another optim")
        super().__init__(params, {"lr": lr, "momentum": momentum, "iterations": iterations})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure=None):
        # in lists: an operation for all weights is one launch of a kernel on a GPU
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            gradients = [p.grad for p in weights]
            new = {p: torch.zeros_like(p) for p in weights if not self.state[p]}
            momenta = [self.state[p].setdefault("momentum", new.get(p)) for p in weights]
            torch._foreach_mul_(momenta, group["momentum"])
            torch._foreach_add_(momenta, gradients)
            ahead = torch._foreach_mul(momenta, group["momentum"])
            torch._foreach_add_(ahead, gradients)
            updates = self._orthogonalise([x.flatten(1) for x in ahead], group["iterations"])
            scales = torch._foreach_reciprocal(torch._foreach_norm(weights))
            torch._foreach_mul_(scales, [len(p) ** 0.5 for p in weights])
            torch._foreach_mul_(weights, scales)
            updates = cast(updates, weights[0].dtype)
            shaped = [x.view_as(p) for x, p in zip(updates, weights, strict=True)]
            torch._foreach_mul_(shaped, group["lr"])
            torch._foreach_sub_(weights, shaped)

    def _orthogonalise(self, matrices, iterations):
        """Return matrices near the nearest half-orthogonal ones, in `dtype`."""
        norms = torch._foreach_norm(matrices)
        torch._foreach_add_(norms, 1e-7)
        xs = cast(torch._foreach_div(matrices, norms), self.dtype)
        for _ in range(iterations):
            grams = [x @ x.T for x in xs]
            # not in place, which rounds the factor to bf16 (torch 2.13, CPU)
            twice = torch._foreach_mul(grams, 2.0315)
            squares = [two @ gram for two, gram in zip(twice, grams, strict=True)]
            factors = torch._foreach_mul(grams, -4.7750)
            torch._foreach_add_(factors, squares)
            ahead = [factor @ x for factor, x in zip(factors, xs, strict=True)]
            xs = torch._foreach_mul(xs, 3.4445)
            torch._foreach_add_(xs, ahead)
        return xs


def cast(tensors, dtype):
    """Return tensors in `dtype`, None for their own, by one launch."""
    if dtype in (None, tensors[0].dtype):
        return tensors
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, tensors)
    return copies


class ResNet(nn.Module):
    """Images (N, 3, 32, 32) to logits (N, classes).

    `ResNet([2, 2, 2, 2], 10, True)` is ResNet-18, 11.2 M parameters. As usual for small images,
    the first layer is a 3x3 convolution without max-pooling. Without normalisation every block is
    initialised to its shortcut: otherwise the network does not train (Zhang et al.,
    arXiv:1901.09321).
    """

    def __init__(self, blocks: list[int], classes: int, has_norm: bool, width: int = 64):
        super().__init__()
        before, layers = width, [_conv(3, width, 3, 1, has_norm), nn.ReLU()]
        for stage, count in enumerate(blocks):
            for number in range(count):
                stride = 2 if stage and not number else 1
                layers.append(Block(before, width * 2**stage, stride, has_norm))
                before = width * 2**stage
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(before, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images).mean((2, 3)))


class Block(nn.Module):
    """Two 3x3 convolutions with a shortcut, which is a projection if the shape changes."""

    def __init__(self, before: int, width: int, stride: int, has_norm: bool):
        super().__init__()
        self.first = _conv(before, width, 3, stride, has_norm)
        self.second = _conv(width, width, 3, 1, has_norm)
        is_same = before == width and stride == 1
        self.shortcut = nn.Identity() if is_same else _conv(before, width, 1, stride, has_norm)
        if not has_norm:
            nn.init.zeros_(self.second[0].weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(F.relu(self.first(x))) + self.shortcut(x))


def _conv(before: int, width: int, size: int, stride: int, has_norm: bool) -> nn.Sequential:
    conv = nn.Conv2d(before, width, size, stride, size // 2, bias=not has_norm)
    nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
    if not has_norm:
        nn.init.zeros_(conv.bias)
    return nn.Sequential(conv, nn.BatchNorm2d(width) if has_norm else nn.Identity())
