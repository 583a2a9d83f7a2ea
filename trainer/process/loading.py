"""Faster imports at startup: pause Python's garbage collector meanwhile."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 300  # modules: torch has 900, its compiler 600, and both stay loaded


@contextmanager
def uncollected() -> Iterator[None]:
    """Disable Python's cyclic garbage collector while importing. Also usable as a decorator.

    The collector would traverse all of torch many times: 0.5 to 0.9 s of a start of 3.4 s.
    """
    was_enabled = gc.isenabled()
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) - before > MANY:
            gc.freeze()  # later collections skip these objects
        if was_enabled:
            gc.enable()
