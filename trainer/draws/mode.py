"""The mode in which forward and loss draw as a function of the example (law 11).

Each row's numbers have a key of their own: (seed, step, update, number of the call, example). They
depend neither on the rank nor on the size of the micro-batch. The number of the call is the seed of
torch's own generator, which begins alike in every micro-batch of an update: torch.utils.checkpoint
puts the generator back, so that a recomputation draws the same masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import eq
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from trainer.data.randomness import key_of, mixed, seed_layers, splitmix
from trainer.draws.rowwise import HANDLERS, REOPENED, Numbers

_STEP = 0x1E3779B97F4A7C15  # odd: the counters of a row walk through all of 2**64
Sizes = tuple[int, ...]
Grown = tuple[str, str, "Place", Sizes]  # update, name, place, the other sizes
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
        self._counters: dict[torch.device, torch.Tensor] = {}
        self._places: dict[tuple[str, str, Sizes, int], Place | None] = {}
        self._noted: list[tuple[str, Sizes]] | None = None  # while it rehearses
        self._fixed: set[tuple[str, str, Sizes]] = set()
        self._grown: set[Grown] = set()

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
        self._update = name
        try:
            sizes = (2 * unit, 3 * unit)
            two, three = (self._watch(compute, take_rows(batch, rows), rows) for rows in sizes)
        except torch.OutOfMemoryError:
            raise
        except Exception:
            self._used[name] = True
            return
        self._places.clear()  # of what was found before this was known
        self._used[name] = bool(two)
        self._fixed |= {(name, *each) for each in set(two) & set(three)}
        self._grown |= _find_places(name, two, sizes[0]) & _find_places(name, three, sizes[1])

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
        call = self._next_call(device, place is None)
        if place is None:
            return None
        return Numbers(self, self.row_keys(call, device), sizes, *place)

    def _next_call(self, device: torch.device, is_shared: bool = False) -> int:
        """The number of this call: the generator's seed, which changes at each.

        Not its state: what other code draws would depend on the rows, and all after it.
        """
        call = torch.default_generator.initial_seed()
        torch.default_generator.manual_seed(mixed(call, 1))
        if is_shared and device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(mixed(call, 1))
        return call >> 1

    def row_keys(self, call: int, device: torch.device) -> torch.Tensor:
        """(rows,) int64: the rows' keys for a call."""
        if device not in self._keys:
            self._keys[device] = splitmix(self._indices.to(device) * _STEP + 1)
        return self._keys[device] + call

    def counters(self, width: int, device: torch.device) -> torch.Tensor:
        """(width,) int64: a row's key plus these are its counters."""
        known = self._counters.get(device)
        if known is None or len(known) < width:
            known = torch.arange(width, device=device) * _STEP
            self._counters[device] = known
        return known[:width]

    def by_micro_batch(self, name: str) -> int:
        """The seed of a call whose kernel draws by itself."""
        self.kernels.add(name)
        self._note(name, ())
        return key_of(self._next_call(torch.device("cpu")), self._begun[1])

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
        """The axis of the rows, by what the rehearsal saw: first a draw of the same other sizes."""
        key = (self._update, name, sizes, len(self._indices))
        if key not in self._places:
            self._places[key] = self._find_place(name, sizes)
        return self._places[key]

    def _find_place(self, name: str, sizes: Sizes) -> Place | None:
        if (self._update, name, sizes) in self._fixed:
            return None
        rows = len(self._indices)
        best = None
        most = -1
        for update, known, (axis, parts), others in self._grown:
            is_alike = (update, known, len(others) + 1) == (self._update, name, len(sizes))
            if not is_alike or sizes[axis] != parts * rows:
                continue
            equal = sum(map(eq, others, sizes[:axis] + sizes[axis + 1 :]))
            if (equal, -axis) > (most, -best[0] if best else 0):
                most = equal
                best = (axis, parts)
        if best is None and sizes and sizes[0] and sizes[0] % rows == 0:
            best = (0, sizes[0] // rows)
        return best


def take_rows(batch: Any, rows: int) -> Any:
    """So many rows of a batch; from the first on again where it has fewer."""

    def take(tensor: torch.Tensor) -> torch.Tensor:
        return tensor[torch.arange(rows) % len(tensor)] if tensor.dim() else tensor

    return tree_map_only(torch.Tensor, take, batch)


def _find_places(update: str, noted: list[tuple[str, Sizes]], rows: int) -> set[Grown]:
    """Where the rows may be in each draw that was noted."""
    found = set()
    for name, sizes in noted:
        for axis, size in enumerate(sizes):
            if size and size % rows == 0:
                others = sizes[:axis] + sizes[axis + 1 :]
                found.add((update, name, (axis, size // rows), others))
    return found
