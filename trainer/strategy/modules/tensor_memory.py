"""The memory of a model's tensors: dense, and not shared with a trainable parameter.

torch's fused CPU optimizers walk the memory of a parameter as if it were dense: after 20 steps of
AdamW a slice was 0.22 off, and an expanded parameter corrupted the heap (torch 2.13).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainer.errors import ConfigError

COPY = "pass a copy of the tensor to nn.Parameter (.clone())"


@torch.no_grad()
def make_dense(model: nn.Module) -> None:
    """Copy each parameter and buffer whose memory has gaps, as a change of dtype would.

    Raises ConfigError for a trainable parameter that is complex, whose elements share memory, or
    that shares memory with another parameter or buffer. Tied weights are one parameter.
    """
    named = dict(_plain_tensors(model))
    for name, tensor in named.items():
        if tensor.requires_grad and tensor.layout is torch.strided:
            _check_elements(name, tensor)
    storages: dict[int, list[str]] = {}
    for name, tensor in named.items():
        if tensor.layout is torch.strided:
            storages.setdefault(tensor.untyped_storage()._cdata, []).append(name)
    for names in storages.values():
        _check_shared(named, names)
    for tensor in named.values():
        if tensor.layout is torch.strided and not is_dense(tensor):
            copied: Any = tensor.clone(memory_format=torch.contiguous_format)
            tensor.set_(copied)


def convert_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Convert the floating-point tensors of a model. Complex ones keep their dtype: Module.to
    would drop their imaginary parts, such as those of rotary positions."""
    if any(tensor.is_complex() for tensor in (*model.parameters(), *model.buffers())):
        model._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
    else:
        model.to(dtype=dtype)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if a tensor fills its memory without gaps, in any order of its axes."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _plain_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not is_lazy(tensor) and type(tensor) in (torch.Tensor, nn.Parameter):
            yield name, tensor


def _check_elements(name: str, tensor: torch.Tensor) -> None:
    given = f"build_model: the parameter {name}"
    if tensor.is_complex():
        advice = "store torch.view_as_real of it, and use torch.view_as_complex in forward"
        raise ConfigError(f"{given} is complex, which no strategy trains; {advice}")
    if not is_dense(tensor):
        places = _places(tensor)
        if len(places.unique()) < len(places):
            raise ConfigError(f"{given} has elements that share memory; {COPY}")


def _check_shared(named: Mapping[str, torch.Tensor], names: Sequence[str]) -> None:
    """Raise ConfigError if a trainable parameter overlaps another tensor in the same storage."""
    ranges = sorted((*_range(named[name]), name) for name in names if named[name].numel())
    for number, (_, end, one) in enumerate(ranges):
        for begin, _, other in ranges[number + 1 :]:
            if begin >= end:
                break
            is_trained = named[one].requires_grad or named[other].requires_grad
            if is_trained and _overlap(named[one], named[other]):
                what = f"{one} and {other} share memory, and are two tensors"
                advice = f"tie them as one nn.Parameter, or {COPY}"
                raise ConfigError(f"build_model: {what}; {advice}")


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool(torch.isin(_bytes(one), _bytes(other)).any())


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Return where a tensor begins and ends in its storage, in bytes."""
    begin = int(tensor.storage_offset())
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    end = begin + sum((size - 1) * stride for size, stride in axes) + 1
    return begin * tensor.itemsize, end * tensor.itemsize


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the places of a tensor's bytes in its storage."""
    first = (_places(tensor) + int(tensor.storage_offset())) * tensor.itemsize
    return (first[:, None] + torch.arange(tensor.itemsize)).flatten()


def _places(tensor: torch.Tensor) -> torch.Tensor:
    """Return the place of each element in memory, from the first one, in elements."""
    places = torch.zeros(1, dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = (places[:, None] + torch.arange(size) * stride).flatten()
    return places
