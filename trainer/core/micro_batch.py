"""Micro-batches and their rows: trees of tensors whose first axis is the batch's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from trainer.base.errors import ConfigError

MicroBatch = tuple[Any, Any]  # inputs and targets


class MicroBatches(Protocol):
    """This rank's micro-batches of a global batch, as `LocalBatch` yields them."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[MicroBatch]: ...


class Rows:
    """The rows that hooks are called with: their split, and their example indices once known."""

    def __init__(self) -> None:
        self.split = "train"
        self.indices: torch.Tensor | None = None

    def begin(self, split: str, indices: torch.Tensor) -> None:
        self.split = split
        self.indices = indices

    def __len__(self) -> int:
        return 0 if self.indices is None else len(self.indices)

    def named(self, row: int) -> str:
        assert self.indices is not None
        return f"{self.split} example {int(self.indices[row])}"


def count_rows(*trees: Any) -> int:
    """Return the number of rows: the first axis of the first tensor that has an axis.

    Every tensor is batch-first. Raises ConfigError if there is no such tensor.
    """
    for tree in trees:
        for leaf in [tree] if isinstance(tree, torch.Tensor) else tree_leaves(tree):
            if isinstance(leaf, torch.Tensor) and leaf.dim():
                return leaf.shape[0]
    raise ConfigError("neither targets nor outputs contain a tensor with a batch axis; one must")


def copied(batch: Any) -> Any:
    """Return a batch with copies of its tensors: a model or a loss may change them in place."""
    return tree_map_only(torch.Tensor, torch.clone, batch)


def take_rows(batch: Any, rows: int) -> Any:
    """Return `rows` rows of a batch; if it has fewer, repeat them from the first."""

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[torch.arange(rows) % len(tensor)] if tensor.dim() else tensor

    return tree_map_only(torch.Tensor, take, batch)


def slice_rows(batch: Any, first: int, last: int, count: int) -> Any:
    """Return the rows from `first` to `last` of a batch of `count` rows.

    Tensors of another length, which have no value per row, stay whole.
    """

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[first:last] if tensor.dim() and len(tensor) == count else tensor

    return tree_map_only(torch.Tensor, take, batch)
