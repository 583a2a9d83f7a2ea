"""BatchNorm over the rows of all ranks, and over groups of rows (Ghost BatchNorm)."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _LazyNormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.base.errors import ConfigError
from trainer.core.config.schema import Config
from trainer.core.micro_batch import count_rows

SMALL_GROUP = 2**15  # elements; above it, copying on a CPU takes longer than a kernel call
INSTANCES = "instance_norm"  # torch's function, which calls the same kernels for each row by itself
_ATEN = torch.ops.aten
KERNELS = {
    *(_ATEN.native_batch_norm, _ATEN._native_batch_norm_legit, _ATEN._batch_norm_with_update),
    *(_ATEN.cudnn_batch_norm, _ATEN.miopen_batch_norm),
}


def has_batchnorm(model: nn.Module) -> bool:
    return any(isinstance(layer, _BatchNorm) for layer in model.modules())


def has_plain_batchnorm(model: nn.Module) -> bool:
    """Return True if a BatchNorm layer in training normalises the rows of a micro-batch."""
    layers = [layer for layer in model.modules() if _is_torchs(layer)]
    return any(layer.training and not _is_synchronized(layer) for layer in layers)


def describe_cut_statistics(model: nn.Module, config: Config, accumulation: int) -> str:
    """Return why synchronized BatchNorm depends on the layout here; "" where it does not.

    Its statistics are those of one micro-batch of every rank. Those of a global batch in several
    micro-batches would need all of them in every layer, before the next layer begins: as many
    passes as there are layers, forward and backward.
    """
    if accumulation == 1:
        return ""
    layers = [layer for layer in model.modules() if isinstance(layer, _BatchNorm)]
    is_synced = config.strategy.sync_batchnorm
    if not any(each.training for each in layers if is_synced or _is_synchronized(each)):
        return ""
    cause = "strategy.sync_batchnorm=true" if is_synced else "nn.SyncBatchNorm"
    rows = config.data.most_rows
    return (
        f"{cause}: BatchNorm sees one of {accumulation} micro-batches at a time "
        f"(data.micro_batch={rows}), so results depend on the layout; set data.micro_batch=null, "
        f"use more ranks, or set run.norm_rows={rows} without SyncBN"
    )


def check_statistics(model: nn.Module, config: Config, accumulation: int) -> None:
    """Raise ConfigError if synchronized BatchNorm depends on the layout, unless the run allows it.

    With run.prove=warn or false the run's first lines report it instead.
    """
    line = describe_cut_statistics(model, config, accumulation)
    if line and config.run.prove is True:
        raise ConfigError(f"{line}; run.prove=warn trains all the same")


def _is_synchronized(layer: nn.Module) -> bool:
    return isinstance(layer, (SyncBatchNorm, nn.SyncBatchNorm))


def look_behind_batchnorm(module: nn.Module) -> None:
    """Let plain BatchNorm use its running statistics."""
    for each in module.modules():
        if _is_torchs(each):
            each.eval()


@contextmanager
def batchnorm_in_evaluation(module: nn.Module) -> Iterator[None]:
    """Let plain BatchNorm use its running statistics in the block, whatever a task says."""
    plain = [each for each in module.modules() if _is_torchs(each)]
    look_behind_batchnorm(module)
    for each in plain:
        vars(each)["train"] = lambda mode=True, each=each: each
    try:
        yield
    finally:
        for each in plain:
            del vars(each)["train"]


def has_batch_statistics(module: nn.Module) -> bool:
    """Return True if plain BatchNorm has no running statistics to use instead of the rows'."""
    every = [each for each in module.modules() if _is_torchs(each)]
    return any(each.running_mean is None for each in every)


def _is_torchs(layer: nn.Module) -> bool:
    return isinstance(layer, _BatchNorm) and not isinstance(layer, GroupBatchNorm)


