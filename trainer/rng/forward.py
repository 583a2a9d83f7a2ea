"""A torch mode that makes random draws in forward and loss a function of the example (law 11).

Each row has its own key: (seed, step, update, number of the call, example). Its random numbers
depend neither on the rank nor on the size of the micro-batch. The number of the call is the seed of
torch's own generator, which is the same at the start of every micro-batch of an update.
torch.utils.checkpoint restores that generator, so a recomputation draws the same masks.

A *rehearsal* is a dry run of one update on few rows: it shows which draws grow with the rows. The
*place* of the rows is the axis of a drawn tensor that contains them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import eq
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainer.errors import ConfigError
from trainer.hook_errors import Rows
from trainer.micro_batch import take_rows
from trainer.rng.functions import HANDLERS, REOPENED, Numbers, Part
from trainer.rng.philox import key_of, mixed, seed_layers, splitmix

_STEP = 0x1E3779B97F4A7C15  # odd, so the counters of a row take all 2**64 values
Sizes = tuple[int, ...]
Grown = tuple[str, str, "Place", Sizes]  # update, name of the draw, place, other sizes
Place = tuple[int, int]  # of the rows in a drawn tensor: their axis, and its entries per row
MOST_DRAWS = 100_000  # for a row


class Draws(TorchFunctionMode):
    """A torch function mode around forward, loss and backward: `with draws.update(name): ...`.

    A draw is keyed by example if one of its axes grows with the number of rows; `rehearse` finds
    that axis. Any other draw, such as noise on a weight, is the same for the whole global batch.
    """

    def __init__(self, seed: int, device: torch.device, is_by_example: bool):
        self.kernels: set[str] = set()  # that draw internally: keyed by micro-batch
        self._names: set[str] = set()
        self._seed = seed
        self._device = device
        self._is_by_example = is_by_example
        self._used: dict[str, bool] = {}
        self._update = ""
        self._is_entered = False
        self._indices = torch.empty(0, dtype=torch.int64)
        self._begun = (0, 0, self._indices)
        self.rows = Rows()  # of the current micro-batch
        self._seeds = [0]  # of the calls for the current rows, in their order
        self._numbers: dict[int, int] = {}  # of the calls, by seed
        self._cuts: list[tuple[Part, ...]] = []
        self._keys: dict[torch.device, torch.Tensor] = {}
        self._counters: dict[torch.device, torch.Tensor] = {}
        self._places: dict[tuple[str, str, Sizes, int], Place | None] = {}
        self._noted: list[tuple[str, Sizes]] | None = None  # a list during a rehearsal
        self._fixed: set[tuple[str, str, Sizes]] = set()
        self._grown: set[Grown] = set()

    # Rows ---------------------------------------------------------------------------------------

    def begin(self, step: int, number: int, indices: torch.Tensor, split: str = "train") -> None:
        """Begin the draws for the rows of a micro-batch, the `number`-th of the global batch."""
        self.rows.begin(split, indices)
        self._begun = (step, number, indices)
        self.begin_again(0, len(indices))

    def begin_again(self, first: int, last: int) -> None:
        """Repeat the draws of the current micro-batch, for its rows from `first` to `last`."""
        step, number, indices = self._begun
        if not self._is_entered:
            seed_layers(self._seed, step, number, self._device)
            return
        seed_layers(self._seed, step, key_of(self._update), self._device)
        self._begin_rows(indices[first:last])

    def _begin_rows(self, indices: torch.Tensor) -> None:
        self._indices = indices
        self._keys.clear()
        self._seeds = [torch.default_generator.initial_seed()]
        self._numbers = {self._seeds[0]: 0}

    def end(self) -> None:
        """Leave torch's functions unchanged until the next `begin`."""
        self._indices = self._indices[:0]

    # Updates ------------------------------------------------------------------------------------

    def is_known(self, name: str) -> bool:
        """Return True if this update needs no rehearsal."""
        return name in self._used or not self._is_by_example

    @contextmanager
    def update(self, name: str) -> Iterator[None]:
        """Draw by example during one update; skip the mode if its rehearsal saw no draw."""
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
        """Find out what `compute(inputs, targets)` draws, and which axis of it grows with the rows.

        `compute` runs on 2 and on 3 times `unit` rows of `batch`. If it fails on these, a draw
        whose first axis is a multiple of the number of rows is keyed by example.
        """
        if not self._is_by_example:
            return
        self._update = name
        sizes = (2 * unit, 3 * unit)
        seen = []
        for rows in sizes:  # both, if the first one fails too: another rank may take part in them
            try:
                seen.append(self._watch(compute, take_rows(batch, rows), rows))
            except torch.OutOfMemoryError:
                raise
            except Exception:
                self._used[name] = True
        if len(seen) < len(sizes):
            return
        two, three = seen
        self._places.clear()  # found before this rehearsal
        self._used[name] = bool(two)
        self._fixed |= {(name, *each) for each in set(two) & set(three)}
        self._grown |= _find_places(name, two, sizes[0]) & _find_places(name, three, sizes[1])

    def agree(self, name: str, most: Callable[[float], list[float]]) -> None:
        """Draw by example in an update if any rank saw a draw in its rehearsal.

        `most` returns the maximum over the ranks, as `Group.max` does.
        """
        if self._is_by_example:
            self._used[name] = any(most(float(self._used[name])))

    def watch(self, compute: Callable[[], Any], rows: int) -> list[tuple[str, Sizes]]:
        """Return the name and sizes of each draw of a computation on `rows` rows."""
        if not self._is_by_example:
            compute()
            return []
        return self._watch(compute, (), rows)

    def divide(self, cuts: list[tuple[Part, ...]]) -> None:
        """Set the part of each draw that this rank keeps, by its number in a training pass."""
        self._cuts = cuts

    def _watch(self, compute: Callable[..., Any], batch: Any, rows: int) -> list[tuple[str, Sizes]]:
        noted: list[tuple[str, Sizes]] = []
        self._noted = noted
        self._begin_rows(torch.arange(rows))
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
        if opened is not None:  # it draws inside, or runs a recomputation that draws
            with self:
                return opened(*args, **kwargs)
        handler = HANDLERS.get(func)
        if handler is None or not len(self._indices):
            return func(*args, **kwargs)
        return handler(self, func, *args, **kwargs)

    def numbers(self, name: str, sizes: Sizes, device: torch.device) -> Numbers | None:
        """Return random numbers for a draw of these sizes, or None if no axis contains the rows."""
        parts = self._parts()
        if parts:  # draw the row, and keep this rank's part of it
            whole = list(sizes)
            for axis, _, count in parts:
                whole[axis] *= count
            sizes = tuple(whole)
        self._note(name, sizes)
        place = self._place(name, sizes)
        call = self._next_call(device, place is None)
        if place is None:
            return None
        return Numbers(self, self.row_keys(call, device), sizes, *place, parts)

    def _parts(self) -> tuple[Part, ...]:
        if not self._cuts or self._update == "eval":
            return ()
        number = self.position()
        return self._cuts[number] if number < len(self._cuts) else ()

    # Several stages share the draws of a row --------------------------------------------------

    @property
    def is_on(self) -> bool:
        """True while draws are by example."""
        return len(self._indices) > 0

    def position(self) -> int:
        """Return the number of draws for the current rows so far; 0 while draws are off."""
        if not self.is_on:
            return 0
        seed = torch.default_generator.initial_seed()
        while seed not in self._numbers:
            if len(self._seeds) > MOST_DRAWS:
                advice = "leave out torch.manual_seed in the forward pass"
                raise ConfigError(f"run.dropout=example: the model seeds torch itself; {advice}")
            self._find_next_seed()
        return self._numbers[seed]

    def advance(self, position: int) -> None:
        """Continue as after so many draws, which another rank made."""
        if not self.is_on:
            return
        while len(self._seeds) <= position:
            self._find_next_seed()
        torch.default_generator.manual_seed(self._seeds[position])

    def _find_next_seed(self) -> None:
        self._seeds.append(mixed(self._seeds[-1], 1))
        self._numbers[self._seeds[-1]] = len(self._seeds) - 1

    def _next_call(self, device: torch.device, is_shared: bool = False) -> int:
        """Return the number of this call, from the seed of torch's generator, and change the seed.

        The generator's state cannot be the number: draws of other code change it by an amount that
        depends on the rows, so it would be different in all later calls.
        """
        call = torch.default_generator.initial_seed()
        torch.default_generator.manual_seed(mixed(call, 1))
        if is_shared and device.type == "cuda":
            torch.cuda.default_generators[device.index or 0].manual_seed(mixed(call, 1))
        return call >> 1

    def row_keys(self, call: int, device: torch.device) -> torch.Tensor:
        """Return (rows,) int64, the keys of the rows for a call."""
        if device not in self._keys:
            self._keys[device] = splitmix(self._indices.to(device) * _STEP + 1)
        return self._keys[device] + call

    def counters(self, width: int, device: torch.device) -> torch.Tensor:
        """Return (width,) int64: a row's key plus these are the counters of its numbers."""
        known = self._counters.get(device)
        if known is None or len(known) < width:
            known = torch.arange(width, device=device) * _STEP
            self._counters[device] = known
        return known[:width]

    def by_micro_batch(self, name: str) -> int:
        """Return the seed for a call whose kernel draws internally."""
        self.kernels.add(name)
        self._note(name, ())
        return key_of(self._next_call(torch.device("cpu")), self._begun[1])

    def _note(self, name: str, sizes: Sizes) -> None:
        if self._noted is not None:
            self._noted.append((name, sizes))
            self._names.add(name)

    def list_remarks(self) -> list[str]:
        """Return lines to print at the start of a run."""
        remarks = [
            f"{name} draws inside its kernel: keyed by micro-batch, not by example"
            for name in sorted(self.kernels)
        ]
        if "attention" in self._names and self._device.type == "cuda":
            why = "fused kernels take no mask and are off; run.dropout=torch keeps them"
            remarks.append(f"dropout of attention by example: {why}")
        return remarks

    def _place(self, name: str, sizes: Sizes) -> Place | None:
        """Return the place of the rows, preferably from a rehearsed draw with equal other sizes."""
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


def _find_places(update: str, noted: list[tuple[str, Sizes]], rows: int) -> set[Grown]:
    """Return each axis of each noted draw that may contain the rows."""
    places = set()
    for name, sizes in noted:
        for axis, size in enumerate(sizes):
            if size and size % rows == 0:
                others = sizes[:axis] + sizes[axis + 1 :]
                places.add((update, name, (axis, size // rows), others))
    return places
