"""Comparison of runs, and the first step that differs: in the terminal, as a page or a table."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from trainer.base.errors import ConfigError, visible
from trainer.base.plain_files import read_lines
from trainer.base.process.streams import print_table
from trainer.cli import answer
from trainer.core.api import CONFIG
from trainer.pages import write_out
from trainer.pages.charts import Cell
from trainer.show.differences import EQUAL_RUNS
from trainer.show.run_reading import read_runs
from trainer.show.several_runs import (
    Comparison,
    Swept,
    list_results,
    make_page,
    short_names,
)

RESULTS_CSV = "results.csv"  # of a sweep: its jobs, the best one first
MOST_RUNS_SIDE_BY_SIDE = 8  # runs side by side in a table of the terminal
OUT_SUFFIXES = (".html", ".csv")


def compare(directories: Sequence[str], outs: Sequence[Path]) -> int:
    """Compare runs with the first one, write pages or tables, and return the exit code."""
    for out in outs:
        if out.suffix not in OUT_SUFFIXES:
            raise ConfigError(f"out={out}: must end with {' or '.join(OUT_SUFFIXES)}")
    comparison = Comparison.of(read_runs([*directories]))
    code = int(not comparison.is_same)
    facts = comparison.as_json()
    if outs:
        facts["files"] = outs
    for out in outs:
        if out.suffix == ".csv":
            _write_table(out, comparison)
        else:
            make_page(comparison).write(out)

    def show() -> None:
        _print(comparison)
        for out in outs:
            print(f"written: {out}")

    is_equal = all(verdict.line == EQUAL_RUNS for verdict in comparison.verdicts)
    result = "same bits" if is_equal else "same up to rounding"
    return answer(code, "not the same" if code else result, facts, show)


def expand(folders: Sequence[str]) -> list[str]:
    """Replace the folder of a sweep by the directories of its runs, the best one first."""
    directories: list[str] = []
    for folder in folders:
        table = Path(folder) / RESULTS_CSV
        if not table.is_file() or (Path(folder) / CONFIG).is_file():
            directories.append(folder)
            continue
        runs = [row.get("directory") or "" for row in csv.DictReader(read_lines(table))]
        directories += [run for run in runs if run and (Path(run) / CONFIG).is_file()]
    return directories


RESULT_COLUMNS = ("run", "steps", "best", "training time (s)", "strategy", "ranks", "end")


def _print(comparison: Comparison) -> None:
    """Print the verdicts, the page's two tables, and what else differs."""
    first, *others = names = short_names(comparison.runs)
    swept = Swept(comparison.runs, comparison.settings)
    groups: dict[str, list[str]] = {}
    for name, verdict in zip(others, comparison.verdicts, strict=True):
        groups.setdefault(verdict.line, []).append(name)
    if swept.is_study and len(groups) > 1:
        groups = {f"different: {', '.join(each.name for each in swept.columns)}": others}
    for line, those in groups.items():
        print(visible(f"{', '.join(those)}: {line}" if len(groups) > 1 else line))
    for section in (list_results(comparison.runs, names, swept), swept.means()):
        if section.rows:
            print(
                *map(visible, ([section.title] if section.title else []) + [*section.lines]),
                sep="\n",
            )
            print_table(section.columns, [[*map(_text_of, row)] for row in section.rows])
    is_many = len(others) >= MOST_RUNS_SIDE_BY_SIDE
    shown = [change.name for change in swept.columns]
    settings = [change for change in comparison.settings if change.name not in shown]
    titles = {"setting": settings, "data, code, versions": comparison.facts}
    for title, changes in titles.items():
        if not changes:
            print(f"{title}: no {'other ' * bool(title == 'setting' and shown)}difference")
        elif is_many:
            values = [[name, *(c.values[n] for c in changes)] for n, name in enumerate(names)]
            print_table(["run", *(each.name for each in changes)], values)
        else:
            print_table([title, *names], [[each.name, *each.values] for each in changes])
    is_told = is_many or swept.is_study
    for other_index, name in enumerate(others):
        lines = comparison.lines(other_index)
        if lines and not is_told:
            print(visible(f"first differences between {first} and {name}:"))
            print(*(f"  {visible(line)}" for line in lines), sep="\n")
    if is_told:
        print("first differences: out=FILE.html and out=FILE.csv have them")


def _text_of(cell: str | Cell) -> str:
    return cell.text if isinstance(cell, Cell) else cell


def _write_table(out: Path, comparison: Comparison) -> None:
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(["kind", "name", *comparison.names])
    for kind, changes in {"settings": comparison.settings, "facts": comparison.facts}.items():
        writer.writerows([kind, change.name, *change.values] for change in changes)
    writer.writerow(["verdict", "", "", *(verdict.line for verdict in comparison.verdicts)])
    for kind, columns in {
        "first difference": comparison.firsts,
        "unknown": comparison.unknown,
    }.items():
        for line_index in range(max(map(len, columns))):
            cells = [lines[line_index] if line_index < len(lines) else "" for lines in columns]
            writer.writerow([kind, line_index + 1, "", *cells])
    results = comparison.results()
    for column, name in enumerate(RESULT_COLUMNS[1:], 1):
        writer.writerow(["result", name, *(row[column] for row in results)])
    write_out(out, file.getvalue())
