"""Small plots as SVG text, whose colours are the page's: they follow light and dark, and ask for no file."""

from __future__ import annotations

import html
import io
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

SIZE = (3.7, 2.55)
"""Inches: a plot is legible at the width of a telephone."""

# Colours that stand for variables of the page's style sheet.
_FG, _MUTED, _LINE, _CARD = "#010101", "#020202", "#030303", "#040404"
_SERIES = [f"#0a0a{index:02x}" for index in range(8)]
_VARIABLES = {_FG: "--fg", _MUTED: "--muted", _LINE: "--line", _CARD: "--card"} | {
    colour: f"--s{index}" for index, colour in enumerate(_SERIES)
}
_DASHES = ("-", "--", ":", "-.")
_MARKERS = "os^DvPX*"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none", "svg.hashsalt": "sweep", "font.size": 9, "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"], "axes.edgecolor": _MUTED, "axes.labelcolor": _FG, "axes.titlecolor": _FG,
    "text.color": _FG, "xtick.color": _MUTED, "ytick.color": _MUTED, "xtick.labelcolor": _FG, "ytick.labelcolor": _FG,
    "axes.facecolor": "none", "figure.facecolor": "none", "axes.grid": True, "grid.color": _LINE, "grid.linewidth": 0.6,
    "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left", "axes.titlesize": 9.5,
    "axes.titleweight": "bold", "axes.axisbelow": True, "lines.linewidth": 1.6, "lines.markersize": 4.5,
    "path.simplify_threshold": 0.5,
}  # fmt: skip


@dataclass(frozen=True)
class Look:
    """Colour, dash and marker, by number."""

    colour: int
    dash: int = 0
    marker: int = 0

    @property
    def swatch(self) -> str:
        """A sample of the line for the legend, as SVG."""
        dash = ("", "5 3", "1.5 3", "6 2 1.5 2")[self.dash]
        return (
            f'<svg viewBox="0 0 30 10" width="30" height="10" aria-hidden="true"><line x1="0" x2="30" y1="5" y2="5" '
            f'stroke="var(--s{self.colour})" stroke-width="2.5" stroke-dasharray="{dash}"/></svg>'
        )


@dataclass(frozen=True)
class Curve:
    """Points with a band; ``low`` and ``high`` are None where there is no interval. ``dots``: (x, y) of single runs."""

    name: str
    look: Look
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float | None]
    high: Sequence[float | None]
    dots: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Bar:
    """An interval of a forest plot."""

    name: str
    look: Look
    mean: float
    low: float | None
    high: float | None
    faint: bool = False


def _svg(figure: Figure, description: str) -> str:
    """The figure as an inline element: no header, no metadata, no ids but those that it refers to."""
    file = io.StringIO()
    figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None}, transparent=True)
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    text = re.sub(r' id="[A-Za-z0-9]+_\d+"', "", text)
    # The page has many: the ids that stay are digests, of the clip paths and markers, made unlike those of the others.
    salt = f"{zlib.crc32(text.encode()):08x}"
    text = re.sub(r'(id="|url\(#|href="#)([mp][0-9a-f]{8,})', rf"\g<1>\g<2>{salt}", text)
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    box = re.search(r'viewBox="[^"]*"', text)
    assert box is not None
    head = f'<svg class="plot" role="img" aria-label="{html.escape(description, quote=True)}" {box.group()}'
    return re.sub(r"<svg [^>]*>", lambda _: f"{head}>", text, count=1).strip()


def _axes(size: tuple[float, float] = SIZE, left: float = 0.72) -> tuple[Figure, Axes]:
    """One plot; margins in inches, fixed: matplotlib's own layout takes five times as long."""
    width, height = size
    figure = Figure(figsize=size)
    axes = figure.add_subplot()
    figure.subplots_adjust(left / width, 0.45 / height, 1 - 0.08 / width, 1 - 0.28 / height)
    return figure, axes


def _finite(values: Sequence[float | None]) -> list[float]:
    return [math.nan if value is None else value for value in values]


