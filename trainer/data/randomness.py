"""Randomness as a function of what it is for, never of who draws it or when."""

from __future__ import annotations

import hashlib
import math
import random
import sys
from functools import lru_cache
from typing import Any, Literal

import torch

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)


def philox(counter: torch.Tensor, key: tuple[int, int]) -> torch.Tensor:
    """Philox4x32-10 (Salmon et al., SC 2011, section 5.3): counter (4, n) of 32-bit values in int64 -> bits (4, n).

    Integer arithmetic only, so CPU and CUDA give equal bits. The two multiplications of a round are one operation.
    """
    multiplier, keys = _constants(key, counter.device)
    even, odd = counter[0::2], counter[1::2]
    for round_key in keys:
        product = even * multiplier  # wraps modulo 2**64: its 64 bits are exact
        even = ((product >> 32) & _MASK).flip(0) ^ odd ^ round_key
        odd = (product & _MASK).flip(0)
    return torch.stack([even[0], odd[0], even[1], odd[1]])


@lru_cache(maxsize=256)
def _constants(key: tuple[int, int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Kept on the device: a small tensor made from Python numbers is a copy that a GPU waits for."""
    rounds = [[(key[i] + r * _WEYL[i]) & _MASK for i in (0, 1)] for r in range(10)]
    multiplier = torch.tensor(_MULTIPLIERS, device=device).unsqueeze(1)
    return multiplier, torch.tensor(rounds, device=device).unsqueeze(2)


def key_of(*parts: Any) -> int:
    """64 bits from any values by name, `key_of(seed, "train", "flip")`; equal on every machine and Python."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


class Random:
    """Random numbers for a micro-batch: one row per example, keyed by (seed, split, name, epoch, example index).

    A draw depends on its name and not on the order of calls. Rows are independent of each other; what mixes rows
    depends on the micro-batch size. `per="run"` leaves the epoch out: the same numbers in every epoch.
    """

    def __init__(self, seed: int, split: str, epoch: int, indices: torch.Tensor):
        self.epoch, self.indices = epoch, indices
        self._seed, self._split = seed, split

    def bits(self, name: str, *shape: int, per: Literal["epoch", "run"] = "epoch") -> torch.Tensor:
        """(rows, *shape) of 32 random bits each, as int64."""
        rows, width = len(self.indices), math.prod(shape)
        blocks = -(-width // 4)
        key = key_of(self._seed, self._split, name)
        index = self.indices.unsqueeze(1).expand(rows, blocks).reshape(-1)
        block = torch.arange(blocks, device=index.device).expand(rows, blocks).reshape(-1)
        epoch = torch.full_like(index, self.epoch + 1 if per == "epoch" else 0)
        counter = torch.stack([index & _MASK, index >> 32, epoch, block])
        words = philox(counter, (key & _MASK, key >> 32))
        return words.t().reshape(rows, blocks * 4)[:, :width].reshape(rows, *shape)

    def uniform(
        self, name: str, *shape: int, per: Literal["epoch", "run"] = "epoch"
    ) -> torch.Tensor:
        """(rows, *shape) float32 in [0, 1), multiples of 2**-24."""
        return (self.bits(name, *shape, per=per) >> 8).to(torch.float32) * 2.0**-24

    def integers(
        self, name: str, low: int, high: int, *shape: int, per: Literal["epoch", "run"] = "epoch"
    ) -> torch.Tensor:
        """(rows, *shape) int64 in [low, high); high - low at most 2**31."""
        return low + ((self.bits(name, *shape, per=per) * (high - low)) >> 32)

    def normal(
        self, name: str, *shape: int, per: Literal["epoch", "run"] = "epoch"
    ) -> torch.Tensor:
        """(rows, *shape) float32, mean 0 and deviation 1 (Box and Muller); equal bits on one kind of device only."""
        pair = self.bits(name, 2, *shape, per=per).to(torch.float64)
        radius = torch.sqrt(-2 * torch.log((pair[:, 0] + 1) * 2.0**-32))
        return (radius * torch.cos(pair[:, 1] * (2 * math.pi * 2.0**-32))).to(torch.float32)


def _mixed(*parts: int) -> int:
    """63 bits from integers (splitmix64's finalizer, chained): about 1 us, where a hash over text takes 3."""
    state = 0
    for part in parts:
        state = (state ^ part) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def seed_layers(seed: int, step: int, number: int, device: torch.device) -> None:
    """Seed what dropout draws from, for one micro-batch: `number` counts through the global batch, not the rank.

    The generators are seeded directly: torch.manual_seed visits every accelerator, 75 us a call against 1 us.
    """
    value = _mixed(seed, step, number)
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(value)


def seed_example(seed: int, epoch: int, index: int) -> None:
    """Seed `random`, `numpy` (when it is in use) and `torch` for one example of a user's dataset."""
    value = _mixed(seed, epoch, index)
    random.seed(value)
    torch.default_generator.manual_seed(value)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(value & _MASK)
