"""Random numbers as functions; here the seeds of the generators that hooks and layers draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainer.core.distributed import accelerator


def mixed(*parts: int) -> int:
    """Return 63 bits from integers, by splitmix64's finalizer: 1 us; hashing a string takes 3."""
    state = 0
    for part in parts:
        state = (state ^ part) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state >> 1


def seed_layers(seed: int, step: int, micro_batch_index: int, device: torch.device) -> None:
    """Seed torch's generators, which dropout uses, for a micro-batch of a global batch.

    Seeding them directly takes 1 us; torch.manual_seed visits every accelerator and takes 75 us.
    """
    value = mixed(seed, step, micro_batch_index)
    if device.type == "cpu":
        torch.default_generator.manual_seed(value)
        return
    for generator in accelerator.generators(device):
        generator.manual_seed(value)


def seed_step(seed: int, step: int, device: torch.device, has_global_draws: bool = True) -> None:
    """Seed every generator, alike on all ranks, for what `train_step` draws itself.

    Python's and numpy's only if the task `has_global_draws`.
    """
    seed_layers(seed, step, -1, device)
    if has_global_draws:
        seed_global_rngs(seed, step, -1)


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


def random_state() -> tuple[Any, ...]:
    """Return the states of the generators that `seed_example` seeds."""
    return *global_rngs(), torch.default_generator.get_state().numpy().tobytes()


def global_rngs() -> tuple[Any, ...]:
    """Return the states of Python's and, if it is imported, numpy's generator."""
    numpy = sys.modules.get("numpy")
    arrays = numpy.random.get_state()[1:3] if numpy is not None else ()
    drawn = [str(part) if isinstance(part, int) else part.tobytes() for part in arrays]
    return random.getstate(), *drawn


def seed_global_rngs(*parts: int) -> None:
    """Seed Python's and, if it is imported, numpy's generator."""
    value = mixed(*parts)
    random.seed(value)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(value & 0xFFFFFFFF)


def seed_example(seed: int, epoch: int, index: int) -> None:
    """Seed `random`, `torch` and, if it is imported, `numpy` for one example of a dataset."""
    torch.default_generator.manual_seed(mixed(seed, epoch, index))
    seed_global_rngs(seed, epoch, index)
