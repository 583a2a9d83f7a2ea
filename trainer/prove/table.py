"""The table of a proof, the sentences below it, and the same as JSON."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from trainer.errors import visible
from trainer.prove.comparison import COLUMNS, PairComparison


def show(found: PairComparison) -> None:
    """Print the table, what differs and why, and the overall result."""
    table = Table("command", "ranks", *COLUMNS, "result", box=None, header_style="bold")
    table.add_row(found.one.name, str(found.one.size), *[""] * len(COLUMNS), "reference")
    table.add_row(*cells(found))
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    steps = f"{found.num_steps} steps in {found.bounds.name}"
    console.print(f"{steps}; largest relative difference from A", table, sep="\n")
    for line in [*sentences(found), *(f"note: {note}" for note in found.notes)]:
        console.print(visible(line), markup=False, soft_wrap=True)
    if found.is_same:
        console.print("proved: both commands learned the same")
    else:
        console.print(f"NOT the same: {found.result}")


def cells(found: PairComparison) -> list[str]:
    """Return the row of the compared command."""
    shown = [_cell(found, column) for column in COLUMNS]
    return [found.other.name, str(found.other.size), *shown, found.result]


def _cell(found: PairComparison, column: str) -> str:
    value = found.worst[column]
    if column in ("examples", "evaluation"):
        if column == "evaluation" and not found.is_evaluated:
            return "-"
        return "differ" if value else "same"
    return "0" if value == 0 else f"{value:.0e}"


def sentences(found: PairComparison) -> list[str]:
    """Return two lines for each difference: where it is, and its likely reason."""
    lines = []
    for each in found.deviations:
        is_before = each.kind in ("evaluation", "initial weights", "steps", "ranks")
        number = found.number_of(each.place)
        when = "" if is_before else f"step {number}: "
        lines.append(f"{when}{each.where}")
        if each.reason:
            lines.append(f"  likely reason: {each.reason}")
    return lines


def as_dictionary(found: PairComparison) -> dict[str, Any]:
    """Return the result for --json."""
    return {
        "is_same": found.is_same,
        "steps": found.num_steps,
        "arithmetic": found.bounds.name,
        "commands": {each.name: each.command for each in (found.one, found.other)},
        "ranks": {each.name: each.size for each in (found.one, found.other)},
        "largest_difference": found.worst,
        "differences": [
            {
                "kind": each.kind,
                "step": found.number_of(each.place),
                "what": each.where,
                "reason": each.reason,
            }
            for each in found.deviations
        ],
        "notes": found.notes,
    }
