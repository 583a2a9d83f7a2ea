"""BatchNorm over the rows of all ranks, and over groups of rows (Ghost BatchNorm)."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainer.data.batches import count_rows
from trainer.errors import ConfigError

SMALL = 2**15  # elements in a group; above it, copying on a CPU takes longer than a kernel call
PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def has_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(layer, _BatchNorm) for layer in model.modules())


def synchronize(
    model: nn.Module, device: torch.device, group: dist.ProcessGroup | None
) -> nn.Module:
    """Make every BatchNorm layer compute its statistics over all ranks; parameter names stay.

    `group` are the ranks, None for all.

    Uses torch's SyncBatchNorm on CUDA. On other devices torch's raises an error, so the
    SyncBatchNorm of this module is used. Raises ConfigError for a lazy layer.
    """
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and not isinstance(layer, (*PLAIN, nn.SyncBatchNorm)):
            given = f"{name} is a {type(layer).__name__}"
            raise ConfigError(f"strategy.sync_batchnorm=true: {given}; use nn.BatchNorm2d")
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
    for layer in model.modules():
        if isinstance(layer, PLAIN):
            layer.__class__ = SyncBatchNorm  # type: ignore[assignment]
            layer.group = group  # type: ignore[assignment]
    return model


def normalize_groups(model: nn.Module, rows: int) -> None:
    """Make every BatchNorm layer normalise groups of `rows` rows of a micro-batch.

    Raises ConfigError for a lazy layer.
    """
    groups = Groups(rows)
    for name, layer in model.named_modules():
        if isinstance(layer, _BatchNorm) and type(layer) not in GROUPED:
            given = f"{name} is a {type(layer).__name__}"
            raise ConfigError(f"run.norm_rows={rows}: {given}; use nn.BatchNorm2d")
        if type(layer) in GROUPED:
            layer.__class__ = GROUPED[type(layer)]
            layer.groups = groups
    model.register_forward_pre_hook(groups.count, with_kwargs=True)


class Groups:
    """Number of groups in the micro-batch that a model is called with."""

    def __init__(self, rows: int):
        self.rows = rows
        self.number = 1
        self._examples = rows

    def count(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Count the groups, as a hook before the model's forward pass."""
        self._examples = count_rows(args, kwargs)
        self.number = self._examples // self.rows

    def check(self, length: int) -> None:
        """Raise ConfigError if the rows are not whole groups."""
        if self._examples % self.rows or length % self.number:
            why = f"a BatchNorm layer got {length} rows for {self._examples} examples"
            raise ConfigError(f"run.norm_rows={self.rows}: {why}; must be whole groups of examples")


class GroupBatchNorm(_BatchNorm):
    """BatchNorm over groups of rows: Ghost BatchNorm (Hoffer et al., arXiv:1705.08741).

    A call updates the running statistics once, with the mean over its groups.
    """

    groups: Groups

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected (rows, channels, ...), got {tuple(input.shape)}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        number = self.groups.number
        if self.training:
            self.groups.check(len(input))
        if not self.training or number == 1:
            return super().forward(input)
        self._check_input_dim(input)
        is_slow_to_copy = input.device.type == "cpu" and input.numel() > number * SMALL
        output, statistics = (self._one_by_one if is_slow_to_copy else self._folded)(input)
        self._update(statistics)
        return output

    def _folded(self, input: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Normalise all groups at once, each as separate channels."""
        number = self.groups.number
        is_first = input.is_contiguous()
        moved = input if is_first else input.movedim(1, -1)
        shape = (number, -1, self.num_features, math.prod(input.shape[2:]) if is_first else 1)
        folded = moved.reshape(shape).transpose(0, 1)
        output, *statistics = self._normalize(folded.flatten(1, 2), number)
        output = output.view(folded.shape).transpose(0, 1).reshape(moved.shape)
        return output if is_first else output.movedim(-1, 1), [statistics]

    def _one_by_one(self, input: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Normalise each group by its own kernel call.

        On a CPU this is cheaper than copying large groups (docs/decisions.md).
        """
        results = [self._normalize(group) for group in input.chunk(self.groups.number)]
        return torch.cat([output for output, *_ in results]), [rest for _, *rest in results]

    def _normalize(self, input: torch.Tensor, number: int = 1) -> tuple[Any, Any, Any]:
        """Return output, means and variances for groups that lie side by side as channels."""
        mean = variance = None
        if self.running_mean is not None and self.running_var is not None:
            mean = self.running_mean.new_zeros(number * self.num_features)
            variance = self.running_var.new_zeros(number * self.num_features)
        weight = None if self.weight is None else self.weight.repeat(number)
        bias = None if self.bias is None else self.bias.repeat(number)
        # With momentum 1, batch_norm writes the groups' own mean and variance.
        output = F.batch_norm(input, mean, variance, weight, bias, True, 1.0, self.eps)
        return output, mean, variance

    @torch.no_grad()
    def _update(self, statistics: list[Any]) -> None:
        """Update the running statistics with the mean of the groups' statistics."""
        if (
            self.running_mean is None
            or self.running_var is None
            or self.num_batches_tracked is None
        ):
            return
        self.num_batches_tracked.add_(1)
        factor = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        means, variances = (
            torch.cat(each).view(-1, self.num_features) for each in zip(*statistics, strict=True)
        )
        self.running_mean.data.lerp_(means.mean(0), factor)
        self.running_var.data.lerp_(variances.mean(0), factor)


class GroupBatchNorm1d(GroupBatchNorm, nn.BatchNorm1d):
    """GroupBatchNorm that passes isinstance checks for nn.BatchNorm1d."""


class GroupBatchNorm2d(GroupBatchNorm, nn.BatchNorm2d):
    """GroupBatchNorm that passes isinstance checks for nn.BatchNorm2d."""


class GroupBatchNorm3d(GroupBatchNorm, nn.BatchNorm3d):
    """GroupBatchNorm that passes isinstance checks for nn.BatchNorm3d."""


GROUPED: dict[type, Any] = {
    nn.BatchNorm1d: GroupBatchNorm1d,
    nn.BatchNorm2d: GroupBatchNorm2d,
    nn.BatchNorm3d: GroupBatchNorm3d,
}


class SyncBatchNorm(_BatchNorm):
    """BatchNorm (Ioffe and Szegedy, arXiv:1502.03167) over the rows of all ranks.

    Two differentiable all-reduces: the second sums the squares of centred values, for the variance.
    The ranks may have different numbers of rows.
    """

    group: dist.ProcessGroup | None

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
        sums = _Total.apply(torch.cat([values.sum(dims), count]), self.group)
        mean, total = sums[:-1] / sums[-1], sums[-1].detach()
        centred = values - mean.view(shape)
        variance = _Total.apply(centred.square().sum(dims), self.group) / total
        if (
            self.running_mean is not None
            and self.running_var is not None
            and self.num_batches_tracked is not None
        ):
            self.num_batches_tracked.add_(1)
            factor = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), factor)
            self.running_var.lerp_(
                (variance.detach() * total / (total - 1)).to(self.running_var.dtype), factor
            )
        normal = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.affine:
            normal = normal * self.weight.view(shape) + self.bias.view(shape)
        return normal.to(input.dtype)


class _Total(torch.autograd.Function):
    """All-reduce sum whose backward is an all-reduce sum of the gradients."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        ctx.group = group
        total = tensor.clone()
        if not total.is_meta:
            dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return _Total.forward(ctx, gradient, ctx.group), None
