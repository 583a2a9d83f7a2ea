"""Randomness as a function of its purpose, independent of rank and time."""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal

import torch

from trainer.distributed import accelerator
from trainer.errors import ConfigError

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

    A row is keyed by (seed, split, name, epoch, example index), so a draw depends on its name and
    not on the order of calls. Rows are independent: code that mixes rows depends on the size of
    the micro-batch. `per="run"` leaves the epoch out, so every epoch has the same numbers.
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
                given = f"{name!r} was drawn with the size {size!r}"
                raise ConfigError(f"random: {given}: must be an integer of at least 0")
        rows, width = len(self.indices), math.prod(shape)
        number = key_of(self._seed, self._split, name)
        key = (number & _MASK, number >> 32)
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


def mixed(*parts: int) -> int:
    """Return 63 bits from integers, by splitmix64's finalizer: 1 us; hashing a string takes 3."""
    state = 0
    for part in parts:
        state = (state ^ part) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def splitmix(state: torch.Tensor) -> torch.Tensor:
    """Turn each number of an int64 tensor into 64 random bits, in place, and return the tensor.

    splitmix64's finalizer (Steele et al., OOPSLA 2014). Integer arithmetic modulo 2**64 gives the
    same bits on every device.
    """
    shifted = torch.empty_like(state)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15), (31, 1)):
        torch.bitwise_right_shift(state, shift, out=shifted)
        state.bitwise_xor_(shifted.bitwise_and_((1 << (64 - shift)) - 1))
        if factor != 1:
            state.mul_(factor)
    return state


def seed_layers(seed: int, step: int, number: int, device: torch.device) -> None:
    """Seed torch's generators, which dropout uses, for micro-batch `number` of a global batch.

    Seeding them directly takes 1 us; torch.manual_seed visits every accelerator and takes 75 us.
    """
    value = mixed(seed, step, number)
    for generator in accelerator.generators(device):
        generator.manual_seed(value)


def seed_step(seed: int, step: int, device: torch.device) -> None:
    """Seed every generator, alike on all ranks, for what `train_step` draws itself."""
    seed_layers(seed, step, -1, device)
    seed_coins(seed, step, -1)


def seed_all(seed: int) -> None:
    """Seed torch's generators of all devices.

    Without an accelerator torch.manual_seed takes 5 ms to note the seed for one that may come.
    """
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:
        torch.default_generator.manual_seed(seed)


@contextmanager
def seed_generators(device: torch.device) -> Iterator[Callable[[int], None]]:
    """Yield a function that seeds torch's generators; restore their states at the end."""
    generators = accelerator.generators(device)
    states = [generator.get_state() for generator in generators]

    def seed(value: int) -> None:
        for generator in generators:
            generator.manual_seed(value & 0xFFFFFFFFFFFFFFFF)

    try:
        yield seed
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)


@contextmanager
def generators_kept(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Restore Python's, numpy's and torch's generators, of the CPU and of devices, at the end."""
    numpy = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), numpy and numpy.random.get_state()
    with accelerator.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(of_python)
            if numpy is not None:
                numpy.random.set_state(of_numpy)


def random_state() -> tuple[Any, ...]:
    """Return the states of the generators that `seed_example` seeds."""
    return *coins(), torch.default_generator.get_state().numpy().tobytes()


def coins() -> tuple[Any, ...]:
    """Return the states of Python's and, if it is imported, numpy's generator."""
    numpy = sys.modules.get("numpy")
    arrays = numpy.random.get_state()[1:3] if numpy is not None else ()
    drawn = [str(part) if isinstance(part, int) else part.tobytes() for part in arrays]
    return random.getstate(), *drawn


def seed_coins(*parts: int) -> None:
    """Seed Python's and, if it is imported, numpy's generator."""
    value = mixed(*parts)
    random.seed(value)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(value & _MASK)


def seed_example(seed: int, epoch: int, index: int) -> None:
    """Seed `random`, `torch` and, if it is imported, `numpy` for one example of a dataset."""
    torch.default_generator.manual_seed(mixed(seed, epoch, index))
    seed_coins(seed, epoch, index)
