"""Outcomes of steps, numbers and rows, which the host reads while the device computes on."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from trainer.distributed import accelerator

Result = TypeVar("Result")
Reading = Generator[torch.Tensor, torch.Tensor, Result]  # yields a tensor, gets it on the host


@dataclass(slots=True)
class Outcome:
    """Result of the updates of one step, summed over all ranks. `+` joins two outcomes.

    A part is, for one update, (2,) with the weight of its batch and the stop requests, and () that
    is 1 if the update was skipped.
    """

    parts: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    def __add__(self, other: Outcome) -> Outcome:
        return Outcome(self.parts + other.parts)


@dataclass(slots=True)
class StepReport:
    """An Outcome read by the host, the same on every rank."""

    has_weight: bool
    is_skipped: bool
    is_stop_requested: bool


class HostCopy:
    """Copies of tensors on the host, which arrive while the host does something else."""

    def __init__(self, tensors: Sequence[torch.Tensor]):
        self._event: torch.Event | None = None
        device = tensors[0].device
        if accelerator.is_used(device):
            tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
            own = accelerator.module(device)
            self._event = own.Event()
            self._event.record(own.current_stream(device))  # a rank may have several devices
        self._tensors = tensors

    def read(self, wait: Callable[[], None]) -> Sequence[torch.Tensor]:
        """Return the copies; `wait` is called before the host waits for the device."""
        if self._event is not None and not self._event.query():
            wait()
            self._event.synchronize()
        return self._tensors


class OneStepLate:
    """Outcomes read by the host one step later, so that the device never waits for the host."""

    def __init__(self, wait: Callable[[], None]) -> None:
        """`wait` is called before the host waits for the device."""
        self._wait = wait
        self._pending: HostCopy | None = None

    def push(self, outcome: Outcome) -> StepReport | None:
        """Return the report of the previous outcome, None the first time."""
        report = self.flush()
        self._pending = HostCopy([tensor for part in outcome.parts for tensor in part])
        return report

    def flush(self) -> StepReport | None:
        """Return the report of the last outcome; None if it was already returned."""
        if self._pending is None:
            return None
        numbers = self._pending.read(self._wait)
        has_weight = True
        is_skipped = is_stop_requested = False
        for totals, found_inf in zip(numbers[::2], numbers[1::2], strict=True):
            weight, stops = totals.tolist()
            has_weight &= weight != 0
            is_stop_requested |= stops > 0
            is_skipped |= found_inf.item() != 0
        self._pending = None
        return StepReport(has_weight, is_skipped, is_stop_requested)


class Later:
    """Work that reads numbers of the device a step after it asked for them.

    It is a generator that yields a tensor and gets a copy on the host; one that is there already it
    gets at once.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        """`wait` is called before the host waits for the device."""
        self._wait = wait
        self._under_way: list[tuple[Reading[None], HostCopy]] = []

    def begin(self, work: Reading[None]) -> None:
        self._go_on(work, None)

    def advance(self) -> None:
        """Go on with all work, by numbers that were asked for in the step before."""
        works, self._under_way = self._under_way, []
        if works:
            works[-1][1].read(self._wait)  # the host waits once: the others came before it
        for work, copy in works:
            self._go_on(work, copy.read(self._wait)[0])

    def finish(self) -> None:
        """Finish all work; the host waits for the device."""
        while self._under_way:
            self.advance()

    def _go_on(self, work: Reading[None], number: torch.Tensor | None) -> None:
        try:
            asked = next(work) if number is None else work.send(number)
            while not accelerator.is_used(asked.device):
                asked = work.send(asked)
        except StopIteration:
            return
        self._under_way.append((work, HostCopy([asked])))


class LateRows:
    """Rows by name, which reach the host while the next micro-batch is computed."""

    def __init__(self, device: torch.device):
        self.parts: dict[str, list[torch.Tensor]] = {}
        self._is_copied = accelerator.is_used(device)
        self._late: dict[str, HostCopy] = {}

    def add(self, named: Mapping[str, torch.Tensor]) -> None:
        self.settle()
        self._late = {name: HostCopy([values]) for name, values in named.items()}

    def settle(self) -> None:
        """Wait for the last micro-batch's, and free its pinned memory for the next ones."""
        for name, copy in self._late.items():
            (values,) = copy.read(lambda: None)
            self.parts.setdefault(name, []).append(values.clone() if self._is_copied else values)
        self._late = {}


def read_now(work: Reading[Result]) -> Result:
    """Return the result of work that reads numbers of the device; the host waits for them."""
    try:
        asked = next(work)
        while True:
            asked = work.send(asked.cpu())
    except StopIteration as end:
        return end.value
