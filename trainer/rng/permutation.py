"""Keyed permutations: any position alone, in O(1) memory, with an inverse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from trainer.rng.philox import key_of

_MASK = 0xFFFFFFFF
ROUNDS = 8


class Permutation:
    """A permutation of range(size): a Feistel network over Z_a x Z_b with cycle walking.

    After Black and Rogaway, "Ciphers with arbitrary finite domains" (CT-RSA 2002).
    a = ceil(sqrt(size)) and b = ceil(size / a), so a * b exceeds the size by less than a, and
    few positions need a second encryption (a step of the cycle walk). `size` and `numbers` may be
    int64 tensors of the values' shape: each value then has its own range, and the permutation of
    its number.
    """

    def __init__(
        self, size: int | torch.Tensor, *purpose: Any, numbers: torch.Tensor | None = None
    ):
        """`purpose`, such as (seed, "order", epoch), is the key."""
        keys: Sequence[Any] = [key_of(*purpose, r) & 0x7FFFFFFF for r in range(ROUNDS)]
        if numbers is not None:
            keys = [scramble(numbers, key) for key in keys]
        self._set(size, _ceil_sqrt(size), keys)

    def _set(self, size: Any, a: Any, keys: Sequence[Any]) -> None:
        self.size = size
        self.a = a
        self.b = -(-size // a)
        self._keys = keys

    def __call__(self, positions: torch.Tensor) -> torch.Tensor:
        """Return the values at `positions`: int64 of any shape, in range(size)."""
        return self._walk(lambda own, values: own._encrypt(values), positions)

    def invert(self, values: torch.Tensor) -> torch.Tensor:
        """Return the positions of values."""
        return self._walk(lambda own, values: own._decrypt(values), values)

    def _walk(self, step: Any, values: torch.Tensor) -> torch.Tensor:
        values = step(self, values)
        while (outside := values >= self.size).any():
            values[outside] = step(self._only(outside), values[outside])
        return values

    def _only(self, chosen: torch.Tensor) -> Permutation:
        """Return the permutations of some of the values."""
        if isinstance(self.size, int):
            return self
        some = object.__new__(Permutation)
        keys = [key[chosen] if isinstance(key, torch.Tensor) else key for key in self._keys]
        some._set(self.size[chosen], self.a[chosen], keys)
        return some

    def _encrypt(self, values: torch.Tensor) -> torch.Tensor:
        left, right = values // self.b, values % self.b
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + scramble(left, key)) % self.b
            else:
                left = (left + scramble(right, key)) % self.a
        return left * self.b + right

    def _decrypt(self, values: torch.Tensor) -> torch.Tensor:
        left, right = values // self.b, values % self.b
        for number, key in reversed([*enumerate(self._keys)]):
            if number % 2:
                right = (right - scramble(left, key)) % self.b
            else:
                left = (left - scramble(right, key)) % self.a
        return left * self.b + right


def _ceil_sqrt(size: Any) -> Any:
    """Return an integer at or next to the root, at least 1; equal on every machine."""
    if isinstance(size, int):
        return math.isqrt(size - 1) + 1
    return size.double().sqrt().ceil().long().clamp(min=1)


def scramble(values: torch.Tensor, key: int | torch.Tensor) -> torch.Tensor:
    """Return 31 bits for each value, by a finalizer of MurmurHash3's form.

    Factors below 2**31 keep the products in int64.
    """
    mixed = (values ^ key) & _MASK
    mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B5) & _MASK
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & _MASK
    return (mixed ^ (mixed >> 16)) >> 1
