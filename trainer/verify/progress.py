"""Progress of a layout: the step that its rank 0 has reached, told while one waits for it."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

NAME = "progress"
POLL_S = 0.2
EVERY_S = 10.0  # between two lines
LONG_S = 20.0  # a shorter estimate is not told


def note_step(folder: Path, step: int) -> None:
    """Note, on rank 0, that a step is done."""
    with suppress(OSError):
        (folder / NAME).write_text(str(step), encoding="utf-8")


def tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


@contextmanager
def followed(folder: Path, steps: int, num_runs: int, in_all: float) -> Iterator[None]:
    """Tell every few seconds how far a layout is, which trains `num_runs` times in the block.

    As soon as the time of a step is known, tell what `in_all` such layouts will take, unless 0.
    """
    path = folder / NAME
    path.unlink(missing_ok=True)
    is_over = threading.Event()
    follower = threading.Thread(
        target=_follow, args=(path, steps, num_runs, in_all, is_over), daemon=True
    )
    follower.start()
    try:
        yield
    finally:
        is_over.set()
        follower.join()


def _follow(path: Path, steps: int, num_runs: int, in_all: float, is_over: threading.Event) -> None:
    done = step = first = 0
    told = time.monotonic()
    began = 0.0  # when the first step, which compiles and proves, was done
    while not is_over.wait(POLL_S):
        last = step
        with suppress(OSError, ValueError):
            step = int(path.read_text(encoding="utf-8"))
        done += steps * (step < last)  # the next run has begun
        now = time.monotonic()
        if not began and step:
            began = now
            first = step
        elif in_all and step > first and not done:
            each = (now - began) / (step - first) * steps * num_runs
            if each * in_all > LONG_S:
                tell(f"  this takes {_about(each)}, all layouts {_about(each * in_all)}")
            in_all = 0.0
        if now - told >= EVERY_S and step:
            told = now
            tell(f"  step {done + step} of {steps * num_runs}")


def _about(seconds: float) -> str:
    return f"about {seconds:.0f} s" if seconds < 100 else f"about {seconds / 60:.0f} min"