def synchronize(model: nn.Module, group: dist.ProcessGroup | None, is_alone: bool = False) -> None:
    """Make every BatchNorm layer compute its statistics over all ranks.

    `group` are the ranks, None for all; with one rank the layers are only checked. torch's
    SyncBatchNorm refuses a CPU, and on CUDA it waits for the device in each layer. Raises
    ConfigError for a layer that cannot be converted.
    """
    setting = "strategy.sync_batchnorm=true"
    for name, layer in model.named_modules():
        if isinstance(layer, _InstanceNorm) and layer.track_running_stats:
            raise ConfigError(f"""{setting}: {name} is a {type(layer).__name__},
                whose running statistics are not; set track_running_stats=False""")
    layers = _convertible(model, setting, nn.SyncBatchNorm.forward)
    for layer in () if is_alone else layers:
        _convert(layer, SyncBatchNorm)
        layer.process_group = group  # type: ignore[assignment]


def normalize_groups(model: nn.Module, rows: int) -> None:
    """Make every BatchNorm layer normalise groups of `rows` rows of a micro-batch.

    Raises ConfigError for a layer that cannot be converted.
    """
    groups = Groups(rows)
    for layer in _convertible(model, f"run.norm_rows={rows}"):
        _convert(layer, GroupBatchNorm)
        layer.groups = groups  # type: ignore[assignment]
    model.register_forward_pre_hook(groups.count, with_kwargs=True)


def _convertible(model: nn.Module, setting: str, *others: Any) -> list[_BatchNorm]:
    """Return the BatchNorm layers, whose forward passes are torch's or one of `others`.

    Raises ConfigError for a layer that computes something else.
    """
    layers = []
    for name, layer in model.named_modules():
        if not isinstance(layer, _BatchNorm):
            continue
        kind = type(layer)
        is_synced = issubclass(kind, nn.SyncBatchNorm) and not others
        if issubclass(kind, _LazyNormBase) or is_synced:
            raise ConfigError(f"{setting}: {name} is a {kind.__name__}; use nn.BatchNorm2d")
        if has_own_forward(layer, *others):
            raise ConfigError(f"""{setting}: {name} is a {kind.__name__} with a forward pass of its
                own; use nn.BatchNorm2d, and the rest beside it, or strategy=exact instead""")
        layers.append(layer)
    return layers


def has_own_forward(layer: nn.Module, *others: Any) -> bool:
    """Return True for a BatchNorm layer whose forward pass is neither torch's nor of `others`."""
    is_known = type(layer).forward in (_BatchNorm.forward, *others)
    return isinstance(layer, _BatchNorm) and ("forward" in vars(layer) or not is_known)


def _convert(layer: _BatchNorm, base: type) -> None:
    """Give a layer the forward pass of `base`. Its class, hooks and parameters stay its own."""
    if not isinstance(layer, base):
        layer.__class__ = _joined(base, type(layer))  # type: ignore[arg-type]


@cache
def _joined(base: type, kind: type) -> Any:
    return type(kind.__name__, (base, kind), {})


class FunctionalBatchNorm(TorchDispatchMode):
    """Raises ConfigError where a model normalises over rows by a function instead of a layer."""

    def __init__(self, model: nn.Module, setting: str):
        super().__init__()
        self._names = {module: name for name, module in model.named_modules()}
        self._given = setting

    @classmethod
    def watch(cls, model: nn.Module, config: Config) -> AbstractContextManager[Any]:
        """Return the mode if the run chooses the rows that BatchNorm normalises."""
        if config.strategy.sync_batchnorm:
            return cls(model, "strategy.sync_batchnorm=true")
        rows = config.norm_rows
        return nullcontext() if rows is None else cls(model, f"run.norm_rows={rows}")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._overloadpacket in KERNELS and next(a for a in args if isinstance(a, bool)):
            self._check_caller()
        return func(*args, **(kwargs or {}))

    def _check_caller(self) -> None:
        frame = sys._getframe(2)
        while frame is not None:
            module = frame.f_locals.get("self")
            if isinstance(module, (_BatchNorm, _InstanceNorm)) or frame.f_code.co_name == INSTANCES:
                return
            if isinstance(module, nn.Module):
                name = self._names.get(module) or f"the {type(module).__name__}"
                raise ConfigError(f"""{self._given}: {name} calls batch_norm,
                    for the rows of a micro-batch; use a layer such as nn.BatchNorm2d""")
            frame = frame.f_back  # type: ignore[assignment]


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
            raise ConfigError(f"""run.norm_rows={self.rows}: a BatchNorm layer got {length} rows
                for {self._examples} examples; must be whole groups of examples""")


