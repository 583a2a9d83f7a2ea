"""Write SVG figures for the documentation without a plotting package; text stays text."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
IMAGES = REPOSITORY / "docs/images"

Point = tuple[float, float]


def line(start: Point, end: Point, stroke: str, **attributes: object) -> str:
    places = f'x1="{start[0]:.1f}" y1="{start[1]:.1f}" x2="{end[0]:.1f}" y2="{end[1]:.1f}"'
    return f'<line {places} stroke="{stroke}"{_written(attributes)}/>'


def polyline(points: Iterable[Point], stroke: str, **attributes: object) -> str:
    places = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline fill="none" points="{places}" stroke="{stroke}"{_written(attributes)}/>'


def text(place: Point, words: str, **attributes: object) -> str:
    where = f'x="{place[0]:.1f}" y="{place[1]:.1f}"'
    return f"<text {where}{_written(attributes)}>{escape(words)}</text>"


def power_of_ten(place: Point, power: int, **attributes: object) -> str:
    words = f'10<tspan dy="-5" font-size="9">{power}</tspan>'
    return f'<text x="{place[0]:.1f}" y="{place[1]:.1f}"{_written(attributes)}>{words}</text>'


def document(
    width: int, height: int, parts: list[str], *, title: str, description: str, background: str
) -> str:
    """Return a whole SVG file; `title` and `description` are for screen readers."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"'
            ' aria-labelledby="title description" font-family="sans-serif" font-size="13">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="description">{escape(description)}</desc>',
            f'<rect width="{width}" height="{height}" fill="{background}"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def _written(attributes: dict[str, object]) -> str:
    """Return keywords as SVG attributes: stroke_width=2 gives stroke-width="2"; omit None."""
    given = ((name.replace("_", "-"), value) for name, value in attributes.items())
    return "".join(f' {name}="{value}"' for name, value in given if value is not None)
