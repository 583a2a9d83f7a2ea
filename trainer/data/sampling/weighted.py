"""Weights: examples that an epoch takes more often than others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trainer.data.sampling.base import Sampling, State, as_vector, check_size
from trainer.errors import ConfigError
from trainer.rng.permutation import Permutation
from trainer.rng.philox import key_of


class Weighted(Sampling):
    """Each epoch takes `size` examples, an example as often as its weight asks for.

    Systematic sampling (Madow, 1949): `size` points at equal distances over the summed weights,
    from a random start in each epoch, in permuted order. An example is so taken as often as
    expected, rounded up or down; independent draws, as of torch's WeightedRandomSampler, would
    leave out a third of equally weighted examples. Equal weights take each example once.

        def sampling(self, split):
            return Weighted(self.counts.reciprocal()[self.labels])
    """

    kind = "weights"

    def __init__(self, weights: Any, size: int | None = None):
        """`weights` (examples,): not negative, in any unit; `size`: by default their number.

        Raises ConfigError for other weights.
        """
        self.weights = as_vector(weights, "weights", torch.float64)
        # the sum of finite ones may be infinite
        is_valid = self.weights.sum().isfinite() and bool((self.weights >= 0).all())
        if not is_valid or not self.weights.any():
            must = "must be finite, not negative, one at least above 0, and their sum finite"
            raise ConfigError(f"weights: {must}")
        self.num_examples = len(self.weights)
        self.size = self.num_examples if size is None else size
        check_size("size", self.size)
        # numpy adds one by one, so the sums are equal on every machine
        sums = torch.from_numpy(np.cumsum(self.weights.numpy()))
        self._shares = sums / sums[-1]
        self._last = int(self.weights.nonzero()[-1])

    def order(self, seed: int, epoch: int, global_batch: int) -> WeightedOrder:
        start = key_of(seed, "weights", epoch, "start") / 2**64
        return WeightedOrder(
            self._shares, self._last, Permutation(self.size, seed, "weights", epoch), start
        )

    def state(self) -> State:
        return {"size": self.size}, {"weights": self.weights}

    @classmethod
    def restore(cls, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Weighted:
        return cls(tensors["weights"], settings["size"])

    def describe(self) -> str:
        fewest, most = self.expect(1)
        return f"by weight, {self.size:,} an epoch, each {fewest:.3g} to {most:.3g} times"

    def replacement(self, index: int, count: int) -> int:
        """Return the next example with a weight above 0: the others may be held out."""
        turned = self.weights.roll(-(index + count))
        return (index + count + int((turned > 0).int().argmax())) % self.num_examples

    def expect(self, epochs: float) -> tuple[float, float]:
        expected = self.weights / self.weights.sum() * self.size * epochs
        return float(expected.min()), float(expected.max())


class WeightedOrder:
    """The order of one epoch."""

    def __init__(self, shares: torch.Tensor, last: int, shuffle: Permutation, start: float):
        self._shares = shares
        self._last = last
        self._shuffle = shuffle
        self._start = start

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the example indices at int64 `positions` of the epoch, of the same shape."""
        points = (self._shuffle(positions).double() + self._start) / self._shuffle.size
        return torch.searchsorted(self._shares, points, right=True).clamp(max=self._last)
