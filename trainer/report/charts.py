"""Curves as SVG that stands in a page: its colours are the page's, for light and dark."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping
from html import escape
from typing import Any

from trainer.errors import ConfigError
from trainer.report.reading import Curve

NEEDS = "run pip install 'lockstep-trainer[report]'"
INK, GRID = "#010203", "#040506"  # replaced by the page's colours
MOST_LINES = 8
FEW = 12  # points, which are then marked
DASHES = ("-", "--", "-.", ":")  # for readers who do not see the colours
LINES = [f"#0a0b{number:02x}" for number in range(MOST_LINES)]
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "lockstep",
    "font.family": "sans-serif",
    "text.color": INK,
    "axes.edgecolor": GRID,
    "axes.labelcolor": INK,
    "grid.color": GRID,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(name: str, curves: Mapping[str, Curve], number: int, title: str = "") -> str:
    """Return a chart of one value over the steps as an SVG element, with a line for each run.

    `number` makes the ids of its parts unique in the page. Raises ConfigError without matplotlib.
    """
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    except ImportError:
        raise ConfigError(f"charts: {NEEDS}") from None
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(6.4, 3.2), layout="constrained")
        axes = figure.subplots()
        axes.grid(True, linewidth=0.6)
        axes.set_xlabel("step")
        axes.set_ylabel(_plain(name))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        for number_of_line, (label, curve) in enumerate(curves.items()):
            steps = sorted(curve)
            axes.plot(
                steps,
                [curve[step] for step in steps],
                color=LINES[number_of_line],
                linestyle=DASHES[number_of_line % len(DASHES)],
                marker="o" if len(steps) < FEW else "",
                label=_plain(label),
                linewidth=1.5,
            )
        if len(curves) > 1:
            axes.legend(frameon=False)
        if _is_wide(curves):
            axes.set_yscale("log")
        file = io.StringIO()
        metadata: dict[str, Any] = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    return _adapt(file.getvalue(), number, title or name, describe(name, curves))


def _plain(text: str) -> str:
    """Return text that matplotlib shows as it is: $ would begin a formula."""
    return text.replace("$", r"\$")


def describe(name: str, curves: Mapping[str, Curve]) -> str:
    """Return the words that stand for a chart, for readers who do not see it."""
    parts = []
    for label, curve in curves.items():
        finite = {step: value for step, value in curve.items() if math.isfinite(value)}
        if not finite:
            parts.append(f"{label}: no finite value")
            continue
        first, last = min(finite), max(finite)
        low, high = min(finite.values()), max(finite.values())
        ends = f"from {finite[first]:.4g} at step {first:,} to {finite[last]:.4g} at step {last:,}"
        parts.append(f"{label}: {ends}, between {low:.4g} and {high:.4g}")
    if len(parts) == 1:
        return f"{parts[0]}."
    return f"{name}. {'; '.join(parts)}."


def _is_wide(curves: Mapping[str, Curve]) -> bool:
    """Return True for positive values over more than two orders of magnitude."""
    values = [v for curve in curves.values() for v in curve.values() if math.isfinite(v)]
    return bool(values) and min(values) > 0 and max(values) / min(values) > 100


def _adapt(svg: str, number: int, title: str, description: str) -> str:
    """Make a document an element of the page: own ids, the page's colours, words for it."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'\b(id="|xlink:href="#|url\(#)', rf"\g<1>c{number}-", svg)
    for color, variable in {INK: "ink", GRID: "grid"}.items():
        svg = svg.replace(color, f"var(--{variable})")
    for place, color in enumerate(LINES):
        svg = svg.replace(color, f"var(--line-{place})")
    label = f"c{number}-title c{number}-words"
    head = re.sub(r' (?:width|height|version|xmlns(?::xlink)?)="[^"]*"', "", svg.split(">", 1)[0])
    words = (
        f'<title id="c{number}-title">{escape(title)}</title>'
        f'<desc id="c{number}-words">{escape(description)}</desc>'
    )
    return f'{head} role="img" aria-labelledby="{label}">{words}{svg.split(">", 1)[1]}'
