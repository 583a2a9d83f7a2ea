"""Numbers for people: rounded and with units, and in full for a tooltip."""

from __future__ import annotations

import math
from dataclasses import dataclass

TITLES = {
    "optim/lr": "learning rate",
    "optim/grad_norm": "gradient norm",
    "speed/examples_per_s": "examples/s",
    "speed/memory_gb": "memory (GB)",
    "speed/reserved_gb": "memory reserved (GB)",
    "speed/mfu": "model FLOP/s utilization",
}
PERCENT = ("acc", "accuracy", "top1", "top5")  # ends of names of values from 0 to 1


@dataclass(frozen=True)
class Cell:
    """A value of a table or a card. `exact` is all of it, for a tooltip and for sorting.

    `color` is that of a run's curve, as a place in the palette.
    """

    text: str
    exact: str = ""
    is_number: bool = False
    color: int | None = None

    @classmethod
    def number(cls, value: float | None, name: str = "") -> Cell:
        """Return a value of the curve `name`."""
        return cls("") if value is None else cls(shown(name, value), exact(value), True)


def spoken(name: str) -> str:
    """Return a curve's name for people: `bits per byte`."""
    return TITLES.get(name, name.replace("_", " "))


def exact(value: float) -> str:
    """Return all digits of a value."""
    return repr(float(value)) if isinstance(value, float) else str(value)


def shown(name: str, value: float) -> str:
    """Return a value of the curve `name` with four digits: `82.2 %`, `0.6930`, `12,340`."""
    if not abs(value) < math.inf:  # it may be an integer that no float can hold
        return "not finite"
    if _is_percent(name, value):
        return f"{100 * value:.1f} %"
    return rounded(name, value, 4, is_short=name.startswith(("optim/", "speed/")))


def rounded(name: str, value: float, digits: int = 6, is_short: bool = True) -> str:
    """Return a value of the curve `name`: `0.002`, `80 %`, `8.6e-08`; a short one ends in no 0."""
    if _is_percent(name, value):
        return f"{rounded('', 100 * value)} %"
    if value and not 1e-4 <= abs(value) < 1e15:
        return f"{value:.{min(digits, 3)}g}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text and is_short else text


def _is_percent(name: str, value: float) -> bool:
    return name.endswith(PERCENT) and 0 <= value <= 1


def duration(seconds: float) -> str:
    """Return `84 s`, `2 min 5 s` or `3 h 20 min`."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s" if whole >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"
