"""Loading: what a start imports, and its cost."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 300  # modules: torch has 900, its compiler 600, and both stay


@contextmanager
def uncollected() -> Iterator[None]:
    """Import without Python's cyclic garbage collector; also a decorator.

    It would look through all of torch again and again: 0.5 to 0.9 s of a start of 3.4 s.
    """
    was_enabled = gc.isenabled()
    before = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) - before > MANY:
            gc.freeze()  # a later collection need not look through them either
        if was_enabled:
            gc.enable()