class GroupBatchNorm(_BatchNorm):
    """BatchNorm over groups of rows: Ghost BatchNorm (Hoffer et al., arXiv:1705.08741).

    A call updates the running statistics once, with the mean over its groups.
    """

    groups: Groups

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        num_groups = self.groups.number
        if self.training:
            self.groups.check(len(input))
        if not self.training or num_groups == 1:
            return super().forward(input)
        self._check_input_dim(input)
        is_slow_to_copy = input.device.type == "cpu" and input.numel() > num_groups * SMALL_GROUP
        output, statistics = (self._one_by_one if is_slow_to_copy else self._folded)(input)
        self._update(statistics)
        return output

    def _folded(self, input: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Normalise all groups at once, each as separate channels."""
        num_groups = self.groups.number
        is_first = input.is_contiguous()
        moved = input if is_first else input.movedim(1, -1)
        shape = (num_groups, -1, self.num_features, math.prod(input.shape[2:]) if is_first else 1)
        folded = moved.reshape(shape).transpose(0, 1)
        output, *statistics = self._normalize(folded.flatten(1, 2), num_groups)
        output = output.view(folded.shape).transpose(0, 1).reshape(moved.shape)
        return output if is_first else output.movedim(-1, 1), [statistics]

    def _one_by_one(self, input: torch.Tensor) -> tuple[torch.Tensor, list[Any]]:
        """Normalise each group by its own kernel call.

        On a CPU this is cheaper than copying large groups: 120 images in 12 groups through 64
        channels of 15 x 15 take 4.1 ms, as channels 6.5.
        """
        results = [self._normalize(group) for group in input.chunk(self.groups.number)]
        return torch.cat([output for output, *_ in results]), [rest for _, *rest in results]

    def _normalize(self, input: torch.Tensor, num_groups: int = 1) -> tuple[Any, Any, Any]:
        """Return output, means and variances for groups that lie side by side as channels."""
        mean = variance = None
        if self.running_mean is not None and self.running_var is not None:
            mean = self.running_mean.new_zeros(num_groups * self.num_features)
            variance = self.running_var.new_zeros(num_groups * self.num_features)
        weight = None if self.weight is None else self.weight.repeat(num_groups)
        bias = None if self.bias is None else self.bias.repeat(num_groups)
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


class SyncBatchNorm(_BatchNorm):
    """BatchNorm (Ioffe and Szegedy, arXiv:1502.03167) over the rows of all ranks.

    Two differentiable all-reduces: the second sums the squares of centred values, for the variance.
    The ranks may have different numbers of rows.
    """

    process_group: dist.ProcessGroup | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return super().forward(input)
        self._check_input_dim(input)
        dims, shape = [0, *range(2, input.dim())], [-1, *[1] * (input.dim() - 2)]
        values = input if input.dtype == torch.float64 else input.float()
        count = values.new_full((1,), values.numel() // values.shape[1])  # by a kernel: no wait
        sums = _Total.apply(torch.cat([values.sum(dims), count]), self.process_group)
        mean, total = sums[:-1] / sums[-1], sums[-1].detach()
        centred = values - mean.view(shape)
        variance = _Total.apply(centred.square().sum(dims), self.process_group) / total
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
        return _Total.apply(gradient, ctx.group), None  # with a gradient of its own
