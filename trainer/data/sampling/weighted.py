"""Weights: examples that an epoch takes more often than others."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from trainer.data.order import BLOCK
from trainer.data.sampling.base import Sampling, State, as_vector, check_size
from trainer.errors import ConfigError
from trainer.rng.permutation import Permutation
from trainer.rng.philox import key_of


class Weighted(Sampling):
    """Each epoch takes `size` examples, an example as often as its weight asks for.

    Systematic sampling (Madow, 1949): `size` points at equal distances over the summed weights of
    the permuted examples take each as often as expected, rounded up or down. Independent draws, as
    of torch's WeightedRandomSampler, would leave out a third of equally weighted examples.

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

    def order(self, seed: int, epoch: int, global_batch: int) -> WeightedOrder:
        return _make_order(self, seed, epoch)

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


# A run asks for the order of an epoch several times at its start: 2 s for 10**7 examples.
@lru_cache(maxsize=2)
def _make_order(sampling: Weighted, seed: int, epoch: int) -> WeightedOrder:
    return WeightedOrder(sampling, seed, epoch)


@lru_cache(maxsize=1)
def _make_shares(sampling: Weighted, seed: int, era: int) -> tuple[Permutation, torch.Tensor]:
    """Return a permutation of the examples, and the sums of their weights in this order, to 1."""
    examples = Permutation(sampling.num_examples, seed, "weights", era, "examples")
    places = torch.arange(sampling.num_examples)
    weights = [sampling.weights[examples(some)] for some in places.split(BLOCK)]
    # numpy adds one by one, so the sums are equal on every machine
    sums = torch.from_numpy(np.cumsum(torch.cat(weights).numpy()))
    return examples, sums / sums[-1]


class WeightedOrder:
    """The order of one epoch.

    An era has as many epochs as take some `num_examples` rows, so that a permutation of all
    examples costs as much as the rows do. Their starts are equally far apart: of equal weights, the
    epochs of an era take each example about once.
    """

    def __init__(self, sampling: Weighted, seed: int, epoch: int):
        epochs = max(1, sampling.num_examples // sampling.size)
        era, number = divmod(epoch, epochs)
        self._examples, self._shares = _make_shares(sampling, seed, era)
        turn = int(Permutation(epochs, seed, "weights", era, "turns")(torch.tensor([number])))
        self._start = (turn + key_of(seed, "weights", era, "start") / 2**64) / epochs
        self._shuffle = Permutation(sampling.size, seed, "weights", epoch)
        self._last = int(torch.searchsorted(self._shares, 1.0))  # the others weigh nothing

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the example indices at int64 `positions` of the epoch, of the same shape."""
        points = (self._shuffle(positions).double() + self._start) / self._shuffle.size
        places = torch.searchsorted(self._shares, points, right=True).clamp(max=self._last)
        return self._examples(places)
