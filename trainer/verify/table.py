"""The table of findings that `trainer.verify` prints."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.table import Table

from trainer.data.batch_plan import Cut
from trainer.verify.comparison import Finding
from trainer.verify.layouts import (
    LAYOUTS,
    ONE_CUT,
    Layout,
    describe_batch,
    find_layout,
    find_reason,
)

GROUPS = ("examples", "losses", "gradients", "weights", "metrics")


def show(findings: Sequence[Finding], steps: int, left_out: Mapping[str, str]) -> None:
    """Print what is left out, the table, the reasons below it, and the overall result."""
    reasons: dict[str, list[str]] = {}
    for name, reason in left_out.items():
        reasons.setdefault(reason, []).append(name)
    for reason, names in reasons.items():
        print(f"left out: {', '.join(names)} ({reason})")
    table = Table("layout", "precision", *GROUPS, "result", box=None, header_style="bold")
    for finding in findings:
        cells = [_cell(finding, group) for group in GROUPS]
        table.add_row(finding.layout, finding.precision, *cells, finding.result)
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 160)
    caption = f"{steps} steps; largest relative difference from the reference"
    console.print(caption, table, sep="\n")
    for finding in findings:
        if finding.reason or finding.where:
            about = f"{finding.layout}, {finding.precision}: {finding.result}"
            why = "; ".join(part for part in (finding.where, finding.reason) if part)
            console.print(f"{about}: {why}", markup=False, soft_wrap=True)
    num_bad = sum(finding.is_bad for finding in findings)
    if num_bad:
        console.print(f"NOT proved: {num_bad} of {len(findings)}")
    else:
        console.print("proved: all runs learned the same")


def list_left_out(
    layouts: Sequence[Layout], units: int, cut: Cut, barred: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the default layouts that are not tried, each with the reason."""
    chosen = {layout.name for layout in layouts}
    left = [name for name in (ONE_CUT if cut.is_fixed else LAYOUTS) if name not in chosen]
    return {
        name: find_reason(find_layout(name), units, cut, barred) or describe_batch(units, cut)
        for name in left
    }


def _cell(finding: Finding, group: str) -> str:
    if not finding.worst:
        return ""
    value = finding.worst[group]
    if group == "examples":
        return "differ" if value else "same"
    return "0" if value == 0 else f"{value:.0e}"
