"""Histograms as coordinates, for the SVG of the report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 400, 190
LEFT, RIGHT, TOP, BOTTOM = 36, 8, 10, 34
_MOST_BARS = 25


@dataclass(frozen=True)
class Bar:
    """One bar, in units of the drawing; the marked part stands on top of the plain one."""

    x: float
    width: float
    low: int
    high: int
    """Values from ``low`` up to and without ``high``."""
    plain: int
    marked: int
    plain_height: float
    marked_height: float


@dataclass(frozen=True)
class Histogram:
    """A drawing of WIDTH x HEIGHT units."""

    bars: list[Bar]
    x_ticks: list[tuple[float, int]]
    y_ticks: list[tuple[float, int]]

    @property
    def base(self) -> float:
        """Where the bars stand."""
        return HEIGHT - BOTTOM


def round_step(smallest: float) -> int:
    """The least of 1, 2, 5, 10, 20, 50, ... that is no smaller."""
    if smallest <= 1:
        return 1
    power = 10 ** math.floor(math.log10(smallest))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= smallest)


def histogram(values: Sequence[tuple[int, bool]], top: int | None = None) -> Histogram | None:
    """Count values in bins of a round width.

    Args:
        values: numbers from 0 on, each with whether it is to be marked.
        top: the largest value that the axis covers; the largest there is by default.

    Returns:
        None without values.
    """
    if not values:
        return None
    top = max(value for value, _ in values) if top is None else top
    step = round_step((top + 1) / _MOST_BARS)
    count = top // step + 1
    plain, marked = [0] * count, [0] * count
    for value, is_marked in values:
        (marked if is_marked else plain)[value // step] += 1
    most = max(map(sum, zip(plain, marked, strict=True)))
    y_step = round_step(most / 4)
    ceiling = math.ceil(most / y_step) * y_step
    slot = (WIDTH - LEFT - RIGHT) / count
    unit = (HEIGHT - TOP - BOTTOM) / ceiling
    bars = [
        Bar(LEFT + slot * i, slot * 0.9, i * step, (i + 1) * step, p, m, p * unit, m * unit)
        for i, (p, m) in enumerate(zip(plain, marked, strict=True))
    ]
    # Single values are written under the middle of their bar, limits of ranges under its left edge.
    shift = slot * 0.45 if step == 1 else 0.0
    every = round_step(count / 6)
    x_ticks = [(LEFT + slot * i + shift, i * step) for i in range(0, count, every)]
    y_ticks = [(HEIGHT - BOTTOM - unit * y, y) for y in range(0, ceiling + 1, y_step)]
    return Histogram(bars, x_ticks, y_ticks)
