"""BatchNorm over the rows of all ranks."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.errors import ConfigError

PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def has_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(layer, _BatchNorm) for layer in model.modules())


def synchronize(model: nn.Module, device: torch.device) -> nn.Module:
    """Make every BatchNorm layer take its statistics over all ranks; names and parameters stay.

    torch's SyncBatchNorm on CUDA; elsewhere it refuses, and ours takes its place.
    Raises ConfigError for a lazy layer.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and not isinstance(layer, (*PLAIN, nn.SyncBatchNorm)):
            given = f"{name} is a {type(layer).__name__}"
            raise ConfigError(f"strategy.sync_batchnorm=true: {given}; use nn.BatchNorm2d")
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model)
    for layer in model.modules():
        if isinstance(layer, PLAIN):
            layer.__class__ = SyncBatchNorm  # type: ignore[assignment]
    return model


class SyncBatchNorm(_BatchNorm):
    """BatchNorm (Ioffe and Szegedy, arXiv:1502.03167) over the rows of all ranks.

    Two differentiable all-reduces, so that the variance is of centred values. The ranks may have
    different numbers of rows.
    """

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected (rows, channels, ...), got {tuple(input.shape)}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        dims, shape = [0, *range(2, input.dim())], [-1, *[1] * (input.dim() - 2)]
        values = input if input.dtype == torch.float64 else input.float()
        count = values.new_tensor([values.numel() // values.shape[1]])
        sums = _Total.apply(torch.cat([values.sum(dims), count]))
        mean, total = sums[:-1] / sums[-1], sums[-1].detach()
        centred = values - mean.view(shape)
        variance = _Total.apply(centred.square().sum(dims)) / total
        if (
            self.running_mean is not None
            and self.running_var is not None
            and self.num_batches_tracked is not None
        ):
            self.num_batches_tracked.add_(1)
            share = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), share)
            self.running_var.lerp_(
                (variance.detach() * total / (total - 1)).to(self.running_var.dtype), share
            )
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)


class _Total(torch.autograd.Function):
    """The sum over all ranks; each rank's gradient is the sum of all ranks' too."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _Total.forward(ctx, gradient)
