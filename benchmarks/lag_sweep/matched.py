"""The control arms whose radii are those that a SAT arm had on average."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import NamedTuple

from benchmarks.arms import ARMS, Arm, matched

SUFFIX = "_matched"


class Radii(NamedTuple):
    """Lower and upper effective radius, and the cap for A < 0 where there is one."""

    low: float
    high: float
    cap: float | None = None


def matched_to(name: str) -> str | None:
    """The SAT arm whose mean effective radius an arm of this name has: ``sat_grpo`` for ``grpo_matched``."""
    source = f"sat_{name.removesuffix(SUFFIX)}"
    return source if name.endswith(SUFFIX) and source in ARMS else None


def base_of(source: str) -> Arm:
    """The arm without SAT that a SAT arm rests on: ``grpo`` for ``sat_grpo`` and ``sat_grpo_fresh``."""
    arm = ARMS[source]
    while arm.name.startswith("sat_") and arm.base is not None:
        arm = ARMS[arm.base]
    return arm


def mean_radii(radii: Sequence[Radii]) -> Radii:
    """Means over runs, to four digits: a key should not depend on the last bit."""

    def mean(values: Sequence[float]) -> float:
        return float(f"{fmean(values):.4g}")

    caps = [one.cap for one in radii if one.cap is not None]
    return Radii(mean([one.low for one in radii]), mean([one.high for one in radii]), mean(caps) if caps else None)


def arm_of(name: str, radii: Radii | None) -> Arm:
    """The arm of this name; ``radii`` are those of a matched one."""
    source = matched_to(name)
    if source is None:
        return ARMS[name]
    assert radii is not None
    return matched(base_of(source), *radii)
