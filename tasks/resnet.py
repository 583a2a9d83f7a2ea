"""Residual networks of basic blocks for 32x32 images (He et al., arXiv:1512.03385)."""

import torch
import torch.nn.functional as F
from torch import nn


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
