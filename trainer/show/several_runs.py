"""Several runs compared with the first one, and their page: results, tables, curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from trainer.base.errors import counted
from trainer.core.api import LAYOUT
from trainer.pages import MOST_CHARTS, Page, Section, Status
from trainer.pages.charts import (
    MOST_CURVES,
    SPEED,
    Axis,
    Cell,
    Chart,
    Line,
    duration,
    overlay,
    spoken,
)
from trainer.show.differences import (
    MOST_NAMED,
    Change,
    Sameness,
    find_first,
    judge,
    list_changes,
    list_unknown,
    rounding_limit,
)
from trainer.show.run_reading import EPOCH, RunFiles

Rows = list[list[str]]


@dataclass(frozen=True)
class Comparison:
    """Runs and how they differ from the first one.

    `verdicts` and the lines `firsts` are those of each of the others, `unknown` what it has too
    little in common to tell.
    """

    runs: Sequence[RunFiles]
    settings: list[Change]
    facts: list[Change]
    verdicts: list[Sameness]
    firsts: list[list[str]]
    unknown: list[list[str]]

    @classmethod
    def of(cls, runs: list[RunFiles]) -> Comparison:
        one, *others = runs
        all_differences = [find_first(one, other) for other in others]
        unknown = [list_unknown(one, other) for other in others]
        verdicts = [
            judge(one, other, differences)
            for other, differences in zip(others, all_differences, strict=True)
        ]
        settings, facts = (list_changes(runs, kind) for kind in ("settings", "facts"))
        firsts = [[str(each) for each in differences] for differences in all_differences]
        return cls(runs, settings, facts, verdicts, firsts, unknown)

    @property
    def names(self) -> list[str]:
        return [each.name for each in self.runs]

    @property
    def labels(self) -> list[str]:
        """Names for charts: the settings that tell a run from the others, or its own name."""
        own = [change for change in self.settings if not change.name.startswith(LAYOUT)]
        if not 0 < len(own) <= MOST_NAMED:
            return self.names
        pairs = [
            [f"{c.name}={c.values[run_index]}" for c in own] for run_index in range(len(self.runs))
        ]
        labels = [", ".join(each) for each in pairs]
        are_apart = len(set(labels)) == len(labels)
        return labels if are_apart else [": ".join(p) for p in zip(self.names, labels, strict=True)]

    @property
    def is_same(self) -> bool:
        return all(verdict.is_same for verdict in self.verdicts)

    def lines(self, other_index: int) -> list[str]:
        """Return the first differences of a run from the first one, and what is unknown."""
        return self.firsts[other_index] + self.unknown[other_index]

    def results(self) -> Rows:
        """Return a row of RESULT_COLUMNS for each run."""
        rows = []
        for each in self.runs:
            best = "-"
            if each.best is not None:
                best = f"{each.best_metric} {each.best[1]:.6g} at step {each.best[0]:,}"
            took = [best, f"{each.seconds:,.1f}", each.strategy, each.ranks or "-", each.end]
            rows.append([each.name, f"{each.step:,}", *took])
        return rows

    def as_json(self) -> dict[str, Any]:
        """Return the comparison as plain values, with one entry for each of the other runs."""
        others = zip(self.names[1:], self.verdicts, self.firsts, self.unknown, strict=True)
        return {
            "runs": [
                {"run": each.name, "path": each.path, "step": each.step, "best": each.best}
                for each in self.runs
            ],
            "verdicts": [
                {"run": name, **asdict(verdict), "first_differences": firsts, "unknown": unknown}
                for name, verdict, firsts, unknown in others
            ],
            "settings": {change.name: change.values for change in self.settings},
            "facts": {change.name: change.values for change in self.facts},
        }


MOST_SETTING_COLUMNS = 6  # of settings in a table of runs
SEED = "run.seed"
WIDE_RATIO = 8.0  # largest to smallest value of a setting on a logarithmic axis


class Swept:
    """Runs by the settings of the run that differ: `columns`, unless there are too many.

    `order` are the runs' numbers, the best first if they are a study: three or more, with columns.
    `colors` are those of their curves, one for all seeds of a study, as far as there are colours.
    """

    def __init__(self, runs: Sequence[RunFiles], settings: Sequence[Change]):
        own = [change for change in settings if not change.name.startswith(LAYOUT)]
        own.sort(key=lambda change: change.name == SEED)
        self.columns = own if len(own) <= MOST_SETTING_COLUMNS else []
        self.is_study = len(runs) > 2 and bool(self.columns)
        self._runs = runs
        self._values = {n: each.best[1] for n, each in enumerate(runs) if each.best}
        self._sign = -1 if runs[0].settings.get("checkpoint.best_mode") == "max" else 1
        self.order = [*range(len(runs))]
        if self.is_study:
            rank = {n: self._sign * value for n, value in self._values.items()}
            self.order.sort(key=lambda n: rank.get(n, math.inf))
        keys = {n: self._key(n, [SEED]) if self.is_study else (str(n),) for n in self.order}
        color_of = {key: color for color, key in enumerate(dict.fromkeys(keys.values()))}
        self.colors = {n: color_of[key] for n, key in keys.items() if color_of[key] < MOST_CURVES}

    @property
    def metric(self) -> str:
        return spoken(self._runs[0].metric_name)

    def best(self, run_index: int) -> Cell:
        """Return the best value of a run."""
        return Cell.number(self._values.get(run_index), self._runs[run_index].metric_name)

    def label(self, run_index: int) -> str:
        """Return the settings that the curves of a colour have in common."""
        return self._name(self._key(run_index, [SEED]), [SEED]) or "all seeds"

    def _key(self, run_index: int, left_out: Sequence[str]) -> tuple[str, ...]:
        """Return a run's values of all settings that differ but some."""
        return tuple(each.values[run_index] for each in self.columns if each.name not in left_out)

    def _name(self, key: Sequence[str], left_out: Sequence[str]) -> str:
        names = [each.name for each in self.columns if each.name not in left_out]
        return ", ".join(f"{name}={value}" for name, value in zip(names, key, strict=True))

    def _groups(self, left_out: Sequence[str]) -> dict[tuple[str, ...], list[int]]:
        """Return the runs that have a value, by the values of all settings but some."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for run_index in self.order:
            if run_index in self._values:
                groups.setdefault(self._key(run_index, left_out), []).append(run_index)
        return groups

    def means(self) -> Section:
        """Return the table of means over the seeds; empty if the seed is the same."""
        names = [change.name for change in self.columns if change.name != SEED]
        if len(names) == len(self.columns) or not self.is_study:
            return Section("")
        seed_groups = [
            ([self._values[n] for n in each], each[0]) for each in self._groups([SEED]).values()
        ]
        seed_groups.sort(key=lambda pair: self._sign * fmean(pair[0]))
        metric = self._runs[0].metric_name
        rows = []
        for values, first_run in seed_groups:
            head, *key = *self._key(first_run, [SEED]), str(len(values))
            mean = Cell.number(fmean(values), metric)
            spread = Cell.number(stdev(values), metric) if values[1:] else ""
            ends = [Cell.number(pick(values), metric) for pick in (min, max)]
            first = Cell(head, color=self.colors.get(first_run))
            rows.append([first, *key, mean, spread, *ends])
        columns = (*names, "seeds", f"mean {self.metric}", "standard deviation", "least", "largest")
        return Section("Means over seeds", columns=columns, rows=rows, is_sortable=len(rows) > 2)

    def charts(self) -> list[Chart]:
        """Return a chart of the best values over each setting but the seed."""
        return [self._chart(each) for each in self.columns if each.name != SEED and self.is_study]

    def _chart(self, change: Change) -> Chart:
        """Return the best values over a setting, and their means for each of the other settings."""
        positions = _places(change.values)
        left_out = [SEED, change.name]
        lines: list[Line] = []
        for key, numbers in [*self._groups(left_out).items()][:MOST_CURVES]:
            dots = [(positions[change.values[n]], self._values[n]) for n in numbers]
            means = {x: fmean(y for at, y in dots if at == x) for x, _ in dots}
            lines.append(Line(self._name(key, left_out) or "mean", means, len(lines), dots=dots))
        names = {position: value for value, position in positions.items()}
        low, high = min(names), max(names)
        is_log = low > 0 and (high >= WIDE_RATIO * low or change.name.endswith("lr"))
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
    """Return the position of each value: itself if all are numbers, else 0, 1, 2 ..."""
    try:
        positions = {value: float(value) for value in values}
    except ValueError:
        positions = {}
    if positions and all(map(math.isfinite, positions.values())):
        return positions
    return {value: float(position) for position, value in enumerate(dict.fromkeys(values))}


MOST_RUNS = 40  # that are drawn
# Columns, which one line replaces if all are equal
OFTEN_EQUAL_COLUMNS = ("steps", "strategy", "ranks", "end")


def make_page(comparison: Comparison) -> Page:
    """Return the page of a comparison."""
    names = short_names(comparison.runs)
    swept = Swept(comparison.runs, comparison.settings)
    title = f"{counted(len(names), 'run')} of {comparison.runs[0].task}"
    page = Page(title, f"compared with {names[0]}", _states(names[1:], comparison.verdicts, swept))
    page.add(list_results(comparison.runs, names, swept))
    page.add(swept.means())
    page.add(Section("Best values by setting", charts=swept.charts(), size="medium"))
    labels = names if comparison.labels == comparison.names else comparison.labels
    if swept.is_study:
        labels = [swept.label(n) for n in range(len(names))]
    _add_curves(page, comparison, swept, labels)
    shown = [change.name for change in swept.columns]
    tables = {
        "Settings that differ": [each for each in comparison.settings if each.name not in shown],
        "Data, code and versions that differ": comparison.facts,
    }
    for title, changes in tables.items():
        rows = [[change.name, *change.values] for change in changes]
        page.add(Section(title, columns=("name", *names), rows=rows))
    title = f"First differences from {names[0]}"
    if len(names) == 2:
        page.add(Section(title, comparison.lines(0)))
    rows = [
        [name, line]
        for other_index, name in enumerate(names[1:])
        for line in comparison.lines(other_index)
    ]
    rows *= len(names) > 2
    page.add(Section(title, columns=("run", "difference"), rows=rows, is_folded=swept.is_study))
    return page


def short_names(runs: Sequence[RunFiles]) -> list[str]:
    """Return the names of the runs' folders, with their paths if two are the same."""
    names = [Path(each.name).name for each in runs]
    return names if len(set(names)) == len(names) else [each.name for each in runs]


