"""The mode in which forward and loss draw as a function of the example (law 11).

Each row's numbers have a key of their own: (seed, step, update, number of the call, example). They
depend neither on the rank nor on the size of the micro-batch. The number of the call is a number
from torch's own generator, which is seeded alike for every micro-batch of an update:
torch.utils.checkpoint puts the generator back, so that a recomputation draws the same masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from trainer.data.randomness import key_of, seed_layers, splitmix
from trainer.draws.rowwise import HANDLERS, REOPENED, Numbers

_STEP = 0x1E3779B97F4A7C15  # odd: the counters of a row walk through all of 2**64
Sizes = tuple[int, ...]
Place = tuple[int, int]  # the axis of the rows in what is drawn, and how many parts each row has


class Draws(TorchFunctionMode):
    """A mode of torch in which forward, loss and backward run: `with draws.update(name): ...`.

    A draw is keyed by example where an axis of it grows with the rows; `rehearse` finds out. Any
    other draw, such as noise on a weight, is the same for the whole global batch.
    """

    def __init__(self, seed: int, device: torch.device, is_by_example: bool):
        self.kernels: set[str] = set()  # that draw by themselves: keyed by the micro-batch
        self._names: set[str] = set()
        self._seed = seed
        self._device = device
        self._is_by_example = is_by_example
        self._used: dict[str, bool] = {}
        self._update = ""
        self._is_entered = False
        self._indices = torch.empty(0, dtype=torch.int64)
        self._begun = (0, 0, self._indices)
        self._keys: dict[torch.device, torch.Tensor] = {}
        self._counters: dict[tuple[int, torch.device], torch.Tensor] = {}
        self._noted: list[tuple[str, Sizes]] | None = None  # while it rehearses
        self._fixed: set[tuple[str, Sizes]] = set()
        self._grown: set[tuple[str, int, Place]] = set()

    # Rows ---------------------------------------------------------------------------------------

    def begin(self, step: int, number: int, indices: torch.Tensor) -> None:
        """Draw for the rows of a micro-batch, the `number`-th of the global batch, from now on."""
        self._begun = (step, number, indices)
        self.begin_again(0, len(indices))

    def begin_again(self, first: int, last: int) -> None:
        """Draw for some rows of the micro-batch that was begun, what was drawn for them before."""
        step, number, indices = self._begun
        if not self._is_entered:
            seed_layers(self._seed, step, number, self._device)
            return
        self._indices = indices[first:last]
        self._keys.clear()
        seed_layers(self._seed, step, key_of(self._update), self._device)

    def end(self) -> None:
        """Leave torch's functions as they are until the next `begin`."""
        self._indices = self._indices[:0]

    # Updates ------------------------------------------------------------------------------------

    def is_known(self, name: str) -> bool:
        """Does nothing have to be rehearsed for this update?"""
        return name in self._used or not self._is_by_example

    @contextmanager
    def update(self, name: str) -> Iterator[None]:
        """Draw for one update; entered only where its rehearsal saw a draw."""
        self._update = name
        self._is_entered = self._used.get(name, False)
        try:
            if self._is_entered:
                with self:
                    yield
            else:
                yield
        finally:
            self._is_entered = False
            self.end()

    def rehearse(
        self, name: str, compute: Callable[[Any, Any], Any], batch: Any, unit: int = 1
    ) -> None:
        """Find out what `compute(inputs, targets)` draws, and which axis grows with the rows.

        `compute` runs on 2 and on 3 times `unit` rows of `batch`. Where it takes no such number,
        any first axis that the rows divide is theirs.
        """
        if not self._is_by_example:
            return
        try:
            sizes = (2 * unit, 3 * unit)
            two, three = (self._watch(compute, take_rows(batch, rows), rows) for rows in sizes)
        except Exception:
            self._used[name] = True
            return
        self._used[name] = bool(two)
        self._fixed |= set(two) & set(three)
        self._grown |= _find_places(two, sizes[0]) & _find_places(three, sizes[1])

    def _watch(
        self, compute: Callable[[Any, Any], Any], batch: Any, rows: int
    ) -> list[tuple[str, Sizes]]:
        noted: list[tuple[str, Sizes]] = []
        self._noted = noted
        self._indices = torch.arange(rows)
        self._keys.clear()
        try:
            with self:
                compute(*batch)
        finally:
            self._noted = None
            self.end()
        return noted

    # Calls --------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        opened = REOPENED.get(func)
        if opened is not None:  # it draws inside, or runs a recomputation
            with self:
                return opened(*args, **kwargs)
        handler = HANDLERS.get(func)
        if handler is None or not len(self._indices):
            return func(*args, **kwargs)
        return handler(self, func, *args, **kwargs)

    def numbers(self, name: str, sizes: Sizes, device: torch.device) -> Numbers | None:
        """Numbers for a draw of these sizes; None where no axis of it is that of the rows."""
        self._note(name, sizes)
        place = self._place(name, sizes)
        if place is None:
            return None
        return Numbers(self, self.call_keys(device), sizes, *place)

    def call_keys(self, device: torch.device) -> torch.Tensor:
        """(rows,) int64: the rows' keys for the next call."""
        if device not in self._keys:
            self._keys[device] = splitmix(self._indices.to(device) * _STEP + 1)
        call = int(torch.empty((), dtype=torch.int64).random_())
        return self._keys[device] + call

    def counters(self, width: int, device: torch.device) -> torch.Tensor:
        """(width,) int64: a row's key plus these are its counters."""
        key = (width, device)
        if key not in self._counters:
            self._counters[key] = torch.arange(width, device=device) * _STEP
        return self._counters[key]

    def by_micro_batch(self, name: str) -> int:
        """The seed of a call whose kernel draws by itself."""
        self.kernels.add(name)
        self._note(name, ())
        return key_of(int(torch.empty((), dtype=torch.int64).random_()), self._begun[1])

    def _note(self, name: str, sizes: Sizes) -> None:
        if self._noted is not None:
            self._noted.append((name, sizes))
            self._names.add(name)

    def list_remarks(self) -> list[str]:
        """Lines that the start of a run shows."""
        remarks = [
            f"{name} draws inside its kernel: by micro-batch, and not by example"
            for name in sorted(self.kernels)
        ]
        if "attention" in self._names and self._device.type == "cuda":
            why = "torch's fused kernels take no mask for it; run.dropout=torch keeps them"
            remarks.append(f"dropout of attention by example: {why}")
        return remarks

    def _place(self, name: str, sizes: Sizes) -> Place | None:
        if (name, sizes) in self._fixed:
            return None
        rows = len(self._indices)
        for axis, size in enumerate(sizes):
            if (name, len(sizes), (axis, size // rows)) in self._grown and size % rows == 0:
                return axis, size // rows
        is_whole = bool(sizes) and sizes[0] > 0 and sizes[0] % rows == 0
        return (0, sizes[0] // rows) if is_whole else None


def take_rows(batch: Any, rows: int) -> Any:
    """So many rows of a batch; from the first on again where it has fewer."""

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[torch.arange(rows) % len(tensor)] if tensor.dim() else tensor

    return tree_map_only(torch.Tensor, take, batch)


def _find_places(noted: list[tuple[str, Sizes]], rows: int) -> set[tuple[str, int, Place]]:
    """Where the rows may be in each draw that was noted."""
    found = set()
    for name, sizes in noted:
        for axis, size in enumerate(sizes):
            if size and size % rows == 0:
                found.add((name, len(sizes), (axis, size // rows)))
    return found
