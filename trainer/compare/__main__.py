"""`python -m trainer.compare A B`: how runs differ, and from which step on."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path

from trainer.cli import answer, run
from trainer.compare.comparison import Comparison, Rows
from trainer.compare.page import make_page
from trainer.compare.sameness import SAME_BITS
from trainer.config.plain_files import read_lines
from trainer.config.rules import check_path
from trainer.errors import ConfigError, visible
from trainer.record.files import CONFIG, replace_file
from trainer.report.reading import read_runs

HELP = """usage: python -m trainer.compare A B [...] [out=FILE.html] [out=FILE.csv]

Compares runs with the first one, and begins with a verdict: the same bits, the same run up to
rounding, starts as rounding and grows, different, with the settings that differ, or cannot tell,
with the reason. Then settings, data, code and versions, the first step that differs and by how
much, the best metrics and the time.
A, B, ... are run directories; the folder of a sweep stands for all its runs. Logs of training are
means over several steps, so the first step that differs is known as precisely as the runs were
logged (log.every_steps) and saved.

out: also write a page (.html) with curves, and for a sweep means over seeds and the best value by
setting, or the table (.csv)

Exit codes: 0 the same bits, or the same up to rounding, 1 the runs differ, or have too little in
common to tell, 2 they cannot be compared."""

USAGE = "python -m trainer.compare A B [out=FILE.html]"
RESULTS_CSV = "results.csv"  # of a sweep: its jobs, the best one first
MOST_COLUMNS = 8  # runs side by side in a table of the terminal
SUFFIXES = (".html", ".csv")
WIDTH = 200  # of a table in a file or a pipe


def main(arguments: Sequence[str]) -> int:
    outs = [Path(word[4:]) for word in arguments if word.startswith("out=")]
    given = [word for word in arguments if not word.startswith("out=")]
    for word in given:
        check_path("the argument", word)
        if word.startswith("-"):
            raise ConfigError(f"{word} is not a flag here; give run directories: {USAGE}")
    places = expand(list(filter(None, given)))
    if len(places) < 2:
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
        if out.suffix == ".csv":
            _write_table(out, found)
        else:
            make_page(found).write(out)

    def show() -> None:
        _print(found)
        for out in outs:
            print(f"written: {out}")

    is_equal = all(verdict.line == SAME_BITS for verdict in found.verdicts)
    result = "same bits" if is_equal else "same up to rounding"
    return answer(code, "not the same" if code else result, facts, show)


def expand(places: Sequence[str]) -> list[str]:
    """Replace the folder of a sweep by the directories of its runs, the best one first."""
    found: list[str] = []
    for place in places:
        table = Path(place) / RESULTS_CSV
        if not table.is_file() or (Path(place) / CONFIG).is_file():
            found.append(place)
            continue
        runs = [row.get("directory") or "" for row in csv.DictReader(read_lines(table))]
        found += [run for run in runs if run and (Path(run) / CONFIG).is_file()]
    return found


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
    groups: dict[str, list[str]] = {}
    for name, verdict in zip(others, found.verdicts, strict=True):
        groups.setdefault(visible(verdict.line), []).append(name)
    for line, names in groups.items():
        print(f"{', '.join(names)}: {line}" if len(others) > 1 else line)
    is_many = len(others) >= MOST_COLUMNS
    titles = {"setting": found.settings, "data, code, versions": found.facts}
    for title, changes in titles.items():
        if not changes:
            print(f"{title}: no difference")
        elif is_many:
            values = [[name, *(c.values[n] for c in changes)] for n, name in enumerate(found.names)]
            show(["run", *(each.name for each in changes)], values)
        else:
            show([title, *found.names], [[each.name, *each.values] for each in changes])
    for number, name in enumerate(others):
        lines = found.lines(number)
        if lines and not is_many:
            print(f"first differences between {first} and {name}:")
            print(*(f"  {visible(line)}" for line in lines), sep="\n")
    if is_many:
        print("first differences: out=FILE.html and out=FILE.csv have them")
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


if __name__ == "__main__":
    run(main, HELP)
