"""Charts as SVG, and numbers as text.

The box is 2000 x 1000 units, whatever its size on the page; words are HTML beside it, so that they
keep their size. Colours are the page's, for light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from trainer.base.same import RUNS, relative

SPEED = "speed/"  # curves of time and memory, which begin at 0
MOST_CURVES = 8
THIN = 2  # width of a curve, in pixels
MOST_DRAWN = 1e150  # of a value that is drawn: a larger one is as infinite
W, H = 2000, 1000  # of the box
MOST_POINTS = {True: 400, False: 160}  # of a line, in a large chart and in a small one
FEW_POINTS = {True: 30, False: 12}  # points, which are then marked
_Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """A range of values. `names` are the words of the values to name, by default round ones."""

    low: float
    high: float
    is_log: bool = False
    names: Mapping[float, str] = field(default_factory=dict)

    @classmethod
    def over(
        cls, values: Sequence[float], is_log: bool, names: Mapping[float, str] | None = None
    ) -> Axis:
        """Return the axis of finite values, a little longer than they need."""
        low, high = (min(values), max(values)) if values else (0.0, 1.0)
        if is_log:
            margin = max((high / low) ** 0.04, 1.01)
            return cls(low / margin, high * margin, True, names or {})
        largest = max(abs(low), abs(high))
        is_flat = high - low <= 1e-12 * largest
        margin = (largest * 0.1 or 1.0) if is_flat else (high - low) * 0.04
        return cls(low - margin, high + margin, False, names or {})

    def place(self, value: float) -> float:
        """Return the place of a value, from 0 to 1."""
        if self.is_log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)

    def ticks(self, most: int, name: str = "") -> list[tuple[float, str]]:
        """Return places in percent and words of round values of the curve `name`."""
        if self.names:
            return [(100 * self.place(n), name) for n, name in self.names.items()]
        values = _round_powers(self) if self.is_log else _round_values(self, most)
        return [(100 * self.place(value), rounded(name, value)) for value in values]


def _round_values(axis: Axis, most: int) -> list[float]:
    rough = (axis.high - axis.low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(f * power for f in (1, 2, 5, 10) if f * power >= rough * 0.999)
    first, last = math.ceil(axis.low / step - 1e-6), math.floor(axis.high / step + 1e-6)
    return [multiple * step for multiple in range(first, last + 1)]


def _round_powers(axis: Axis) -> list[float]:
    first, last = math.floor(math.log10(axis.low)), math.ceil(math.log10(axis.high))
    factors = (1, 2, 5) if last - first <= 3 else (1,)
    every = 1 + (last - first) // 6
    values = [f * 10.0**power for power in range(first, last + 1, every) for f in factors]
    inside = [value for value in values if axis.low <= value <= axis.high]
    return inside if len(inside) > 1 else _round_values(axis, 3)


@dataclass(frozen=True)
class Line:
    """A curve of a chart. `color` is its place in the palette; one that is not thin is pale.

    `dots` are marked, instead of the points of a short curve.
    """

    label: str
    curve: Mapping[int, float] | Mapping[float, float]
    color: int = 0
    width: int = THIN
    dots: Sequence[tuple[float, float]] = ()

    @property
    def is_pale(self) -> bool:
        return self.width > THIN


@dataclass(frozen=True)
class Drawn:
    """A line as paths: itself, dots of few points, and the range of many, of which it has means."""

    line: Line
    last: Cell
    path: str
    dots: str
    band: str

    @classmethod
    def of(cls, line: Line, name: str, x: Axis, y: Axis, is_large: bool) -> Drawn:
        def put(points: Sequence[tuple[float, float]]) -> list[tuple[int, int]]:
            return [(round(W * x.place(a)), round(H - H * y.place(b))) for a, b in points]

        points = sorted(line.curve.items())
        parts = [put(part) for part in _without_gaps(points)]
        num_points = sum(map(len, parts))
        size = math.ceil(num_points / MOST_POINTS[is_large])
        marked = put(line.dots)
        if not marked and num_points <= FEW_POINTS[is_large]:
            marked = [point for part in parts for point in part]
        return cls(
            line,
            last=Cell.number(points[-1][1] if points else None, name),
            path="".join(_path(_thin(part, size)) for part in parts),
            dots="".join(f"M{a} {b}h0" for a, b in marked),
            band="".join(_band(part, size) for part in parts) if size > 1 else "",
        )


@dataclass(frozen=True)
class Chart:
    """Values over the steps, or over those of `across`. `marks` are steps with words."""

    title: str
    lines: Sequence[Line]
    name: str = ""  # the curve's, if the title is another one
    note: str = ""
    is_large: bool = False
    has_legend: bool = True
    has_values: bool = True  # the last ones, in the legend
    marks: Mapping[int, str] | None = None
    across: Axis | None = None
    across_name: str = "step"

    @classmethod
    def of(cls, name: str, lines: Sequence[Line], **more: Any) -> Chart:
        """Return the chart of a curve's name, with a title for people."""
        title = spoken(name)
        return cls(title, lines, name if title != name else "", **more)

    @property
    def _points(self) -> _Points:
        points = [p for line in self.lines for p in (*line.curve.items(), *line.dots)]
        return [(x, y) for x, y in points if _is_drawn(y)]

    @property
    def x(self) -> Axis:
        return self.across or Axis.over([x for x, _ in self._points], is_log=False)

    @property
    def y(self) -> Axis:
        values = [y for _, y in self._points]
        is_of_zero = self._name.startswith(("optim/lr", SPEED))
        if is_of_zero and values and min(values) >= 0:
            return Axis(0, max(values) * 1.05 or 1.0)
        return Axis.over(values, self._is_log)

    @property
    def _is_log(self) -> bool:
        """True for a fall of positive values over more than two orders of magnitude."""
        values = [y for _, y in self._points]
        is_wide = bool(values) and min(values) > 1 / MOST_DRAWN and max(values) > 100 * min(values)
        return is_wide and any(map(_falls, self.lines))

    @property
    def drawn(self) -> list[Drawn]:
        """The lines as paths, with the words of the legend."""
        x, y = self.x, self.y
        return [Drawn.of(line, self._name, x, y, self.is_large) for line in self.lines]

    @property
    def _name(self) -> str:
        return self.name or self.title

    @property
    def x_ticks(self) -> list[tuple[float, str]]:
        return self.x.ticks(7 if self.is_large else 4)

    @property
    def y_ticks(self) -> list[tuple[float, str]]:
        return self.y.ticks(5 if self.is_large else 3, self._name)

    @property
    def resumes(self) -> list[tuple[float, str]]:
        """Places in percent and words of the marks inside."""
        x = self.x
        marks = [(100 * x.place(step), words) for step, words in (self.marks or {}).items()]
        return [mark for mark in marks if 0 <= mark[0] <= 100]

    @property
    def words(self) -> str:
        """The words that stand for the chart, for readers who do not see it."""
        return describe(self.title, self.lines, self.across_name)


