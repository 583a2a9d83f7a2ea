"""Randomness as a function of its purpose, and keyed permutations."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy
import torch

from trainer.base.errors import ConfigError
from trainer.core.distributed import accelerator

Per = Literal["epoch", "run"]
_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    """Philox4x32-10 (Salmon et al., SC 2011, section 5.3).

    `counter` (4, n) and the result (4, n) are 32-bit values in int64. Integer arithmetic only,
    so CPU and CUDA give equal bits. The two multiplications of a round are one tensor operation.
    """
    multiplier, keys = _constants(key, counter.device)
    even = counter[0::2]
    odd = counter[1::2]
    for round_key in keys:
        product = even * multiplier  # wraps modulo 2**64: its 64 bits are exact
        even = ((product >> 32) & _MASK).flip(0) ^ odd ^ round_key
        odd = (product & _MASK).flip(0)
    return torch.stack([even[0], odd[0], even[1], odd[1]])


@lru_cache(maxsize=256)
def _constants(key: tuple[int, int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return multipliers and round keys, cached as tensors on the device.

    Creating a tensor from Python numbers is a copy to the GPU that blocks.
    """
    rounds = [[(key[i] + r * _WEYL[i]) & _MASK for i in (0, 1)] for r in range(10)]
    multiplier = torch.tensor(_MULTIPLIERS, device=device).unsqueeze(1)
    return multiplier, torch.tensor(rounds, device=device).unsqueeze(2)


@lru_cache(maxsize=1024, typed=True)  # 0.1 us instead of 3
def key_of(*parts: Any) -> int:
    """Return 64 bits from any values, `key_of(seed, "train", "flip")`; equal on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


@accelerator.fused
def draw_words(
    indices: torch.Tensor, epoch: int, blocks: int, multiplier: torch.Tensor, keys: torch.Tensor
) -> torch.Tensor:
    """Return (rows, 4 x blocks) of philox's words, by operations that a compiler can fuse."""
    index = indices.unsqueeze(1)
    block = torch.arange(blocks, device=index.device).expand(len(indices), blocks)
    words = [(index & _MASK).expand_as(block), index >> 32, torch.full_like(block, epoch), block]
    for round_key in keys.flatten(1):
        first, second = words[0] * multiplier[0], words[2] * multiplier[1]
        even = [second >> 32, first >> 32]
        words = [
            (even[0] & _MASK) ^ words[1] ^ round_key[0],
            second & _MASK,
            (even[1] & _MASK) ^ words[3] ^ round_key[1],
            first & _MASK,
        ]
    return torch.stack(words, dim=2).flatten(1)


class Random:
    """Random numbers for a micro-batch, one row per example.

    A row is keyed by (seed, split, name, epoch, example index), not by the order of calls. Rows are
    independent: code that mixes rows depends on the size of the micro-batch. `per="run"` gives
    every epoch the same numbers.
    """

    def __init__(self, seed: int, split: str, epoch: int, indices: torch.Tensor):
        self.epoch = epoch
        self.indices = indices
        self._seed = seed
        self._split = split

    def bits(self, name: str, *shape: int, per: Per = "epoch") -> torch.Tensor:
        """Return (rows, *shape) int64, with 32 random bits in each."""
        for size in shape:
            if not isinstance(size, int) or size < 0:
                raise ConfigError(f"""random:
                    {name!r} was drawn with the size {size!r}: must be an integer of at least 0""")
        rows, width = len(self.indices), math.prod(shape)
        key_bits = key_of(self._seed, self._split, name)
        key = (key_bits & _MASK, key_bits >> 32)
        epoch = self.epoch + 1 if per == "epoch" else 0
        words = self._words(key, epoch, -(-width // 4))
        return words[:, :width].reshape(rows, *shape)

    def _words(self, key: tuple[int, int], epoch: int, blocks: int) -> torch.Tensor:
        """Return (rows, 4 x blocks) int64, with 32 random bits in each."""
        device, rows = self.indices.device, len(self.indices)
        if accelerator.is_used(device):
            return draw_words(self.indices, epoch, blocks, *_constants(key, device))
        index = self.indices.unsqueeze(1).expand(rows, blocks).reshape(-1)
        block = torch.arange(blocks).expand(rows, blocks).reshape(-1)
        counter = torch.stack([index & _MASK, index >> 32, torch.full_like(index, epoch), block])
        return philox(counter, key).t().reshape(rows, blocks * 4)

    def uniform(self, name: str, *shape: int, per: Per = "epoch") -> torch.Tensor:
        """Return (rows, *shape) float32 in [0, 1), multiples of 2**-24."""
        return (self.bits(name, *shape, per=per) >> 8).to(torch.float32) * 2.0**-24

    def integers(
        self, name: str, low: int, high: int, *shape: int, per: Per = "epoch"
    ) -> torch.Tensor:
        """Return (rows, *shape) int64 in [low, high); high - low is at most 2**31."""
        return low + ((self.bits(name, *shape, per=per) * (high - low)) >> 32)

    def normal(self, name: str, *shape: int, per: Per = "epoch") -> torch.Tensor:
        """Return (rows, *shape) float32 with mean 0 and standard deviation 1 (Box and Muller).

        The bits are equal only on the same kind of device.
        """
        pair = self.bits(name, 2, *shape, per=per).to(torch.float64)
        radius = torch.sqrt(-2 * torch.log((pair[:, 0] + 1) * 2.0**-32))
        return (radius * torch.cos(pair[:, 1] * (2 * math.pi * 2.0**-32))).to(torch.float32)


_SPLITMIX = ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1))


def splitmix(state: torch.Tensor) -> torch.Tensor:
    """Turn each number of an int64 tensor into 64 random bits, in place, and return the tensor.

    splitmix64's finalizer (Steele et al., OOPSLA 2014). Integer arithmetic modulo 2**64 gives the
    same bits on every device.
    """
    shifted = torch.empty_like(state)
    for shift, factor in _SPLITMIX:
        torch.bitwise_right_shift(state, shift, out=shifted)
        state.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
        if factor != 1:
            state.mul_(factor)
    return state


def splitmix_array(state: numpy.ndarray) -> numpy.ndarray:
    """Do the same with an array of uint64, in a third of the time on a CPU."""
    shifted = numpy.empty_like(state)
    for shift, factor in _SPLITMIX:
        numpy.right_shift(state, numpy.uint64(shift), out=shifted)
        numpy.bitwise_xor(state, shifted, out=state)
        if factor != 1:
            numpy.multiply(state, numpy.uint64(factor % 2**64), out=state)
    return state


_WORD = 0xFFFFFFFF
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
        for round_index, key in enumerate(self._keys):
            if round_index % 2:
                right = (right + scramble(left, key)) % self.b
            else:
                left = (left + scramble(right, key)) % self.a
        return left * self.b + right

    def _decrypt(self, values: torch.Tensor) -> torch.Tensor:
        left, right = values // self.b, values % self.b
        for round_index, key in reversed([*enumerate(self._keys)]):
            if round_index % 2:
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
    mixed = (values ^ key) & _WORD
    mixed = ((mixed ^ (mixed >> 16)) * 0x45D9F3B5) & _WORD
    mixed = ((mixed ^ (mixed >> 15)) * 0x2C1B3C6D) & _WORD
    return (mixed ^ (mixed >> 16)) >> 1


class Order(Permutation):
    """The order of a plain epoch: a keyed permutation of range(size)."""

    def __init__(self, seed: int, epoch: int, size: int):
        super().__init__(size, seed, "order", epoch)
