"""Charts as SVG: lines, points, bars. Colors are classes of the page's style, so a chart follows its theme."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ortrain._fit.markup import Markup, element, join

WIDTH, HEIGHT = 420, 250
_TOP, _BOTTOM, _RIGHT = 12, 38, 14
# Mean width of a character of a label, at size 12.
_CHARACTER = 6.6
# A line of more points is no clearer.
_MAX_POINTS = 300


@dataclass(frozen=True)
class Series:
    """Line of a chart."""

    label: str
    xs: Sequence[float]
    ys: Sequence[float]
    color: str
    """Class of the color: ``c1`` to ``c5``, or ``faint``."""
    has_points: bool = True
    """True to draw a point at each value if there are few."""


@dataclass(frozen=True)
class Scale:
    """Map of values to coordinates."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def __call__(self, value: float) -> float:
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        share = (value - low) / ((high - low) or 1.0)
        return self.start + min(max(share, 0.0), 1.0) * (self.end - self.start)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers between two values: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    step = 10.0 ** math.floor(math.log10((high - low) / count))
    for factor in (1, 2, 5, 10):
        if (high - low) / (step * factor) <= count:
            step *= factor
            break
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Return the powers of ten between two values, at most six."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    every = max(1, math.ceil((last - first + 1) / 6))
    return [10.0**power for power in range(first, last + 1, every)]


def label(value: float) -> str:
    """Return a number for an axis."""
    if value == 0:
        return "0"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e6 or size < 1e-4:
        mantissa, exponent = f"{value:.2e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    return f"{value:,.0f}" if size >= 1e4 else f"{value:.4g}"


def line_chart(
    title: str,
    series: Sequence[Series],
    x_title: str,
    x_range: tuple[float, float],
    may_be_log: bool = False,
    *,
    is_x_log: bool = False,
    mark: float | None = None,
) -> Markup:
    """Return a picture of lines over one axis.

    Values that are not finite interrupt a line. With ``may_be_log``, positive values over more than two powers of ten
    get a logarithmic axis. The mark is a vertical line.
    """
    values = [y for line in series for y in line.ys if math.isfinite(y)]
    if not values:
        return element("p", f"{title}: no value is finite.", class_="note")
    low, high = min(values), max(values)
    is_log = may_be_log and low > 0 and high / low > 100
    y_ticks = log_ticks(low, high) if is_log else []
    if len(y_ticks) < 2:
        is_log = False
        # A constant is drawn above zero.
        padding = 0.05 * (high - low) or abs(high) or 1.0
        low, high = low - padding if low < 0 or low > padding else 0.0, high + padding
        y_ticks = ticks(low, high, 6)
    left = _left(y_ticks)
    x = Scale(*x_range, left, WIDTH - _RIGHT, is_x_log)
    y = Scale(low, high, HEIGHT - _BOTTOM, _TOP, is_log)
    x_ticks = [tick for tick in ticks(*x_range, 6) if x_range[1] - x_range[0] < 2 or tick == int(tick)]
    parts = [_grid(x, y, log_ticks(*x_range) if is_x_log else x_ticks, y_ticks, x_title)]
    if mark is not None:
        parts.append(element("line", x1=x(mark), y1=y.end, x2=x(mark), y2=y.start, class_="reference"))
    parts += [_line(line, x, y, x_title) for line in series]
    return _svg(f"{title} by {x_title}", parts)


def _line(line: Series, x: Scale, y: Scale, x_title: str) -> Markup:
    xs, ys = thinned(line.xs, line.ys)
    parts = [element("path", d=_path(xs, ys, x, y), class_=f"line {line.color}")]
    finite = [(at, value) for at, value in zip(xs, ys, strict=True) if math.isfinite(value)]
    if line.has_points or len(finite) == 1:
        shown = finite if len(finite) <= 40 else finite[-1:]
        for at, value in shown:
            name = element("title", f"{line.label}: {value:.5g} ({x_title} {at:.4g})")
            parts.append(element("circle", name, cx=x(at), cy=y(value), r=3, class_=f"point {line.color}"))
    return join(*parts)


def _path(xs: Sequence[float], ys: Sequence[float], x: Scale, y: Scale) -> str:
    """Return the path of a line, which begins anew after a value that is not finite."""
    path, is_down = [], False
    for at, value in zip(xs, ys, strict=True):
        if math.isfinite(value):
            path.append(f"{'L' if is_down else 'M'}{x(at):.1f} {y(value):.1f}")
        is_down = math.isfinite(value)
    return "".join(path)


