"""Rows that cannot be used: why, how many, and where the first one is."""

from collections import Counter
from dataclasses import dataclass, field

from trainer import ConfigError
from trainer.errors import visible


class Flaw(ValueError):
    """Why a row cannot be used: words that follow "3 rows", and what to do."""

    def __init__(self, what: str, advice: str):
        super().__init__(what, advice)
        self.what = what
        self.advice = advice


@dataclass
class Flaws:
    """The flaws of a data set: how many rows have each, and where the first of them is."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, tuple[str, str]] = field(default_factory=dict)  # place and advice

    def add(self, place: str, flaw: Flaw) -> None:
        self.counts[flaw.what] += 1
        self.first.setdefault(flaw.what, (place, flaw.advice))

    def refuse(self, given: str) -> None:
        """Raise ConfigError if there is one. `given` is the setting and its value."""
        if not self.counts:
            return
        what, (place, advice) = next(iter(self.first.items()))
        count = self.counts[what]
        others = self.counts.total() - count
        more = f"; {others:,} more have other flaws" if others else ""
        where = visible(place) if count == 1 else f"the first is {visible(place)}"
        rows = f"{count:,} row{'s' * (count > 1)}"
        raise ConfigError(f"{given}: {rows} {visible(what)} ({where}); {visible(advice)}{more}")
