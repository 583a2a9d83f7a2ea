"""`python -m trainer.compare A B`: how runs differ, and from which step on."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.cli import answer, run
from trainer.compare.differences import (
    MOST_NAMED,
    SAME_BITS,
    Change,
    Sameness,
    find_first,
    judge,
    list_changes,
    list_compared,
)
from trainer.config.schema import LAYOUT
from trainer.errors import ConfigError, counted, visible
from trainer.record.files import replace_file
from trainer.report.charts import MOST_LINES
from trainer.report.page import MOST_CHARTS, Page, Section
from trainer.report.reading import SPEED, RunFiles, read_runs

HELP = """usage: python -m trainer.compare A B [...] [out=FILE.html] [out=FILE.csv]

Compares runs with the first one, and begins with a verdict: the same bits, the same run up to
rounding, starts as rounding and grows, or different, with the settings that differ. Then settings,
data, code and versions, the first step that differs and by how much, the best metrics and the time.
A, B, ... are run directories. Logs of training are means over several steps, so the first step that
differs is known as precisely as the runs were logged (log.every_steps) and saved.

out: also write a page with the curves (.html, extra report) or the table (.csv)

Exit codes: 0 the same bits, or the same up to rounding, 1 the runs differ, or have too little in
common to tell, 2 they cannot be compared."""

USAGE = "python -m trainer.compare A B [out=FILE.html]"
SUFFIXES = (".html", ".csv")
WIDTH = 200  # of a table in a file or a pipe
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
        found = [find_first(one, other) for other in others]
        unknown = [list_unknown(one, other) for other in others]
        verdicts = [
            judge(one, other, differences, not missing)
            for other, differences, missing in zip(others, found, unknown, strict=True)
        ]
        settings, facts = (list_changes(runs, kind) for kind in ("settings", "facts"))
        firsts = [[str(each) for each in differences] for differences in found]
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
        pairs = [[f"{c.name}={c.values[number]}" for c in own] for number in range(len(self.runs))]
        labels = [", ".join(each) for each in pairs]
        are_apart = len(set(labels)) == len(labels)
        return labels if are_apart else [": ".join(p) for p in zip(self.names, labels, strict=True)]

    @property
    def is_same(self) -> bool:
        return all(verdict.is_same for verdict in self.verdicts)

    def lines(self, number: int) -> list[str]:
        """Return the first differences of a run from the first one, and what is unknown."""
        return self.firsts[number] + self.unknown[number]

    def results(self) -> Rows:
        """Return a row of RESULTS for each run."""
        rows = []
        for each in self.runs:
            best = "-"
            if each.best is not None:
                best = f"{each.best_metric} {each.best[1]:.6g} at step {each.best[0]:,}"
            ranks = str(each.manifest.world_size) if each.manifest else "-"
            end = str(each.exit.get("reason", "not ended"))
            strategy = str(each.settings["strategy.name"])
            seconds = f"{each.seconds:,.1f}"
            rows.append([each.name, f"{each.step:,}", best, seconds, strategy, ranks, end])
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


def list_unknown(one: RunFiles, other: RunFiles) -> list[str]:
    """Return a line for each thing that the runs have too little in common to compare."""
    compared = list_compared(one, other)
    lines = [
        f"unknown: {k}, as no step has them in both runs" for k, s in compared.items() if not s
    ]
    if one.manifest is None or other.manifest is None:
        lines.append("unknown: data, code and versions, as a run has no checkpoint")
    if one.step != other.step:
        last = max((step for steps in compared.values() for step in steps), default=0)
        steps = f"{one.name} has {counted(one.step, 'step')}, {other.name} {other.step:,}"
        lines.append(f"unknown: anything after step {last:,}; {steps}")
    return lines


def main(arguments: Sequence[str]) -> int:
    outs = [Path(word[4:]) for word in arguments if word.startswith("out=")]
    places = [word for word in arguments if not word.startswith("out=")]
    if len(places) < 2 or any(word.startswith("-") for word in places):
        raise ConfigError(f"give two or more run directories: {USAGE}")
    for out in outs:
        if out.suffix not in SUFFIXES:
            raise ConfigError(f"out={out}: must end with {' or '.join(SUFFIXES)}")
    found = Comparison.of(read_runs(places))
    code = int(not found.is_same)
    facts = found.as_json()
    if outs:
        facts["files"] = outs
    for out in outs:
        write = _write_table if out.suffix == ".csv" else _write_page
        write(out, found)

    def show() -> None:
        _print(found)
        for out in outs:
            print(f"written: {out}")

    is_equal = all(verdict.line == SAME_BITS for verdict in found.verdicts)
    result = "same bits" if is_equal else "same up to rounding"
    return answer(code, "not the same" if code else result, facts, show)


RESULTS = ("run", "steps", "best", "training time (s)", "strategy", "ranks", "end")


def _print(found: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = WIDTH

    def show(columns: Sequence[str], rows: Rows) -> None:
        table = Table(*map(visible, columns), box=None, header_style="bold")
        for row in rows:
            table.add_row(*(Text(visible(cell)) for cell in row))
        console.print(table)

    first, *others = map(visible, found.names)
    for name, verdict in zip(others, found.verdicts, strict=True):
        print(f"{name}: {visible(verdict.line)}" if len(others) > 1 else visible(verdict.line))
    titles = {"setting": found.settings, "data, code, versions": found.facts}
    for title, changes in titles.items():
        if changes:
            show([title, *found.names], [[each.name, *each.values] for each in changes])
        else:
            print(f"{title}: no difference")
    for number, name in enumerate(others):
        lines = found.lines(number)
        if lines:
            print(f"first differences between {first} and {name}:")
        for line in lines:
            print(f"  {visible(line)}")
    show(RESULTS, found.results())


def _write_table(out: Path, found: Comparison) -> None:
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(["kind", "name", *found.names])
    for kind, changes in {"settings": found.settings, "facts": found.facts}.items():
        writer.writerows([kind, change.name, *change.values] for change in changes)
    writer.writerow(["verdict", "", "", *(verdict.line for verdict in found.verdicts)])
    for kind, columns in {"first difference": found.firsts, "unknown": found.unknown}.items():
        for number in range(max(map(len, columns))):
            cells = [lines[number] if number < len(lines) else "" for lines in columns]
            writer.writerow([kind, number + 1, "", *cells])
    results = found.results()
    for place, name in enumerate(RESULTS[1:], 1):
        writer.writerow(["result", name, *(row[place] for row in results)])
    try:
        replace_file(out, file.getvalue())
    except OSError as error:
        raise ConfigError(f"out={out}: {error.strerror}; use out=FILE elsewhere") from None


def _write_page(out: Path, found: Comparison) -> None:
    runs = found.runs
    names = found.names
    page = Page(f"{counted(len(runs), 'run')} of {runs[0].settings['task.name']}", names)
    verdicts = zip(names[1:], found.verdicts, strict=True)
    lines = [f"{name}: {verdict.line}" for name, verdict in verdicts]
    columns = [RESULTS[0], "changed", *RESULTS[1:]]
    rows = [
        [row[0], label, *row[1:]] for row, label in zip(found.results(), found.labels, strict=True)
    ]
    page.add(Section("Results", lines, columns=columns, rows=rows))
    shown = [*zip(runs, found.labels, strict=True)][:MOST_LINES]
    curves = dict.fromkeys(name for each, _ in shown for name in each.curves)
    charts = []
    order = sorted(curves, key=lambda n: (n.startswith(SPEED), not n.startswith("train/"), n))
    for name in order[:MOST_CHARTS]:
        lines_of = {label: each.curves[name] for each, label in shown if name in each.curves}
        charts.append(page.chart(name, lines_of))
    left_out = [f"The first {MOST_LINES} runs are drawn."] * (len(runs) > MOST_LINES)
    left_out += [f"The first {MOST_CHARTS} of {len(order):,} curves."] * (len(order) > MOST_CHARTS)
    page.add(Section("Curves", left_out, charts))
    titles = {"Settings": found.settings, "Data, code and versions": found.facts}
    for title, changes in titles.items():
        table = [[change.name, *change.values] for change in changes]
        page.add(Section(title, [] if table else ["No difference."], (), ["name", *names], table))
    for number, name in enumerate(names[1:]):
        if lines := found.lines(number):
            page.add(Section(f"First differences of {name}", lines))
    page.write(out)


if __name__ == "__main__":
    run(main, HELP)