def thinned(xs: Sequence[float], ys: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return at most 300 points: means of neighbours."""
    if len(xs) <= _MAX_POINTS:
        return list(xs), list(ys)
    size = -(-len(xs) // _MAX_POINTS)
    groups = range(0, len(xs), size)
    return [_mean(xs[first : first + size]) for first in groups], [_mean(ys[first : first + size]) for first in groups]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def scatter(title: str, xs: Sequence[float], ys: Sequence[float]) -> Markup:
    """Return a picture of outputs over targets, with the line of exact outputs."""
    low, high = min(*xs, *ys), max(*xs, *ys)
    padding = 0.04 * (high - low) or 1.0
    low, high = low - padding, high + padding
    marks = ticks(low, high)
    left = _left(marks)
    x, y = Scale(low, high, left, WIDTH - _RIGHT), Scale(low, high, HEIGHT - _BOTTOM, _TOP)
    points = [
        element("circle", cx=x(target), cy=y(output), r=2.5, class_="dot c1")
        for target, output in zip(xs, ys, strict=True)
    ]
    exact = element("line", x1=x(low), y1=y(low), x2=x(high), y2=y(high), class_="reference")
    return _svg(title, [_grid(x, y, marks, marks, "target"), exact, *points])


def histogram(title: str, edges: Sequence[float], counts: Sequence[int], x_title: str) -> Markup:
    """Return a picture of counts between edges."""
    y_ticks = [tick for tick in ticks(0, max(*counts, 1), 4) if tick == int(tick)]
    left = _left(y_ticks)
    x, y = Scale(edges[0], edges[-1], left, WIDTH - _RIGHT), Scale(0, 1.05 * max(*counts, 1), HEIGHT - _BOTTOM, _TOP)
    bars = []
    for first, last, count in zip(edges, edges[1:], counts, strict=False):
        name = element("title", f"{count:,} from {first:.4g} to {last:.4g}")
        width = max(x(last) - x(first) - 1, 0.5)
        bars.append(
            element("rect", name, x=x(first), y=y(count), width=width, height=y(0) - y(count), rx=1, class_="bar c1")
        )
    zero = []
    if edges[0] < 0 < edges[-1]:
        zero = [element("line", x1=x(0), y1=y.end, x2=x(0), y2=y.start, class_="reference")]
    return _svg(title, [_grid(x, y, ticks(edges[0], edges[-1]), y_ticks, x_title), *bars, *zero])


def sparkline(title: str, values: Sequence[float]) -> Markup:
    """Return a small picture of a series, without axes. Values that are not finite interrupt the line."""
    width, height = 240, 80
    xs, ys = thinned(range(len(values)), values)
    finite = [y for y in ys if math.isfinite(y)] or [0.0]
    x, y = Scale(0, max(xs[-1], 1.0), 4, width - 4), Scale(min(finite), max(finite), height - 6, 6)
    line = element("path", d=_path(xs, ys, x, y), class_="line c1")
    return element("svg", line, viewBox=f"0 0 {width} {height}", role="img", aria_label=title)


def _left(y_ticks: Sequence[float]) -> float:
    return 12 + _CHARACTER * max(len(label(tick)) for tick in y_ticks)


def _grid(x: Scale, y: Scale, x_ticks: Sequence[float], y_ticks: Sequence[float], x_title: str) -> Markup:
    """Return the lines and labels of both axes."""
    parts = []
    for tick in y_ticks:
        at = y(tick)
        parts.append(element("line", x1=x.start, y1=at, x2=x.end, y2=at, class_="grid"))
        parts.append(element("text", label(tick), x=x.start - 6, y=at + 4, text_anchor="end"))
    for tick in x_ticks:
        at = x(tick)
        parts.append(element("line", x1=at, y1=y.start, x2=at, y2=y.start + 4, class_="axis"))
        # A label at the end of the axis stays inside the picture.
        half = _CHARACTER * len(label(tick)) / 2
        middle = min(max(at, half), WIDTH - half)
        parts.append(element("text", label(tick), x=middle, y=y.start + 17, text_anchor="middle"))
    parts.append(element("line", x1=x.start, y1=y.start, x2=x.end, y2=y.start, class_="axis"))
    parts.append(element("text", x_title, x=(x.start + x.end) / 2, y=HEIGHT - 5, text_anchor="middle", class_="title"))
    return join(*parts)


def _svg(title: str, parts: Sequence[Markup]) -> Markup:
    return element("svg", *parts, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=title)
