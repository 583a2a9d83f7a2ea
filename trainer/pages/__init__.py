"""Pages: one self-contained HTML file of states, cards, tables and charts.

Pages and charts know no run: what they show is given as words and numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import trainer
from trainer.base.durable_files import replace_file
from trainer.base.errors import ConfigError, visible
from trainer.pages.charts import Cell, Chart

MOST_CHARTS = 100  # of a page
PAGE_TEMPLATE = Path(__file__).with_name("page.html")
Row = Sequence[str | Cell]


@dataclass(frozen=True)
class Card:
    """A figure at the top of a page."""

    label: str
    value: str | Cell
    note: str = ""


@dataclass(frozen=True)
class Status:
    """The words that a page begins with; `kind` is good, bad or open."""

    kind: str
    words: str
    about: str = ""


@dataclass(frozen=True)
class Section:
    """Part of a page: lines, charts, a table with `columns`, and preformatted text.

    Without columns the rows are pairs of a name and a value. `legend` has the colours of all
    charts, as places in the palette, with their words.
    """

    title: str
    lines: Sequence[str] = ()
    charts: Sequence[Chart] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Row] = ()
    legend: Sequence[tuple[int, str]] = ()
    text: str = ""
    size: Literal["small", "medium", "large"] = "small"  # of the charts
    is_folded: bool = False
    is_beside: bool = False  # other tables, if there is room
    is_sortable: bool = False


@dataclass
class Page:
    """A page under construction."""

    title: str
    lead: str = ""
    states: Sequence[Status] = ()
    cards: Sequence[Card] = ()
    sections: list[Section] = field(default_factory=list)

    def add(self, section: Section) -> None:
        """Add a section that has something to show."""
        if section.lines or section.charts or section.rows or section.text:
            self.sections.append(section)

    def add_charts(self, charts: Sequence[Chart], num: int, first: Section) -> None:
        """Add the charts, the first ones of `num`: large ones in the section `first`, then small
        ones."""
        large, small = ([c for c in charts if c.is_large == size] for size in (True, False))
        left_out = [f"The first {len(charts):,} of {num:,} charts."] if len(charts) < num else []
        self.add(replace(first, lines=[*first.lines, *left_out], charts=large, size="large"))
        self.add(Section("", charts=small))

    def write(self, path: Path) -> None:
        """Write the page as a whole, or not at all. Raises ConfigError if that fails."""
        from jinja2 import Environment

        environment = Environment(
            autoescape=True, finalize=_escape, trim_blocks=True, lstrip_blocks=True
        )
        template = environment.from_string(PAGE_TEMPLATE.read_text(encoding="utf-8"))
        write_out(path, template.render(page=self, footer=f"Lockstep {trainer.__version__}"))


def write_out(path: Path, text: str) -> None:
    """Write the file of out=FILE as a whole, or not at all. Raises ConfigError if that fails."""
    try:
        replace_file(path, text)
    except OSError as error:
        raise ConfigError(f"out={path}: {error.strerror}; use out=FILE elsewhere") from None


def _escape(value: Any) -> Any:
    """Escape control characters of words, not of the template's own HTML."""
    if type(value) is not str:
        return value
    return "\n".join(visible(line) for line in value.split("\n"))