def _states(names: Sequence[str], verdicts: Sequence[Sameness], swept: Swept) -> list[Status]:
    """Return a line for each verdict, with the runs that it is about; one for all of a sweep."""
    groups: dict[Sameness, list[str]] = {}
    for name, verdict in zip(names, verdicts, strict=True):
        groups.setdefault(verdict, []).append(name)
    states = []
    if swept.is_study and len(groups) > 1:
        states = [Status("open", "different", ", ".join(each.name for each in swept.columns))]
        groups = {verdict: those for verdict, those in groups.items() if verdict.is_same}
    for verdict, those in groups.items():
        head, _, rest = verdict.line.replace(" (", ": (", 1).partition(": ")
        if len(names) > 1:
            about = ", ".join(those) if len(those) < 4 else counted(len(those), "run")
            head = f"{about}: {head}"
        states.append(Status("good" if verdict.is_same else "open", head, rest))
    return states


def list_results(runs: Sequence[RunFiles], names: Sequence[str], swept: Swept) -> Section:
    """Return the table of the runs: what differs, and the results."""
    numbers = swept.order
    columns: dict[str, list[str | Cell]] = {
        "run": [Cell(names[n], runs[n].name, color=swept.colors.get(n)) for n in numbers]
    }
    columns |= {each.name: [each.values[n] for n in numbers] for each in swept.columns}
    columns[f"best {swept.metric}"] = [swept.best(n) for n in numbers]
    best = [runs[n].best for n in numbers]
    columns["at step"] = [Cell(f"{each[0]:,}", str(each[0]), True) if each else "" for each in best]
    columns["training time"] = [
        Cell(duration(runs[n].seconds), repr(runs[n].seconds), True) for n in numbers
    ]
    shared = []
    facts = [(f"{r.step:,}", r.strategy, r.ranks, r.end) for r in (runs[n] for n in numbers)]
    for name, values in zip(OFTEN_EQUAL_COLUMNS, zip(*facts, strict=True), strict=True):
        if len({*values}) > 1:
            columns[name] = [*values]
        elif values[0]:
            shared.append(f"{name} {values[0]}")
    lines = [f"All runs: {', '.join(shared)}."] if shared else []
    rows = [[*row] for row in zip(*columns.values(), strict=True)]
    return Section("", lines, columns=tuple(columns), rows=rows, is_sortable=len(rows) > 2)


