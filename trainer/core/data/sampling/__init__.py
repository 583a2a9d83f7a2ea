"""Sampling: the examples of an epoch and their order, as a function of (seed, epoch)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import numpy as np
import torch

from trainer.base.errors import ConfigError
from trainer.core.rng.philox import Order

State = tuple[dict[str, Any], dict[str, torch.Tensor]]  # settings for JSON, and tensors


class IndexOrder(Protocol):
    """The order of one epoch."""

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the example indices at int64 `positions` of the epoch, of the same shape."""
        ...


class Sampling:
    """The examples that the epochs of a run take: `size` positions an epoch, over `num_examples`.

    `is_each_once`: an epoch takes each example once, but for the dropped tail, and the order has
    `invert(indices)`, their positions.
    """

    kind: ClassVar[str]
    is_each_once: ClassVar[bool] = False
    num_examples: int
    size: int

    def order(self, seed: int, epoch: int, global_batch: int) -> IndexOrder:
        raise NotImplementedError

    def state(self) -> State:
        """Return what `restore` needs to make this object again."""
        raise NotImplementedError

    @classmethod
    def restore(cls, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Sampling:
        raise NotImplementedError

    def describe(self) -> str:
        """Return words for the start of a run; empty for the plain shuffle."""
        return ""

    def replacement(self, index: int, count: int) -> int:
        """Return the example to take for one that cannot be read, nor the `count` from it on.

        It is the next one of the same group, or the group's first.
        """
        return (index + count) % self.num_examples

    def expect(self, epochs: float) -> tuple[float, float]:
        """Return how often `epochs` take an example: expected for the rarest and for the most
        frequent one."""
        return epochs, epochs


class Shuffle(Sampling):
    """Each example once an epoch, in the order of a keyed permutation of all of them."""

    kind = "shuffle"
    is_each_once = True

    def __init__(self, num_examples: int):
        self.num_examples = num_examples
        self.size = num_examples

    def order(self, seed: int, epoch: int, global_batch: int) -> Order:
        return Order(seed, epoch, self.size)

    def state(self) -> State:
        return {"num_examples": self.num_examples}, {}

    @classmethod
    def restore(cls, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Shuffle:
        return cls(settings["num_examples"])


def as_vector(values: Any, name: str, dtype: torch.dtype) -> torch.Tensor:
    """Return a list, array or tensor of numbers on the CPU.

    Raises ConfigError unless it has one axis and at least one number, integers if `dtype` has them.
    """
    try:
        # torch would round a list of floats to fp32
        array = values if isinstance(values, torch.Tensor) else np.array(values, order="C")
        vector = torch.as_tensor(array).detach().cpu().to_dense()
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError(f"{name}: must be numbers, and is a {type(values).__name__}") from None
    if vector.dim() != 1 or not len(vector):
        raise ConfigError(f"""{name}:
            must have one axis and at least one number, not shape {tuple(vector.shape)}""")
    dtype_name = str(vector.dtype).removeprefix("torch.")
    if vector.is_complex():
        raise ConfigError(f"{name}: must be real numbers, and is {dtype_name}")
    converted = vector.to(dtype)
    if not dtype.is_floating_point and vector.is_floating_point() and not converted.equal(vector):
        raise ConfigError(f"{name}: must be integers, and is {dtype_name} with fractions")
    return converted


def check_size(name: str, size: Any) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ConfigError(f"{name}={size!r}: must be an integer of at least 1")
