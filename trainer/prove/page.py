"""The page of a proof: result, differences with reasons, losses, and the commands' output."""

from __future__ import annotations

from pathlib import Path

from trainer.errors import ConfigError
from trainer.prove.comparison import COLUMNS, PairComparison
from trainer.prove.merging import CommandHistory
from trainer.prove.table import cells, sentences
from trainer.report.page import Page, Section


def write_page(found: PairComparison, folder: Path) -> Path:
    """Write report.html to the folder. Raises ConfigError without the extra `report`."""
    pair = (found.one, found.other)
    lead = [f"{each.name}: {each.command}" for each in pair]
    page = Page("The same" if found.is_same else "Not the same", lead)
    reference = [found.one.name, str(found.one.size), *[""] * len(COLUMNS), "reference"]
    columns = ["command", "ranks", *COLUMNS, "result"]
    about = f"{found.num_steps} steps in {found.bounds.name}; largest relative difference"
    page.add(Section("Result", [about], columns=columns, rows=[reference, cells(found)]))
    page.add(Section("Differences", sentences(found)))
    page.add(Section("Notes", found.notes))
    try:
        chart = page.chart("loss", {each.name: _losses(each) for each in pair})
        page.add(Section("Losses", charts=[chart]))
    except ConfigError:
        pass  # without matplotlib
    for output in sorted(folder.glob("*/output.txt")):
        text = output.read_text(encoding="utf-8", errors="replace")
        page.add(Section(f"Output of {output.parent.name}", text=text[-4000:]))
    path = folder / "report.html"
    page.write(path)
    return path


def _losses(history: CommandHistory) -> dict[int, float]:
    return {place: step.losses["mean"] for place, step in enumerate(history.steps, 1)}