def _add_curves(page: Page, comparison: Comparison, swept: Swept, labels: Sequence[str]) -> None:
    """Add charts with a line for each run: of the loss and what is evaluated, then small ones."""
    numbers = [n for n in swept.order if n in swept.colors][:MOST_RUNS]
    runs = [comparison.runs[n] for n in numbers]
    first = ["train/loss", runs[0].best_metric, f"{runs[0].settings['eval.splits'][0]}/loss"]
    names = [*dict.fromkeys(name for each in runs for name in each.curves if name != EPOCH)]
    names.sort(key=lambda n: (first.index(n) if n in first else len(first), n.startswith(SPEED)))
    across = Axis(min(each.begin for each in runs), max(1, *(each.step for each in runs)))
    large = [name for name in names if name in first or name.startswith(runs[0].splits)][:3]
    charts = []
    limit = rounding_limit(*runs)
    for name in names[:MOST_CHARTS]:
        split, _, rest = name.partition("/")
        title = f"{spoken(rest)}, {split}" if rest in runs[0].evaluated else spoken(name)
        own = {
            n: comparison.runs[n].curves[name] for n in numbers if name in comparison.runs[n].curves
        }
        widths, note = overlay(own, limit)
        lines = [Line(labels[n], curve, swept.colors[n], widths[n]) for n, curve in own.items()]
        charts.append(Chart(title, lines, name, note, name in large, False, across=across))
    left_out = [f"{counted(len(runs), 'run')} of {len(comparison.runs):,} are drawn."]
    left_out *= len(runs) < len(comparison.runs)
    legend = {swept.colors[n]: labels[n] for n in numbers}
    page.add_charts(charts, len(names), Section("Curves", left_out, legend=[*legend.items()]))
