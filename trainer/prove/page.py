"""The page of a proof: result, differences with reasons, losses, and the commands' output."""

from __future__ import annotations

from pathlib import Path

from trainer.compare.page import overlay
from trainer.prove.comparison import COLUMNS, PairComparison
from trainer.prove.merging import CommandHistory
from trainer.prove.table import cells, sentences
from trainer.report.charts import Chart, Line
from trainer.report.page import Page, Section, Status


def write_page(found: PairComparison, folder: Path) -> Path:
    """Write report.html to the folder. Raises ConfigError without the extra `report`."""
    pair = (found.one, found.other)
    about = f"{found.num_steps} steps in {found.bounds.name}"
    state = ("good", "the same") if found.is_same else ("bad", "not the same")
    lead = " and ".join(each.command for each in pair)
    page = Page("Two commands", lead, [Status(*state, about)])
    page.add(Section("Differences", sentences(found)))
    reference = [found.one.name, str(found.one.size), *[""] * len(COLUMNS), "reference"]
    columns = ["command", "ranks", *COLUMNS, "result"]
    rows = [reference, cells(found)]
    page.add(Section("Largest relative differences", columns=columns, rows=rows))
    page.add(Section("Notes", found.notes))
    curves = {number: _losses(each) for number, each in enumerate(pair)}
    widths, note = overlay(curves)
    lines = [Line(pair[n].name, curve, n, widths[n]) for n, curve in curves.items()]
    page.add(Section("", charts=[Chart("loss", lines, note=note, is_large=True)], size="large"))
    for output in sorted(folder.glob("*/output.txt")):
        text = output.read_text(encoding="utf-8", errors="replace")
        page.add(Section(f"Output of {output.parent.name}", text=text[-4000:]))
    path = folder / "report.html"
    page.write(path)
    return path


def _losses(history: CommandHistory) -> dict[int, float]:
    return {place: step.losses["mean"] for place, step in enumerate(history.steps, 1)}
