"""Data held as tensors on the device, where micro-batches are gathered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import torch
from torch.utils.data import TensorDataset

from trainer.base.errors import ConfigError
from trainer.core.data.order import IndexSampler

AHEAD_BYTES = 2**18  # most bytes gathered at once, unless one micro-batch is larger

Piece = tuple[Any, torch.Tensor]  # a micro-batch of the dataset, and its example indices


class ResidentDataset(TensorDataset):
    """Tensors with equal first axes, on any device, with a note on their origin.

    `source` is printed at the start. `digest`, if set, is saved in the checkpoint: a resume
    refuses data with another digest. Without one it compares the content at fixed places.
    """

    def __init__(self, *tensors: torch.Tensor, source: str = "", digest: str = ""):
        _check_tensors(tensors)
        super().__init__(*tensors)
        self.source = source
        self.digest = digest


def _check_tensors(tensors: tuple[Any, ...]) -> None:
    for index, tensor in enumerate(tensors, 1):
        must = f"argument {index} must be a tensor with a row for each example"
        if not isinstance(tensor, torch.Tensor):
            raise ConfigError(f"ResidentDataset: {must}, and is a {type(tensor).__name__}")
        if not tensor.dim():
            raise ConfigError(f"ResidentDataset: {must}, and is a scalar")
        if tensor.size(0) != tensors[0].size(0):
            raise ConfigError(f"""ResidentDataset: {must},
                and arguments 1 and {index} have {tensors[0].size(0)} and {tensor.size(0)} rows""")
    if not tensors:
        raise ConfigError("ResidentDataset: must have at least one tensor")


class ResidentLoader:
    """Loader that gathers rows of tensors on the device.

    Several small micro-batches are gathered at once: next to a small model, each gather costs as
    much as a layer.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], sampler: IndexSampler):
        """`tensors` are on the device."""
        self._tensors = tensors
        self._sampler = sampler

    def __iter__(self) -> Iterator[Piece]:
        row_bytes = max(1, sum(tensor[:1].nbytes for tensor in self._tensors))
        batches = iter(self._sampler)
        for first in batches:
            count = max(1, AHEAD_BYTES // (row_bytes * max(1, first.numel())))
            some = [first, *islice(batches, count - 1)]
            gathered, _ = self.read(torch.cat(some) if len(some) > 1 else first)
            sizes = [indices.numel() for indices in some]
            parts = [tensor.split(sizes) for tensor in gathered]
            yield from zip(zip(*parts, strict=True), some, strict=True)

    def read(self, indices: torch.Tensor, epoch: int = 0) -> Piece:
        """Return any examples as one micro-batch."""
        return tuple(tensor.index_select(0, indices) for tensor in self._tensors), indices

    def take_replaced(self) -> dict[str, int]:
        return {}  # rows of a tensor are always readable
