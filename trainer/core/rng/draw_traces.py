"""Traces of draws: what an update draws, and whether its code can draw from global generators.

A module can draw from these if its source imports one of them, or a module that can. So a model
that begins to draw late in a run is seeded from its first step on.

A dry run shows which draws grow with the rows. The *place* of the rows is the axis of a drawn
tensor that contains them.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import eq
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainer.base.python_code import owner_of_file
from trainer.core.blame import is_out_of_memory
from trainer.core.rng.functions import Sizes, answer

DRAWING = ("random", "numpy")
# packages that draw from neither in a step
NOT_DRAWING = ("torch", "trainer", "hydra", "omegaconf", "tensorboard", "rich", "typing_extensions")
# An import anywhere in a file, also in a text, and what runs code that is not seen here
_IMPORT = re.compile(
    r"(?m)(?:^|[;:])[ \t]*(?:from[ \t]+([.\w]+)[ \t]+import|import[ \t]+([^\n#;(]+))"
)
_DYNAMIC = re.compile(r"\b(?:__import__|import_module)\b|(?<![.\w])(?:exec|eval)\(")


def uses_global_rngs(modules: Iterable[str]) -> bool:
    """Return True if code of these modules, or of modules that they import, can draw from either.

    Of an installed package, whose modules are many, and of code without a file it is assumed.
    """
    waiting = {*modules}
    seen: set[str] = set()
    while new := {name for name in waiting - seen if not _is_known(name)}:
        if any(name.partition(".")[0] in DRAWING for name in new):
            return True
        seen |= new
        for name in new:
            path = Path(getattr(sys.modules.get(name), "__file__", None) or "")
            is_installed = owner_of_file(str(path)) in ("installed", "torch")
            if path.suffix != ".py" or is_installed or not path.is_file():
                return True
            text = path.read_text(encoding="utf-8", errors="replace")
            if _DYNAMIC.search(text):
                return True
            waiting |= {*_imported(text, name)}
    return False


def _is_known(name: str) -> bool:
    package = name.partition(".")[0]
    return package in NOT_DRAWING or (package in sys.stdlib_module_names and package not in DRAWING)


def _imported(text: str, name: str) -> Iterator[str]:
    """Yield the modules that a source imports, and those below them that are loaded."""
    package = getattr(sys.modules[name], "__package__", None) or ""
    for base, several in _IMPORT.findall(text):
        if several:
            yield from (each.split()[0] for each in several.split(",") if each.strip())
            continue
        level = len(base) - len(base.lstrip("."))
        parents = package.split(".")[: len(package.split(".")) - level + 1] if level else []
        whole = ".".join([*parents, *filter(None, [base.lstrip(".")])])
        yield whole
        if not _is_known(whole) and whole.partition(".")[0] not in DRAWING:
            yield from [other for other in sys.modules if other.startswith(f"{whole}.")]


Draw = tuple[str, Sizes]  # its name, and the sizes of the drawn tensor
IN_A_KERNEL: Sizes = (-1,)  # in place of sizes
Place = tuple[int, int]  # of the rows in a drawn tensor: their axis, and its entries per row
Grown = tuple[str, str, Place, Sizes]  # update, name of the draw, place, other sizes


class DrawTraces:
    """The draws that each update was seen to make, and the places of the rows in them."""

    def __init__(self) -> None:
        self.names: set[str] = set()  # of all draws noted
        self.has_global_draws = True  # the task can draw from Python's or numpy's generator
        self._noted: list[Draw] | None = None  # a list during a dry run
        self.used: dict[str, bool] = {}  # by update that was traced: True if it draws
        self._fixed: set[tuple[str, str, Sizes]] = set()
        self._counted: list[Draw] = []  # of the draws noted, those that have a number
        self._is_fixed: dict[str, list[bool]] = {}  # by update, for each draw in turn
        self._grown: set[Grown] = set()
        self._places: dict[tuple[str, str, Sizes, int], Place | None] = {}

    def leave_global_rngs(self) -> None:
        """Leave Python's and numpy's generators as they are: the task cannot draw from them."""
        self.has_global_draws = False

    @contextmanager
    def watched(self, update: str) -> Iterator[DrawWatch]:
        """Note that an update draws nothing if the block calls none of torch's random functions,
        and none before did."""
        with DrawWatch() as watch:
            yield watch
        if not watch.has_drawn:
            self.used.setdefault(update, False)

    def agree(self, update: str, most: Callable[[float], list[float]]) -> None:
        """Assume that an update draws if its dry run saw a draw on any rank."""
        self.used[update] = any(most(float(self.used.get(update, False))))

    def trace_draws(self, update: str, watch: Callable[[int], list[Draw]], unit: int) -> None:
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
                self.used[update] = True
        if len(seen) < len(sizes):
            return
        two, three = seen
        self._places.clear()  # found before this dry run
        self.used[update] = bool(two)
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
        """Add a draw to the list of a dry run, if there is one."""
        if self._noted is not None:
            self._noted.append((name, sizes))
            self.names.add(name)
            if is_counted:
                self._counted.append((name, sizes))

    def place(
        self, update: str, name: str, sizes: Sizes, rows: int, position: Callable[[], int]
    ) -> Place | None:
        """Return the place of the rows, preferably from a traced draw with equal other sizes.

        `position` returns the number of the draw, which tells a weight of this shape from an
        activation of so many rows.
        """
        key = (update, name, sizes, rows)
        if key not in self._places:
            self._places[key] = self._find_place(*key)
        place = self._places[key]
        if place is not None and key[:3] in self._fixed:
            fixed_flags, draw_index = self._is_fixed.get(update, []), position()
            return None if draw_index >= len(fixed_flags) or fixed_flags[draw_index] else place
        return place

    def _find_place(self, update: str, name: str, sizes: Sizes, rows: int) -> Place | None:
        fitting = []
        for *update_and_name, (axis, parts), others in self._grown:
            is_alike = (*update_and_name, len(others) + 1) == (update, name, len(sizes))
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


class DrawWatch(TorchFunctionMode):
    """A torch function mode that sees whether torch's random functions are called.

    They draw as without it: a lazy layer may initialise its weights in the block.
    """

    is_on = True

    def __init__(self) -> None:
        self.has_drawn = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not torch.compiler.is_compiling():
            return answer(self, func, args, kwargs or {})
        if func is torch.Tensor.unflatten:  # as in ExampleRng
            return torch.unflatten(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def numbers(self, name: str, sizes: Sizes, device: torch.device) -> None:
        self.has_drawn = True

    def by_micro_batch(self, name: str) -> int:
        """Return a seed for a kernel that draws internally."""
        self.has_drawn = True
        return int(torch.empty((), dtype=torch.int64, device="cpu").random_())


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
