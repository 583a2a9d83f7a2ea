"""Keys of the random draws in a forward pass: a number for each call, and a key for each row."""

from __future__ import annotations

import numpy
import torch

from trainer.base.errors import ConfigError
from trainer.core.distributed import accelerator
from trainer.core.rng import mixed
from trainer.core.rng.philox import splitmix, splitmix_array

_COUNTER_STEP = 0x1E3779B97F4A7C15  # odd, so the counters of a row take all 2**64 values

MOST_DRAWS = 100_000  # for a row


@accelerator.fused
def seed_rows(indices: torch.Tensor) -> torch.Tensor:
    """Return (rows,) int64 from the indices of examples."""
    return splitmix(indices * _COUNTER_STEP + 1)


@accelerator.fused
def draw_bits(keys: torch.Tensor, call: int, counters: torch.Tensor) -> torch.Tensor:
    """Return (rows, counters) int64 of 64 random bits."""
    return splitmix((keys + call).unsqueeze(1) + counters)


@accelerator.fused
def draw_mask(
    keys: torch.Tensor,
    call: int,
    counters: torch.Tensor,
    width: int,
    last: int,
    value: float,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return (rows, width): `value` where 32 random bits are at most `last`, and 0 elsewhere."""
    bits = draw_bits(keys, call, counters)
    halves = torch.stack([bits << 32 >> 32, bits >> 32], dim=2).flatten(1)[:, :width]
    return ((halves <= last).to(dtype) * value).to(dtype)  # `value` may be 1.0 for bools


class CallCounter:
    """The seed of torch's generator, used as a counter of the calls for the current rows.

    The generator's state cannot be the counter: draws of other code change it by an amount that
    depends on the rows, so it would be different in all later calls.
    """

    def __init__(self) -> None:
        seed = torch.default_generator.initial_seed()
        self._seeds = [seed]  # of the calls, in their order
        self._positions = {seed: 0}  # of the calls, by seed

    def next(self, device: torch.device, is_shared: bool = False) -> int:
        """Return the number of this call, and change the seed.

        A call that is shared by all rows draws with torch's own generator of `device`.
        """
        seed = torch.default_generator.initial_seed()
        torch.default_generator.manual_seed(mixed(seed, 1))
        for generator in accelerator.generators(device)[1:] if is_shared else ():
            generator.manual_seed(mixed(seed, 1))
        return seed >> 1

    def position(self) -> int:
        """Return the number of calls so far."""
        seed = torch.default_generator.initial_seed()
        while seed not in self._positions:
            if len(self._seeds) > MOST_DRAWS:
                raise ConfigError("""run.dropout=example: the model seeds torch itself;
                    leave out torch.manual_seed in the forward pass""")
            self._find_next_seed()
        return self._positions[seed]

    def advance(self, position: int) -> None:
        """Continue as after so many calls."""
        while len(self._seeds) <= position:
            self._find_next_seed()
        torch.default_generator.manual_seed(self._seeds[position])

    def _find_next_seed(self) -> None:
        seed = mixed(self._seeds[-1], 1)
        self._positions[seed] = len(self._seeds)
        self._seeds.append(seed)


_NO_ROWS = torch.empty(0, dtype=torch.int64)


class RowKeys:
    """The keys of the current rows, from the indices of their examples.

    On a CPU they and their bits are computed by numpy, in a third of the time that torch takes. A
    dispatch mode, such as one of fake tensors, gets torch's operations, with the same bits.
    """

    def __init__(self) -> None:
        self.indices = _NO_ROWS
        self._keys: dict[torch.device, torch.Tensor] = {}
        self._array: numpy.ndarray | None = None
        self._counters: dict[torch.device, torch.Tensor] = {}
        self._counter_array = numpy.empty(0, dtype=numpy.uint64)

    def begin(self, indices: torch.Tensor) -> None:
        """Change to the rows of these examples."""
        self.indices = indices
        self._array = None
        self._keys.clear()

    def end(self) -> None:
        """Change to no rows."""
        self.indices = _NO_ROWS  # a slice would take 5 us, twice a step

    def on(self, device: torch.device) -> torch.Tensor:
        """Return (rows,) int64, the keys of the rows."""
        if device not in self._keys:
            self._keys[device] = seed_rows(self.indices.to(device))
        return self._keys[device]

    def bits(self, call: int, width: int, device: torch.device) -> torch.Tensor:
        """Return (rows, width) int64 of 64 random bits: a function of key, call and counter."""
        if _is_for_numpy(device):
            return torch.from_numpy(self._draw(call, width).view(numpy.int64))
        return draw_bits(self.on(device), call, self._count(width, device))

    def words(self, call: int, width: int, device: torch.device) -> torch.Tensor:
        """Return (rows, width) int32 of 32 random bits: halves of `bits`, the lower one first."""
        return self.bits(call, -(-width // 2), device).view(torch.int32)[:, :width]

    def mask(
        self,
        call: int,
        width: int,
        last: int,
        value: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> torch.Tensor:
        """Return (rows, width): `value` where 32 random bits are at most `last`, and 0 elsewhere.

        The bits are those of `words`.
        """
        pairs = -(-width // 2)
        if not _is_for_numpy(device):
            counters = self._count(pairs, device)
            return draw_mask(self.on(device), call, counters, width, last, value, dtype)
        is_kept = self._draw(call, pairs).view(numpy.int32)[:, :width] <= last
        if dtype == torch.bool:
            return torch.from_numpy(is_kept)
        wide = numpy.float64 if dtype == torch.float64 else numpy.float32
        return torch.from_numpy(is_kept * wide(value)).to(dtype)

    def _draw(self, call: int, width: int) -> numpy.ndarray:
        """Return (rows, width) uint64 of random bits."""
        if self._array is None:
            indices = self.indices.cpu().numpy().view(numpy.uint64)
            self._array = splitmix_array(indices * numpy.uint64(_COUNTER_STEP) + numpy.uint64(1))
        if len(self._counter_array) < width:
            counters = numpy.arange(width, dtype=numpy.uint64)
            self._counter_array = counters * numpy.uint64(_COUNTER_STEP)
        keys = self._array + numpy.uint64(call)
        return splitmix_array(keys[:, None] + self._counter_array[:width])

    def _count(self, width: int, device: torch.device) -> torch.Tensor:
        counters = self._counters.get(device)
        if counters is None or len(counters) < width:
            # not in the fused functions: a compiler may compute indices in 32 bits
            counters = torch.arange(width, device=device) * _COUNTER_STEP
            self._counters[device] = counters
        return counters[:width]


def _is_for_numpy(device: torch.device) -> bool:
    return device.type == "cpu" and not torch._C._len_torch_dispatch_stack()