def lines(
    curves: Sequence[Curve], *, title: str, x_name: str, y_name: str, ticks: Sequence[int] | None = None,
    log: bool = False, marks: bool = True, span: tuple[float, float] | None = None,
) -> str:  # fmt: skip
    """Curves with bands.

    Args:
        curves: with the same meaning of x.
        ticks: the x values are lags, drawn at equal distances with these labels.
        log: logarithmic y axis.
        marks: a marker at each point, open where there is no interval.
        span: of the y axis, for plots that are compared; None: what the curves need.
    """
    with rc_context(_STYLE):
        figure, axes = _axes()
        for curve in curves:
            x = [ticks.index(int(value)) for value in curve.x] if ticks else list(curve.x)
            colour = _SERIES[curve.look.colour]
            axes.plot(x, curve.y, _DASHES[curve.look.dash], color=colour)
            for at, y, low in zip(x, curve.y, curve.low, strict=True) if marks else ():
                face = "none" if low is None else colour
                axes.plot(at, y, _MARKERS[curve.look.marker], color=colour, markerfacecolor=face)
            dots = [(ticks.index(int(at)) if ticks else at, y) for at, y in curve.dots]
            if dots:
                axes.plot(*zip(*dots, strict=True), ".", color=colour, alpha=0.4, markersize=4, markeredgewidth=0)
            axes.fill_between(x, _finite(curve.low), _finite(curve.high), color=colour, alpha=0.16, linewidth=0)
        if ticks:
            axes.set_xticks(range(len(ticks)), [str(tick) for tick in ticks])
            axes.set_xlim(-0.25, len(ticks) - 0.75)
        if log:
            axes.set_yscale("log")
            axes.yaxis.set_minor_locator(LogLocator(subs=(2, 5)))
            axes.yaxis.set_major_formatter("{x:g}")
            axes.yaxis.set_minor_formatter("{x:g}")
        if span:
            axes.set_ylim(span)
        axes.set(xlabel=x_name, ylabel=y_name, title=title)
        names = ", ".join(curve.name for curve in curves)
        return _svg(figure, f"{title}: {y_name} by {x_name}; {names}. The tables hold the numbers")


def span_of(curves: Iterable[Curve], lowest: float = -math.inf, highest: float = math.inf) -> tuple[float, float]:
    """A y axis that holds curves, bands and dots, with a margin, within what the numbers can be."""
    ends = [
        y for curve in curves for y in (*curve.y, *curve.low, *curve.high, *(y for _, y in curve.dots)) if y is not None
    ]
    low, high = max(min(ends), lowest), min(max(ends), highest)
    margin = 0.04 * (high - low) or 0.01
    return low - margin, high + margin


def forest(bars: Sequence[Bar], *, title: str, x_name: str, matters: float, span: Sequence[float]) -> str:
    """Differences with intervals, one a row, the zone of no consequence shaded; faint ones are interim.

    The axis covers that zone and all of ``span``: plots that stand together share it.
    """
    with rc_context(_STYLE):
        longest = max((len(bar.name) for bar in bars), default=0)
        figure, axes = _axes((SIZE[0], 0.9 + 0.25 * len(bars)), left=0.2 + 0.075 * longest)
        axes.axvspan(-matters, matters, color=_LINE, alpha=0.6, linewidth=0)
        axes.axvline(0, color=_MUTED, linewidth=1)
        for row, bar in enumerate(bars):
            colour, alpha = _SERIES[bar.look.colour], 0.4 if bar.faint else 1.0
            if bar.low is not None and bar.high is not None:
                axes.plot([bar.low, bar.high], [row, row], color=colour, linewidth=2.2, alpha=alpha)
            face = "none" if bar.faint else colour
            axes.plot([bar.mean], [row], _MARKERS[bar.look.marker], color=colour, markerfacecolor=face, markersize=6)
        axes.set_yticks(range(len(bars)), [bar.name for bar in bars])
        axes.set_ylim(len(bars) - 0.5, -0.5)
        low, high = min(-matters, *span), max(matters, *span)
        axes.set_xlim(low - 0.05 * (high - low), high + 0.05 * (high - low))
        axes.grid(axis="y", visible=False)
        axes.set(xlabel=x_name, title=title)
        rows = "; ".join(f"{bar.name} {bar.mean:+.3f}" for bar in bars)
        return _svg(figure, f"{title}: {rows}")


def scatter(points: Sequence[Curve], *, title: str, x_name: str, y_name: str) -> str:
    """One mark a point, with its lag beside it (``low`` holds the lags)."""
    with rc_context(_STYLE):
        figure, axes = _axes()
        for curve in points:
            marker = _MARKERS[curve.look.marker]
            axes.plot(curve.x, curve.y, marker, color=_SERIES[curve.look.colour], linestyle="none")
            for x, y, lag in zip(curve.x, curve.y, curve.low, strict=True):
                axes.annotate(f"{lag:g}", (x, y), (4, 3), textcoords="offset points", fontsize=7.5, color=_MUTED)
        axes.set(xlabel=x_name, ylabel=y_name, title=title)
        axes.margins(0.12)
        axes.locator_params(axis="x", nbins=5)  # the labels of more would run into each other, and out of the figure
        return _svg(figure, f"{title}: {y_name} by {x_name}; numbers are lags")
