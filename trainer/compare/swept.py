"""A sweep on a page: settings that differ, means over seeds, and the best value by setting."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev

from trainer.compare.differences import Change
from trainer.config.schema import LAYOUT
from trainer.report.charts import MOST_LINES, Axis, Chart, Line
from trainer.report.numbers import Cell, spoken
from trainer.report.page import Section
from trainer.report.reading import RunFiles

MOST_COLUMNS = 6  # of settings in a table of runs
SEED = "run.seed"
WIDE = 8.0  # largest to smallest value of a setting on a logarithmic axis


class Swept:
    """Runs by the settings of the run that differ: `columns`, unless there are too many.

    `order` are the runs' numbers, the best first if they are a study: three or more, with columns.
    `colors` are those of their curves, one for all seeds of a study, as far as there are colours.
    """

    def __init__(self, runs: Sequence[RunFiles], settings: Sequence[Change]):
        own = [change for change in settings if not change.name.startswith(LAYOUT)]
        own.sort(key=lambda change: change.name == SEED)
        self.columns = own if len(own) <= MOST_COLUMNS else []
        self.is_study = len(runs) > 2 and bool(self.columns)
        self._runs = runs
        self._values = {n: each.best[1] for n, each in enumerate(runs) if each.best}
        self._sign = -1 if runs[0].settings.get("checkpoint.best_mode") == "max" else 1
        self.order = [*range(len(runs))]
        if self.is_study:
            rank = {n: self._sign * value for n, value in self._values.items()}
            self.order.sort(key=lambda n: rank.get(n, math.inf))
        keys = {n: self._key(n, [SEED]) if self.is_study else (str(n),) for n in self.order}
        places = {key: place for place, key in enumerate(dict.fromkeys(keys.values()))}
        self.colors = {n: places[key] for n, key in keys.items() if places[key] < MOST_LINES}

    @property
    def metric(self) -> str:
        return spoken(self._runs[0].metric_name)

    def best(self, number: int) -> Cell:
        """Return the best value of a run."""
        return Cell.number(self._values.get(number), self._runs[number].metric_name)

    def label(self, number: int) -> str:
        """Return the settings that the curves of a colour have in common."""
        return self._name(self._key(number, [SEED]), [SEED]) or "all seeds"

    def _key(self, number: int, left_out: Sequence[str]) -> tuple[str, ...]:
        """Return a run's values of all settings that differ but some."""
        return tuple(each.values[number] for each in self.columns if each.name not in left_out)

    def _name(self, key: Sequence[str], left_out: Sequence[str]) -> str:
        names = [each.name for each in self.columns if each.name not in left_out]
        return ", ".join(f"{name}={value}" for name, value in zip(names, key, strict=True))

    def _groups(self, left_out: Sequence[str]) -> dict[tuple[str, ...], list[int]]:
        """Return the runs that have a value, by the values of all settings but some."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for number in self.order:
            if number in self._values:
                groups.setdefault(self._key(number, left_out), []).append(number)
        return groups

    def means(self) -> Section:
        """Return the table of means over the seeds; empty if the seed is the same."""
        names = [change.name for change in self.columns if change.name != SEED]
        if len(names) == len(self.columns) or not self.is_study:
            return Section("")
        found = [
            ([self._values[n] for n in each], each[0]) for each in self._groups([SEED]).values()
        ]
        found.sort(key=lambda pair: self._sign * fmean(pair[0]))
        metric = self._runs[0].metric_name
        rows = []
        for values, number in found:
            head, *key = *self._key(number, [SEED]), str(len(values))
            mean = Cell.number(fmean(values), metric)
            spread = Cell.number(stdev(values), metric) if values[1:] else ""
            ends = [Cell.number(pick(values), metric) for pick in (min, max)]
            first = Cell(head, color=self.colors.get(number))
            rows.append([first, *key, mean, spread, *ends])
        columns = (*names, "seeds", f"mean {self.metric}", "standard deviation", "least", "largest")
        return Section("Means over seeds", columns=columns, rows=rows, is_sortable=len(rows) > 2)

    def charts(self) -> list[Chart]:
        """Return a chart of the best values over each setting but the seed."""
        return [self._chart(each) for each in self.columns if each.name != SEED and self.is_study]

    def _chart(self, change: Change) -> Chart:
        """Return the best values over a setting, and their means for each of the other settings."""
        places = _places(change.values)
        left_out = [SEED, change.name]
        lines: list[Line] = []
        for key, numbers in [*self._groups(left_out).items()][:MOST_LINES]:
            dots = [(places[change.values[n]], self._values[n]) for n in numbers]
            means = {x: fmean(y for at, y in dots if at == x) for x, _ in dots}
            lines.append(Line(self._name(key, left_out) or "mean", means, len(lines), dots=dots))
        names = {place: value for value, place in places.items()}
        low, high = min(names), max(names)
        is_log = low > 0 and (high >= WIDE * low or change.name.endswith("lr"))
        axis = Axis.over([*names], is_log, names if len(names) <= 8 else None)
        metric = self._runs[0].metric_name
        return Chart(
            f"best {self.metric}",
            lines,
            metric,
            across=axis,
            across_name=change.name,
            has_values=False,
        )


def _places(values: Sequence[str]) -> dict[str, float]:
    """Return the place of each value: itself if all are numbers, else 0, 1, 2 ..."""
    try:
        places = {value: float(value) for value in values}
    except ValueError:
        places = {}
    if places and all(map(math.isfinite, places.values())):
        return places
    return {value: float(place) for place, value in enumerate(dict.fromkeys(values))}