def _is_drawn(value: float) -> bool:
    return abs(value) < MOST_DRAWN  # False for nan


def _falls(line: Line) -> bool:
    values = [y for _, y in sorted(line.curve.items()) if _is_drawn(y)]
    return bool(values) and values[0] > values[-1]


def _without_gaps(points: Sequence[tuple[float, float]]) -> Iterator[_Points]:
    """Yield the parts between values that are not finite."""
    part: _Points = []
    for point in [*points, (0.0, math.nan)]:
        if _is_drawn(point[1]):
            part.append(point)
        elif part:
            yield part
            part = []


def _thin(part: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """Return the means of every `size` points."""
    groups = [part[n : n + size] for n in range(0, len(part), size)]
    return [(round(fmean(x for x, _ in g)), round(fmean(y for _, y in g))) for g in groups]


def _band(part: Sequence[tuple[int, int]], size: int) -> str:
    """Return the area between the least and the largest of every `size` points."""
    groups = [part[n : n + size] for n in range(0, len(part), size)]
    middles = [round(fmean(x for x, _ in group)) for group in groups]
    tops = [(x, min(y for _, y in g)) for x, g in zip(middles, groups, strict=True)]
    feet = [(x, max(y for _, y in g)) for x, g in zip(middles, groups, strict=True)]
    return f"{_path([*tops, *reversed(feet)])}z"


def _path(points: Sequence[tuple[int, int]]) -> str:
    """Return a path through the points, by their distances, which are short."""
    before = points[0]
    text = f"M{before[0]} {before[1]}l"
    for point in points[1:] or points:
        text += f"{point[0] - before[0]} {point[1] - before[1]} "
        before = point
    return text.rstrip()


def describe(title: str, lines: Sequence[Line], across: str = "step") -> str:
    """Return the words that stand for a chart, for readers who do not see it."""
    parts = []
    for line in lines:
        finite = {x: y for x, y in line.curve.items() if _is_drawn(y)}
        if not finite:
            parts.append(f"{line.label}: no finite value")
            continue
        first, last = min(finite), max(finite)
        low, high = min(finite.values()), max(finite.values())
        start = f"from {finite[first]:.4g} at {across} {rounded('', first)}"
        ends = f"{start} to {finite[last]:.4g} at {across} {rounded('', last)}"
        parts.append(f"{line.label}: {ends}, between {low:.4g} and {high:.4g}")
    return f"{title}. {'; '.join(parts)}."


TITLES = {
    "optim/lr": "learning rate",
    "optim/grad_norm": "gradient norm",
    "speed/examples_per_s": "examples/s",
    "speed/memory_gb": "memory (GB)",
    "speed/reserved_gb": "memory reserved (GB)",
    "speed/mfu": "model FLOP/s utilization",
}
PERCENT = ("acc", "accuracy", "top1", "top5")  # ends of names of values from 0 to 1


@dataclass(frozen=True)
class Cell:
    """A value of a table or a card. `exact` is all of it, for a tooltip and for sorting.

    `color` is that of a run's curve, as a place in the palette.
    """

    text: str
    exact: str = ""
    is_number: bool = False
    color: int | None = None

    @classmethod
    def number(cls, value: float | None, name: str = "") -> Cell:
        """Return a value of the curve `name`."""
        return cls("") if value is None else cls(shown(name, value), exact(value), True)


def spoken(name: str) -> str:
    """Return a curve's name for people: `bits per byte`."""
    return TITLES.get(name, name.replace("_", " "))


def exact(value: float) -> str:
    """Return all digits of a value."""
    return repr(float(value)) if isinstance(value, float) else str(value)


def shown(name: str, value: float) -> str:
    """Return a value of the curve `name` with four digits: `82.2 %`, `0.6930`, `12,340`."""
    if not abs(value) < math.inf:  # it may be an integer that no float can hold
        return "not finite"
    if _is_percent(name, value):
        return f"{100 * value:.1f} %"
    return rounded(name, value, 4, is_short=name.startswith(("optim/", "speed/")))


def rounded(name: str, value: float, digits: int = 6, is_short: bool = True) -> str:
    """Return a value of the curve `name`: `0.002`, `80 %`, `8.6e-08`; a short one ends in no 0."""
    if _is_percent(name, value):
        return f"{rounded('', 100 * value)} %"
    if value and not 1e-4 <= abs(value) < 1e15:
        return f"{value:.{min(digits, 3)}g}"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value)))) if value else 0
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text and is_short else text


