"""The values of a reference model for each example, computed once and kept in the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch.utils._pytree import tree_map_only

from trainer.core.api import seed_all
from trainer.hf.file_digests import write_whole
from trainer.shards.cache import default_folder
from trainer.shards.long_work import watched


class ReferenceValues:
    """A file of values, an array of `shape`, for data and a model by their digests."""

    def __init__(self, digests: Sequence[str], shape: tuple[int, ...]):
        facts = (*digests, transformers.__version__)
        name = hashlib.sha256(repr(facts).encode()).hexdigest()[:40]
        self.path: Path = default_folder().expanduser() / "reference" / f"{name}.npy"
        self._shape = shape

    def read(self) -> np.ndarray | None:
        """Return the values; None if they are not there, or damaged."""
        try:
            values: np.ndarray = np.load(self.path)
        except (OSError, ValueError, EOFError):
            return None
        return values if values.shape == self._shape else None

    def write(self, values: np.ndarray) -> None:
        """Write the values. Raises OSError."""
        write_whole(self.path, partial(_save, values))


def _save(values: np.ndarray, path: Path) -> None:
    with path.open("wb") as file:
        np.save(file, values)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Build a model within the block with the initial weights of a run with this seed."""
    with torch.random.fork_rng(devices=[]):
        seed_all(seed)
        yield


@torch.no_grad()
def compute(
    model: Callable[..., torch.Tensor],
    inputs: Iterable[Mapping[str, Any]],
    device: torch.device,
    unit: str,
) -> np.ndarray:
    """Return what a model gives for each of some inputs, one after the other, in fp64.

    `unit` says how much one of them is, as progress is told.
    """
    outputs = []
    for each in watched(inputs, "computing the reference", unit):
        there = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), dict(each))
        outputs.append(model(**there).double().cpu())
    return torch.cat(outputs).numpy()
