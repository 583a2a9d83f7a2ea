"""Code objects of Python's functions."""

from __future__ import annotations

from collections.abc import Iterator
from types import CodeType


def names_in(code: CodeType) -> Iterator[str]:
    """Yield the names that a function's code uses, and those of the functions in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from names_in(constant)
