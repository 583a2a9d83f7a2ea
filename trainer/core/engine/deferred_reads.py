"""Deferred reads: the host reads values of the device while the device keeps computing."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence

import torch

from trainer.base.errors import ConfigError
from trainer.core.distributed import accelerator

DeferredRead = Generator[torch.Tensor, torch.Tensor, None]  # yields a tensor, gets it on the host


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


class DeferredReads:
    """Work that reads numbers of the device a step after it asked for them.

    It is a generator that yields a tensor and gets a copy on the host; one that is there already it
    gets at once.
    """

    def __init__(self, wait: Callable[[], None]) -> None:
        """`wait` is called before the host waits for the device."""
        self._wait = wait
        self.under_way: list[tuple[DeferredRead, HostCopy]] = []

    def begin(self, work: DeferredRead) -> None:
        self._go_on(work, None)

    def advance(self) -> None:
        """Go on with all work, by numbers that were asked for in the step before."""
        works, self.under_way = self.under_way, []
        if works:
            works[-1][1].read(self._wait)  # the host waits once: the others came before it
        for work, copy in works:
            self._go_on(work, copy.read(self._wait)[0])

    def finish(self) -> None:
        """Finish all work; the host waits for the device."""
        while self.under_way:
            self.advance()

    def _go_on(self, work: DeferredRead, answer: torch.Tensor | None) -> None:
        try:
            asked = next(work) if answer is None else work.send(answer)
            while not accelerator.is_used(asked.device):
                asked = work.send(asked)
        except StopIteration:
            return
        self.under_way.append((work, HostCopy([asked])))


class DeferredRows:
    """Rows by name, which reach the host while the next micro-batch is computed."""

    def __init__(self, device: torch.device):
        self.parts: dict[str, list[torch.Tensor]] = {}
        self._is_copied = accelerator.is_used(device)
        self._late: dict[str, HostCopy] = {}

    def add(self, named: Mapping[str, torch.Tensor]) -> None:
        self.flush()
        self._late = {name: HostCopy([values]) for name, values in named.items()}

    def flush(self) -> None:
        """Wait for the last micro-batch's, and free its pinned memory for the next ones."""
        for name, copy in self._late.items():
            (values,) = copy.read(lambda: None)
            self.parts.setdefault(name, []).append(values.clone() if self._is_copied else values)
        self._late = {}


def join_rows(name: str, parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the rows of several micro-batches. Raises ConfigError if their shapes differ."""
    shapes = sorted({tuple(part.shape[1:]) for part in parts})
    if len(shapes) > 1:
        raise ConfigError(f"""predict(outputs) returned {name} with rows of shape {shapes[0]}
            and {shapes[-1]}: must be one shape; pad in collate, or return a value per row""")
    return torch.cat(list(parts))
