"""The page of a comparison: verdicts, a table of the runs, their curves, and how they differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from trainer.compare.comparison import Comparison
from trainer.compare.differences import rounding_limit
from trainer.compare.sameness import Sameness
from trainer.compare.swept import Swept
from trainer.engine.precision import ROUNDING
from trainer.errors import counted
from trainer.report.charts import THIN, Axis, Chart, Line
from trainer.report.numbers import Cell, duration, spoken
from trainer.report.page import MOST_CHARTS, Page, Section, Status
from trainer.report.reading import EPOCH, SPEED, Curve, RunFiles

MOST_RUNS = 40  # that are drawn
SHARED = ("steps", "strategy", "ranks", "end")  # columns, which one line replaces if all are equal


def make_page(found: Comparison) -> Page:
    """Return the page of a comparison."""
    names = short_names(found.runs)
    swept = Swept(found.runs, found.settings)
    title = f"{counted(len(names), 'run')} of {found.runs[0].task}"
    page = Page(title, f"compared with {names[0]}", _states(names[1:], found.verdicts, swept))
    page.add(_table(found.runs, names, swept))
    page.add(swept.means())
    page.add(Section("Best values by setting", charts=swept.charts(), size="medium"))
    labels = names if found.labels == found.names else found.labels
    if swept.is_study:
        labels = [swept.label(n) for n in range(len(names))]
    _add_curves(page, found, swept, labels)
    shown = [change.name for change in swept.columns]
    tables = {
        "Settings that differ": [each for each in found.settings if each.name not in shown],
        "Data, code and versions that differ": found.facts,
    }
    for title, changes in tables.items():
        rows = [[change.name, *change.values] for change in changes]
        page.add(Section(title, columns=("name", *names), rows=rows))
    title = f"First differences from {names[0]}"
    if len(names) == 2:
        page.add(Section(title, found.lines(0)))
    rows = [[name, line] for number, name in enumerate(names[1:]) for line in found.lines(number)]
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


def _table(runs: Sequence[RunFiles], names: Sequence[str], swept: Swept) -> Section:
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
    facts = zip(*(_facts(runs[n]) for n in numbers), strict=True)
    for name, values in zip(SHARED, facts, strict=True):
        if len({*values}) > 1:
            columns[name] = [*values]
        elif values[0]:
            shared.append(f"{name} {values[0]}")
    lines = [f"All runs: {', '.join(shared)}."] * bool(shared)
    rows = [[*row] for row in zip(*columns.values(), strict=True)]
    return Section("", lines, columns=tuple(columns), rows=rows, is_sortable=len(rows) > 2)


def _facts(each: RunFiles) -> tuple[str, ...]:
    """Return the values of SHARED."""
    ranks = str(each.manifest.world_size) if each.manifest else ""
    strategy = str(each.settings["strategy.name"])
    return f"{each.step:,}", strategy, ranks, str(each.exit.get("reason", "not ended"))


def _add_curves(page: Page, found: Comparison, swept: Swept, labels: Sequence[str]) -> None:
    """Add charts with a line for each run: of the loss and what is evaluated, then small ones."""
    numbers = [n for n in swept.order if n in swept.colors][:MOST_RUNS]
    runs = [found.runs[n] for n in numbers]
    first = ["train/loss", runs[0].best_metric, f"{runs[0].settings['eval.splits'][0]}/loss"]
    names = [*dict.fromkeys(name for each in runs for name in each.curves if name != EPOCH)]
    names.sort(key=lambda n: (first.index(n) if n in first else len(first), n.startswith(SPEED)))
    across = Axis(min(each.begin for each in runs), max(1, *(each.step for each in runs)))
    large = [name for name in names if name in first or name.startswith(runs[0].splits)][:3]
    charts: dict[bool, list[Chart]] = {True: [], False: []}
    limit = rounding_limit(*runs)
    for name in names[:MOST_CHARTS]:
        split, _, rest = name.partition("/")
        title = f"{spoken(rest)}, {split}" if rest in runs[0].evaluated else spoken(name)
        own = {n: found.runs[n].curves[name] for n in numbers if name in found.runs[n].curves}
        widths, note = overlay(own, limit)
        lines = [Line(labels[n], curve, swept.colors[n], widths[n]) for n, curve in own.items()]
        is_large = name in large
        chart = Chart(title, lines, name, note, is_large, has_legend=False, across=across)
        charts[is_large].append(chart)
    left_out = [f"{counted(len(runs), 'run')} of {len(found.runs):,} are drawn."]
    left_out *= len(runs) < len(found.runs)
    left_out += [f"The first {MOST_CHARTS} of {len(names):,} curves."] * (len(names) > MOST_CHARTS)
    legend = {swept.colors[n]: labels[n] for n in numbers}
    page.add(Section("Curves", left_out, charts[True], legend=[*legend.items()], size="large"))
    page.add(Section("", charts=charts[False]))


def overlay(
    curves: dict[int, Curve], limit: float = ROUNDING["fp32"]
) -> tuple[dict[int, int], str]:
    """Return the widths of the runs' curves, so that equal ones are all seen; and words.

    The first one of equal ones is the widest.
    """
    groups: dict[int, list[int]] = {}
    worst = 0.0
    for number, curve in curves.items():
        distances = {first: _distance(curves[first], curve) for first in groups}
        first = next((n for n, each in distances.items() if each <= limit), number)
        groups.setdefault(first, []).append(number)
        worst = max(worst, distances.get(first, 0.0))
    widths = {
        n: THIN + 4 * min(place, 3)
        for those in groups.values()
        for place, n in enumerate(reversed(those))
    }
    words = "identical" if not worst else f"equal up to {worst:.0e}"
    if len(groups) > 1:
        words = f"{len(curves):,} runs, {len(groups):,} curves"
    return widths, words * (len(groups) < len(curves))


def _distance(one: Curve, other: Curve) -> float:
    """Return the largest relative distance; infinity if they are not at the same steps."""
    shared = one.keys() & other.keys()
    if not shared or len(shared) < min(len(one), len(other)):
        return math.inf
    pairs = [(one[step], other[step]) for step in shared if repr(one[step]) != repr(other[step])]
    distances = [abs(a - b) / max(abs(a), abs(b), 1e-300) for a, b in pairs]
    return max((d if d == d else math.inf for d in distances), default=0.0)
