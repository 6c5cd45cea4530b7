"""What a plan is made of: ranges, and rows that say where their numbers come from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

GIB = 2**30


@dataclass(frozen=True)
class Range:
    """From ``low`` to ``high``, both included; a number that is known has both the same."""

    low: float
    high: float

    @staticmethod
    def exactly(value: float) -> Range:
        return Range(value, value)

    def __add__(self, other: Range) -> Range:
        return Range(self.low + other.low, self.high + other.high)

    def __mul__(self, factor: float) -> Range:
        return Range(self.low * factor, self.high * factor)

    def over(self, divisor: Range) -> Range:
        """The quotient of two positive ranges that do not depend on each other."""
        return Range(self.low / divisor.high, self.high / divisor.low)

    def most(self, other: Range) -> Range:
        """The larger of two that do not depend on each other."""
        return Range(max(self.low, other.low), max(self.high, other.high))


ZERO = Range(0.0, 0.0)


@dataclass(frozen=True)
class Row:
    """One use of memory.

    Attributes:
        name: what holds it.
        size: in bytes, on the fullest rank.
        formula: how it is computed, with its numbers.
        source: the code or paper that the formula follows.
    """

    name: str
    size: Range
    formula: str
    source: str


def total(rows: Iterable[Row]) -> Range:
    """Sum of the rows' sizes."""
    return sum((row.size for row in rows), ZERO)


@dataclass(frozen=True)
class Memory:
    """Memory of one GPU: what always stands there, and what the larger of its phases adds.

    Attributes:
        title: whose GPU it is.
        standing: rows that stay.
        phases: by name of a phase, the rows that it adds; phases follow one another.
        notes: what the rows cannot say.
    """

    title: str
    standing: tuple[Row, ...]
    phases: dict[str, tuple[Row, ...]] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def peak(self) -> Range:
        """Bytes at the fullest moment."""
        moving = ZERO
        for rows in self.phases.values():
            moving = moving.most(total(rows))
        return total(self.standing) + moving


def size(nbytes: float) -> str:
    """Bytes in words, in binary units (as GPUs are sold)."""
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if nbytes >= 100 else f"{nbytes:.3g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB" if nbytes < 1000 else f"{nbytes / 1024:.2f} TiB"


def count(number: float) -> str:
    """A number in words: ``30.5 B``."""
    for unit in ("", " k", " M", " B"):
        if abs(number) < 1000:
            return f"{number:.3g}{unit}"
        number /= 1000
    return f"{number:.3g} T"
