"""Rehearsals of random draws: dry runs of one update on few rows, without its effects.

A rehearsal shows which draws grow with the rows. The *place* of the rows is the axis of a drawn
tensor that contains them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import eq

from trainer.hook_errors import is_out_of_memory
from trainer.rng.functions import Sizes

Draw = tuple[str, Sizes]  # its name, and the sizes of the drawn tensor
Place = tuple[int, int]  # of the rows in a drawn tensor: their axis, and its entries per row
Grown = tuple[str, str, Place, Sizes]  # update, name of the draw, place, other sizes


class Rehearsals:
    """The draws that each update was seen to make, and the places of the rows in them."""

    def __init__(self) -> None:
        self.names: set[str] = set()  # of all draws noted
        self._noted: list[Draw] | None = None  # a list during a rehearsal
        self._used: dict[str, bool] = {}  # by update
        self._fixed: set[tuple[str, str, Sizes]] = set()
        self._counted: list[Draw] = []  # of the draws noted, those that have a number
        self._is_fixed: dict[str, list[bool]] = {}  # by update, for each draw in turn
        self._grown: set[Grown] = set()
        self._places: dict[tuple[str, str, Sizes, int], Place | None] = {}

    def has_draws(self, update: str) -> bool | None:
        """Return True if this update draws, or None before its rehearsal."""
        return self._used.get(update)

    def agree(self, update: str, most: Callable[[float], list[float]]) -> None:
        """Assume that an update draws if its rehearsal saw a draw on any rank."""
        self._used[update] = any(most(float(self._used[update])))

    def rehearse(self, update: str, watch: Callable[[int], list[Draw]], unit: int) -> None:
        """Learn what an update draws: `watch` returns the draws on 2 and on 3 times `unit` rows."""
        sizes = (2 * unit, 3 * unit)
        seen, counted = [], []
        for rows in sizes:  # both, if the first one fails too: another rank may take part in them
            try:
                seen.append(watch(rows))
                counted.append(self._counted)
            except Exception as error:
                if is_out_of_memory(error):
                    raise
                self._used[update] = True
        if len(seen) < len(sizes):
            return
        two, three = seen
        self._places.clear()  # found before this rehearsal
        self._used[update] = bool(two)
        self._fixed |= {(update, *each) for each in set(two) & set(three)}
        if list(map(_kind, counted[0])) == list(map(_kind, counted[1])):
            self._is_fixed[update] = list(map(eq, *counted))
        self._grown |= _find_places(update, two, sizes[0]) & _find_places(update, three, sizes[1])

    @contextmanager
    def noting(self) -> Iterator[list[Draw]]:
        """Provide a list to which `note` adds each draw."""
        noted: list[Draw] = []
        self._noted, self._counted = noted, []
        try:
            yield noted
        finally:
            self._noted = None

    def note(self, name: str, sizes: Sizes, is_counted: bool = True) -> None:
        """Add a draw to the list of a rehearsal, if there is one."""
        if self._noted is not None:
            self._noted.append((name, sizes))
            self.names.add(name)
            if is_counted:
                self._counted.append((name, sizes))

    def place(
        self, update: str, name: str, sizes: Sizes, rows: int, position: Callable[[], int]
    ) -> Place | None:
        """Return the place of the rows, preferably from a rehearsed draw with equal other sizes.

        `position` returns the number of the draw, which tells a weight of this shape from an
        activation of so many rows.
        """
        key = (update, name, sizes, rows)
        if key not in self._places:
            self._places[key] = self._find_place(*key)
        place = self._places[key]
        if place is not None and key[:3] in self._fixed:
            known, number = self._is_fixed.get(update, []), position()
            return None if number >= len(known) or known[number] else place
        return place

    def _find_place(self, update: str, name: str, sizes: Sizes, rows: int) -> Place | None:
        fitting = []
        for *known, (axis, parts), others in self._grown:
            is_alike = (*known, len(others) + 1) == (update, name, len(sizes))
            if is_alike and sizes[axis] == parts * rows:
                equal = sum(map(eq, others, sizes[:axis] + sizes[axis + 1 :]))
                fitting.append((equal, -axis, parts))
        if fitting:
            _, negative, parts = max(fitting)
            return -negative, parts
        is_fixed = (update, name, sizes) in self._fixed
        if sizes and sizes[0] and sizes[0] % rows == 0 and not is_fixed:
            return 0, sizes[0] // rows
        return None


def _kind(draw: Draw) -> tuple[str, int]:
    return draw[0], len(draw[1])


def _find_places(update: str, draws: list[Draw], rows: int) -> set[Grown]:
    """Return each axis of each draw that may contain the rows."""
    return {
        (update, name, (axis, size // rows), sizes[:axis] + sizes[axis + 1 :])
        for name, sizes in draws
        for axis, size in enumerate(sizes)
        if size and size % rows == 0
    }
