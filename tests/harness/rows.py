"""Rows of a parametrized test."""

from collections.abc import Iterable
from typing import Any

import pytest


def slow_but(rows: Iterable[Any], *quick: Any) -> list:
    """Return the rows of which all are slow but `quick`. A row of several values is a tuple."""
    rows = list(rows)
    assert all(row in rows for row in quick), quick
    return [row if row in quick else _slow(row) for row in rows]


def _slow(row: Any) -> Any:
    return pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.slow)
