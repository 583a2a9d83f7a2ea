"""A torch mode that makes random draws in forward and loss a function of the example (law 11).

Each row has its own key: (seed, step, update, number of the call, example). Its random numbers
depend neither on the rank nor on the size of the micro-batch. The number of the call is the seed of
torch's own generator, which is the same at the start of every micro-batch of an update.
torch.utils.checkpoint restores that generator, so a recomputation draws the same masks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from trainer.core.distributed import accelerator
from trainer.core.micro_batch import Rows, take_rows
from trainer.core.rng import seed_global_rngs, seed_layers
from trainer.core.rng.compiled import answered_by, keep_eager
from trainer.core.rng.draw_traces import IN_A_KERNEL, Draw, DrawTraces
from trainer.core.rng.functions import Numbers, Part, Sizes, answer
from trainer.core.rng.keys import CallCounter, RowKeys
from trainer.core.rng.philox import key_of

_WITHOUT_DRAWS = nullcontext()
_key_of = lru_cache(key_of)  # of an update's name: 3 us for each micro-batch


class ExampleRng(TorchFunctionMode):
    """A torch function mode around forward, loss and backward: `with draws.update(name): ...`.

    A draw is keyed by example if one of its axes grows with the number of rows; `trace_draws` finds
    that axis. Any other draw, such as noise on a weight, is the same for the whole global batch.
    """

    def __init__(
        self, seed: int, device: torch.device, is_by_example: bool, is_compiled: bool = False
    ):
        self.rows = Rows()  # of the current micro-batch
        self._seed = seed
        self._device = device
        self.is_by_example = is_by_example
        self._update = ""
        self.is_entered = False
        self._begun = (0, 0, torch.empty(0, dtype=torch.int64))
        self._cuts: list[tuple[Part, ...]] = []
        self._calls = CallCounter()
        self._keys = RowKeys()
        self.traces = DrawTraces()
        self._answer = keep_eager(self, answer) if is_compiled and is_by_example else answer

    # Rows ---------------------------------------------------------------------------------------

    def begin(
        self, step: int, micro_batch_index: int, indices: torch.Tensor, split: str = "train"
    ) -> None:
        """Begin the draws for the rows of a micro-batch of the global batch."""
        self.rows.begin(split, indices)
        self._begun = (step, micro_batch_index, indices)
        self.begin_again(0, None)

    def begin_again(self, first: int, last: int | None) -> None:
        """Repeat the draws of the current micro-batch, for its rows from `first` to `last`."""
        step, micro_batch_index, indices = self._begun
        key = _key_of(self._update)
        if self.traces.has_global_draws:
            seed_global_rngs(self._seed, step, key)  # the same in all micro-batches
        seed_layers(self._seed, step, key if self.is_entered else micro_batch_index, self._device)
        if self.is_entered:
            self._begin_rows(indices[first:last])

    def _begin_rows(self, indices: torch.Tensor) -> None:
        self._keys.begin(indices)
        self._calls = CallCounter()

    def end(self) -> None:
        """Leave torch's functions unchanged until the next `begin`."""
        self._keys.end()

    # Updates ------------------------------------------------------------------------------------

    def is_known(self, name: str) -> bool:
        """Return True if this update needs no dry run."""
        return name in self.traces.used or not self.is_by_example

    def update(self, name: str) -> AbstractContextManager[None]:
        """Draw by example during one update; skip the mode if its dry run saw no draw."""
        self._update = name
        return self._entered() if self.traces.used.get(name) else _WITHOUT_DRAWS

    @contextmanager
    def _entered(self) -> Iterator[None]:
        self.is_entered = True
        try:
            with self, answered_by(self):
                yield
        finally:
            self.is_entered = False
            self.end()

    def trace_draws(
        self, name: str, compute: Callable[[Any, Any], Any], batch: Any, unit: int = 1
    ) -> None:
        """Find out what `compute(inputs, targets)` draws, and which axis of it grows with the rows.

        `compute` runs on 2 and on 3 times `unit` rows of `batch`. If it fails on these, a draw
        whose first axis is a multiple of the number of rows is keyed by example.
        """
        if not self.is_by_example:
            return

        def watch(rows: int) -> list[Draw]:
            return self.watch(partial(compute, *take_rows(batch, rows)), rows)

        self._update = name
        self.traces.trace_draws(name, watch, unit)

    def agree(self, name: str, most: Callable[[float], list[float]]) -> None:
        """Draw by example in an update if any rank saw a draw in its dry run.

        `most` returns the maximum over the ranks, as `Group.max` does.
        """
        if self.is_by_example:
            self.traces.agree(name, most)

    def watch(self, compute: Callable[[], Any], rows: int) -> list[Draw]:
        """Return the name and sizes of each draw of a computation on `rows` rows."""
        if not self.is_by_example:
            compute()
            return []
        self._begin_rows(torch.arange(rows))
        try:
            with self.traces.noting() as draws, self:
                compute()
        finally:
            self.end()
        return draws

    def divide(self, cuts: list[tuple[Part, ...]]) -> None:
        """Set the part of each draw that this rank keeps, by its number in a training pass."""
        self._cuts = cuts

    # Calls --------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not torch.compiler.is_compiling():
            return self._answer(self, func, args, kwargs or {})
        if func is torch.Tensor.unflatten:  # calls super(), where torch's compiler gives up
            return torch.unflatten(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))  # rng/compiled.py replaces it in the graph

    def numbers(self, name: str, sizes: Sizes, device: torch.device) -> Numbers | None:
        """Return random numbers for a draw of these sizes, or None if no axis contains the rows."""
        parts = self._parts()
        if parts:  # draw the row, and keep this rank's part of it
            whole = list(sizes)
            for axis, _, count in parts:
                whole[axis] *= count
            sizes = tuple(whole)
        self.traces.note(name, sizes)
        rows, position = len(self._keys.indices), self._calls.position
        place = self.traces.place(self._update, name, sizes, rows, position)
        call = self._calls.next(device, place is None)
        if place is None:
            return None
        return Numbers(self._keys, call, device, sizes, *place, parts)

    def _parts(self) -> tuple[Part, ...]:
        if not self._cuts or self._update == "eval":
            return ()
        draw_index = self.position()
        return self._cuts[draw_index] if draw_index < len(self._cuts) else ()

    # Several stages share the draws of a row --------------------------------------------------

    @property
    def is_on(self) -> bool:
        """True while draws are by example."""
        return len(self._keys.indices) > 0

    def position(self) -> int:
        """Return the number of draws for the current rows so far; 0 while draws are off."""
        return self._calls.position() if self.is_on else 0

    def advance(self, position: int) -> None:
        """Continue as after so many draws, which another rank made."""
        if self.is_on:
            self._calls.advance(position)

    def by_micro_batch(self, name: str) -> int:
        """Return the seed for a call whose kernel draws internally.

        Such calls have a count of their own, or later draws would have other numbers where they are
        made once for each row. It is the state of torch's generator, which a recomputation
        restores.
        """
        self.traces.note(name, IN_A_KERNEL, is_counted=False)
        position = torch.default_generator.initial_seed()
        count = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        return key_of(position, count, self._begun[1])

    def list_remarks(self) -> list[str]:
        """Return lines to print at the start of a run."""
        if "attention" in self.traces.names and accelerator.is_used(self._device):
            why = "fused kernels take no mask and are off; run.dropout=torch keeps them"
            return [f"dropout of attention by example: {why}"]
        return []
