"""The control arms whose radii are those that a SAT arm had on average."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from benchmarks.arms import ARMS, Arm, matched

SUFFIX = "_matched"


def matched_to(name: str) -> str | None:
    """The SAT arm whose mean effective radius an arm of this name has: ``sat_grpo`` for ``grpo_matched``."""
    source = f"sat_{name.removesuffix(SUFFIX)}"
    return source if name.endswith(SUFFIX) and source in ARMS and name.removesuffix(SUFFIX) in ARMS else None


def mean_radii(radii: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Means of (lower, upper) effective radii over runs, to four digits: a key should not depend on the last bit."""
    low, high = (float(f"{fmean(side):.4g}") for side in zip(*radii, strict=True))
    return low, high


def arm_of(name: str, radii: tuple[float, float] | None) -> Arm:
    """The arm of this name; ``radii`` are those of a matched one."""
    if matched_to(name) is None:
        return ARMS[name]
    assert radii is not None
    return matched(ARMS[name.removesuffix(SUFFIX)], *radii)
