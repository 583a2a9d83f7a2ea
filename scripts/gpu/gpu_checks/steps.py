"""Observations of the steps of a task: waits of the host, launches, and a trace."""

from __future__ import annotations

import contextlib
import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from trainer import Trainer

OF_THE_OUTCOME = "engine/step.py"  # where the host may wait: for the step before
LAUNCH = re.compile(r"cu(da)?(LaunchKernel|LaunchCooperativeKernel|GraphLaunch)\w*")
COPY = re.compile(r"cu(da)?Mem(cpy|set)\w*")


@contextlib.contextmanager
def synchronizing_is(mode: str) -> Iterator[None]:
    """Set what torch does when the host waits for the GPU: default (nothing), warn or error."""
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("default")


class CountsWaits(Trainer):
    """Mixin: `waits` has the places where the host waits for the GPU, from the start of one step
    to the start of the next: with the batch, the step and its outcome.

    The wait for the outcome is not among them.
    """

    observed = 3

    def train_step(self, batch):
        if self.step == self.observed:
            self._window = contextlib.ExitStack()
            self._caught = self._window.enter_context(warnings.catch_warnings(record=True))
            warnings.simplefilter("always")
            self._window.enter_context(synchronizing_is("warn"))
        elif self.step == self.observed + 1:
            self._window.close()
            # turning it on warns too, from torch/cuda
            found = [w for w in self._caught if "called a synchronizing" in str(w.message)]
            places = [f"{'/'.join(Path(w.filename).parts[-2:])}:{w.lineno}" for w in found]
            self.waits = [place for place in places if not place.startswith(OF_THE_OUTCOME)]
        return super().train_step(batch)


class CountsLaunches(Trainer):
    """Mixin: `launches` and `copies` are those of one step and what belongs to it, by the
    profiler."""

    observed = 5

    def train_step(self, batch):
        if self.step == self.observed:
            self._profile = profiled()
            self._profile.start()
        elif self.step == self.observed + 1:
            self._profile.stop()
            events = self._profile.key_averages()
            self.launches = count_calls(events, LAUNCH)
            self.copies = count_calls(events, COPY)
        return super().train_step(batch)


def profiled() -> torch.profiler.profile:
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    return torch.profiler.profile(activities=activities)


def count_calls(events: Iterable[Any], names: re.Pattern[str]) -> int:
    return sum(event.count for event in events if names.fullmatch(event.key))


def synchronize() -> None:
    """Wait for the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Trace:
    """A profiler trace of a few steps of any loop, written to a file.

    `facts` has the launches per step, and the part of the time in which the GPU was busy.
    """

    def __init__(self, path: Path, first: int, num_steps: int):
        self.facts: dict[str, float] = {}
        self._path = path
        self._first = first
        self._num_steps = num_steps
        self._profile: Any = None
        self._began = 0.0

    def observe(self, step: int) -> None:
        """Begin or end after this step, if it is the first or the last one."""
        if step == self._first:
            synchronize()
            self._profile = profiled()
            self._profile.start()
            self._began = time.perf_counter()
        elif step == self._first + self._num_steps:
            synchronize()
            seconds = time.perf_counter() - self._began
            self._profile.stop()
            self._profile.export_chrome_trace(str(self._path))
            events = self._profile.key_averages()
            launches = count_calls(events, LAUNCH)
            busy = sum(event.self_device_time_total for event in events) / 1e6
            self.facts = {"launches": launches / self._num_steps, "busy": busy / seconds}


@contextlib.contextmanager
def observed_steps(observe: Callable[[int], None]) -> Iterator[None]:
    """Call `observe` with the number of steps in the block after each step of the optimizer that
    made most of them, the first of several."""
    steps: Counter[int] = Counter()
    most = 0

    def count(optimizer: Any, *_: Any) -> None:
        nonlocal most
        steps[id(optimizer)] += 1
        if steps[id(optimizer)] > most:
            most = steps[id(optimizer)]
            observe(most)

    hook = register_optimizer_step_post_hook(count)
    try:
        yield
    finally:
        hook.remove()
