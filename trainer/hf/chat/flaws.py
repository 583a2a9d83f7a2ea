"""Rows that cannot be used: why, how many, and where the first one is."""

import json
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from trainer import ConfigError
from trainer.base.errors import visible

MOST_LEVELS = 100  # of lists and dicts in a value: each takes calls of Python, of at most 1,000


class Flaw(ValueError):
    """Why a row cannot be used: words that follow "3 rows", and what to do."""

    def __init__(self, what: str, advice: str):
        super().__init__(what, advice)
        self.what = what
        self.advice = advice


def too_long(most: int) -> Flaw:
    return Flaw(f"longer than {most:,} bytes", "divide or remove it")


@dataclass
class Flaws:
    """The flaws of a data set: how many rows have each, and where the first of them is."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, tuple[str, str]] = field(default_factory=dict)  # place and advice

    def add(self, location: str, flaw: Flaw) -> None:
        self.counts[flaw.what] += 1
        self.first.setdefault(flaw.what, (location, flaw.advice))

    def refuse(self, setting: str) -> None:
        """Raise ConfigError if there is one. `setting` is the key with its value."""
        if not self.counts:
            return
        what, (location, advice) = next(iter(self.first.items()))
        count = self.counts[what]
        others = self.counts.total() - count
        where = visible(location) if count == 1 else f"the first is {visible(location)}"
        where += f", {others:,} more have other flaws" if others else ""
        rows = f"{count:,} row{'s' * (count > 1)}"
        raise ConfigError(f"{setting}: {rows} {visible(what)} ({where}); {visible(advice)}")


def check_value(value: Any) -> None:
    """Raise Flaw for half a surrogate pair, which JSON can write and UTF-8 cannot, and for a value
    that is nested too deeply."""
    try:
        if isinstance(value, str):
            value.encode()
        else:
            json.dumps(value, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError:
        raise Flaw("not in UTF-8 (half a surrogate pair)", "write the character again") from None
    except (ValueError, RecursionError):
        raise _too_deep() from None
    if _is_deep(value, MOST_LEVELS):
        raise _too_deep()


def _too_deep() -> Flaw:
    return Flaw("nested too deeply", f"must be messages of a chat, of at most {MOST_LEVELS} levels")


def _is_deep(value: Any, most: int) -> bool:
    inner = value.values() if isinstance(value, dict) else value
    is_nested = isinstance(value, dict | list)
    return is_nested and (not most or any(_is_deep(each, most - 1) for each in inner))
