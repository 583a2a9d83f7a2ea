"""A request to stop: the handler sets a flag and does nothing else; the ranks agree on it at a step boundary."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

# torchrun passes Ctrl-C on as a second signal at once; only a later one is a person's second.
GRACE_S = 1.0


class StopRequest:
    """What this rank was asked: `name` of the signal, or None."""

    def __init__(self) -> None:
        self.name: str | None = None
        self._since = 0.0

    def __bool__(self) -> bool:
        return self.name is not None

    def receive(self, number: int, frame: object) -> None:
        if self.name is None:
            self.name, self._since = signal.Signals(number).name, time.monotonic()
        elif time.monotonic() - self._since > GRACE_S:
            os._exit(1)  # asked twice: at once. What is published stays valid


@contextmanager
def stop_requests() -> Iterator[StopRequest]:
    """Catch SIGINT, SIGTERM and SIGUSR1 while the block runs (in the main thread; elsewhere Python cannot)."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    before = {number: signal.signal(number, request.receive) for number in numbers}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class OneStepLate:
    """Small device tensors read by the host one push later, so that the device never waits for the question."""

    def __init__(self) -> None:
        self._pending: tuple[list[float] | torch.Tensor, torch.cuda.Event | None] | None = None

    def push(self, tensors: Sequence[torch.Tensor]) -> list[float] | None:
        """The values of the tensors pushed before, None the first time."""
        before = self.flush()
        if tensors[0].device.type == "cuda":
            copied = torch.cuda.Event()
            self._pending = (torch.cat(list(tensors)).to("cpu", non_blocking=True), copied)
            copied.record()
        else:
            self._pending = ([value for tensor in tensors for value in tensor.tolist()], None)
        return before

    def flush(self) -> list[float] | None:
        """The values of the last tensors pushed, once."""
        if self._pending is None:
            return None
        values, copied = self._pending
        self._pending = None
        if copied is not None:
            copied.synchronize()
        return values.tolist() if isinstance(values, torch.Tensor) else values
