"""Statistics over seeds: intervals, paired tests, Holm's correction, interquartile mean, probability of improvement."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from scipy import stats

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Estimate:
    """A mean over ``n`` seeds; the interval is Student's of 95 %, None for one seed. ``iqm``: interquartile mean."""

    n: int
    mean: float
    iqm: float
    low: float | None = None
    high: float | None = None

    @property
    def half_width(self) -> float | None:
        return None if self.high is None else self.high - self.mean


def estimate(values: Sequence[float]) -> Estimate | None:
    """Mean, interval and interquartile mean of one number a seed; None without any.

    The interquartile mean is the mean without the lowest and the highest quarter (Agarwal et al. 2021,
    arXiv:2108.13264): of n values, floor(n/4) are left out on each side, as ``scipy.stats.trim_mean`` does.
    """
    n = len(values)
    if not n:
        return None
    mean, iqm = float(np.mean(values)), float(np.sort(values)[n // 4 : n - n // 4].mean())
    if n < 2:
        return Estimate(1, mean, iqm)
    half = float(np.std(values, ddof=1)) / n**0.5 * _student(n - 1)
    return Estimate(n, mean, iqm, mean - half, mean + half)


@cache
def _student(degrees: int) -> float:
    """Quantile of Student's distribution, in units of the standard error."""
    return float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees))


@dataclass(frozen=True)
class Difference:
    """``first - second`` over the seeds that both have.

    Attributes:
        n: common seeds.
        mean: of the differences.
        low, high: Student's 95 % interval; None for one seed.
        p: two-sided paired t test; None for one seed, and where all differences are one number other than 0, which
            leaves the test without a variance.
        wilcoxon: two-sided signed rank test.
        improvement: probability of improvement, P(first > second) + P(equal)/2 over all pairs of runs.
        wins, losses: seeds at which the first is above, and below.
    """

    n: int
    mean: float
    low: float | None
    high: float | None
    p: float | None
    wilcoxon: float | None
    improvement: float
    wins: int
    losses: int


def difference(first: Mapping[int, float], second: Mapping[int, float]) -> Difference | None:
    """Compare two arms, given as number by seed; None without a common seed.

    The probability of improvement is that of Agarwal et al. (2021), the Mann-Whitney statistic over the number of
    pairs; it does not use the pairing, the wins and losses do.
    """
    seeds = sorted(first.keys() & second.keys())
    if not seeds:
        return None
    a, b = (np.array([side[seed] for seed in seeds], dtype=float) for side in (first, second))
    gap = a - b
    improvement = float((np.greater.outer(a, b) + 0.5 * np.equal.outer(a, b)).mean())
    low = high = p = ranks = None
    if len(seeds) > 1:
        spread = estimate(gap)
        assert spread is not None
        low, high = spread.low, spread.high
        p, ranks = _paired_p(gap)
    return Difference(
        len(seeds), float(gap.mean()), low, high, p, ranks, improvement, int((gap > 0).sum()), int((gap < 0).sum())
    )


def _paired_p(gap: np.ndarray) -> tuple[float | None, float]:
    if not gap.any():
        return 1.0, 1.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # equal differences: scipy warns, and None says it
        p = None if math.isclose(np.ptp(gap), 0, abs_tol=1e-12) else float(stats.ttest_1samp(gap, 0).pvalue)
        return p, float(stats.wilcoxon(gap).pvalue)


@dataclass(frozen=True)
class Unpaired:
    """``first - second`` of two groups of runs that share no seeds.

    Attributes:
        n: runs of the first and of the second.
        mean: difference of the means.
        low, high: Welch's 95 % interval; None where a side has one run, or neither has any spread.
        p: of Welch's two-sided t test; None likewise.
    """

    n: tuple[int, int]
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None


def welch(first: Sequence[float], second: Sequence[float]) -> Unpaired | None:
    """Compare two groups whose variances may differ (Welch 1947); None if one is empty."""
    if not first or not second:
        return None
    n, mean = (len(first), len(second)), float(np.mean(first) - np.mean(second))
    if min(n) < 2 or (not np.ptp(first) and not np.ptp(second)):
        return Unpaired(n, mean)
    found = stats.ttest_ind(first, second, equal_var=False)
    interval = found.confidence_interval(CONFIDENCE)
    return Unpaired(n, mean, float(interval.low), float(interval.high), float(found.pvalue))


def holm(values: Sequence[float | None]) -> list[float | None]:
    """Holm's (1979) adjusted p, in the given order; it controls the chance of any false rejection in the family.

    A test without a p (not answered yet) counts as one with p = 1: it makes the others' no smaller than they will be.
    """
    order = sorted((value, index) for index, value in enumerate(values) if value is not None)
    adjusted: list[float | None] = [None] * len(values)
    worst = 0.0
    for rank, (value, index) in enumerate(order):
        worst = max(worst, min(1.0, (len(values) - rank) * value))
        adjusted[index] = worst
    return adjusted