def _is_percent(name: str, value: float) -> bool:
    return name.endswith(PERCENT) and 0 <= value <= 1


def duration(seconds: float) -> str:
    """Return `84 s`, `2 min 5 s` or `3 h 20 min`."""
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s" if whole >= 10 else f"{seconds:.1f} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60:,} h {minutes % 60} min"


def overlay(
    curves: Mapping[int, Mapping[int, float]], limit: float = RUNS.fp32
) -> tuple[dict[int, int], str]:
    """Return the widths of the runs' curves, so that those equal up to `limit` are all seen; and
    words. The first one of equal ones is the widest."""
    groups: dict[int, list[int]] = {}
    worst = 0.0
    for run_index, curve in curves.items():
        distances = {first: _distance(curves[first], curve) for first in groups}
        first = next((n for n, each in distances.items() if each <= limit), run_index)
        groups.setdefault(first, []).append(run_index)
        worst = max(worst, distances.get(first, 0.0))
    widths = {
        n: THIN + 4 * min(layer, 3)
        for those in groups.values()
        for layer, n in enumerate(reversed(those))
    }
    words = "identical" if not worst else f"equal up to {worst:.0e}"
    if len(groups) > 1:
        words = f"{len(curves):,} runs, {len(groups):,} curves"
    return widths, words * (len(groups) < len(curves))


def _distance(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Return the largest relative distance; infinity if they are not at the same steps."""
    shared = one.keys() & other.keys()
    if not shared or len(shared) < min(len(one), len(other)):
        return math.inf
    pairs = [(one[step], other[step]) for step in shared if repr(one[step]) != repr(other[step])]
    return max((relative(a, b, abs(b)) for a, b in pairs), default=0.0)
