"""A page: sections of lines, charts and tables in one HTML file, which needs no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import trainer
from trainer.errors import ConfigError, visible
from trainer.record.files import replace_file
from trainer.report.charts import draw
from trainer.report.reading import Curve

MOST_CHARTS = 100  # of a page: each takes up to a second
TEMPLATE = Path(__file__).with_name("page.html")


@dataclass(frozen=True)
class Section:
    """Part of a page: lines, charts, a table with `columns`, and preformatted text."""

    title: str
    lines: Sequence[str] = ()
    charts: Sequence[str] = ()
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    text: str = ""


@dataclass
class Page:
    """A page under construction; its charts are numbered."""

    title: str
    lead: Sequence[str] = ()
    sections: list[Section] = field(default_factory=list)
    _num_charts: int = 0

    def chart(self, name: str, curves: Mapping[str, Curve]) -> str:
        """Return the SVG of one value over the steps. Raises ConfigError without matplotlib."""
        self._num_charts += 1
        return draw(name, curves, self._num_charts)

    def add(self, section: Section) -> None:
        """Add a section that has something to show."""
        if section.lines or section.charts or section.rows or section.text:
            self.sections.append(section)

    def write(self, path: Path) -> None:
        """Write the page as a whole, or not at all. Raises ConfigError if that fails."""
        from jinja2 import Environment
        from markupsafe import Markup

        template = Environment(autoescape=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
        text = template.render(
            title=visible(self.title),
            lead=map(visible, self.lead),
            sections=[_safe(section, Markup) for section in self.sections],
            footer=f"Lockstep {trainer.__version__}",
        )
        try:
            replace_file(path, text)
        except OSError as error:
            raise ConfigError(f"out={path}: {error.strerror}; use out=FILE elsewhere") from None


def _safe(section: Section, markup: type) -> dict[str, object]:
    """Return a section for the template: only charts are HTML, everything else is escaped."""
    return {
        "title": visible(section.title),
        "lines": [visible(line) for line in section.lines],
        "charts": [markup(svg) for svg in section.charts],
        "columns": [visible(name) for name in section.columns],
        "rows": [[visible(cell) for cell in row] for row in section.rows],
        "text": "\n".join(visible(line) for line in section.text.splitlines()),
    }
