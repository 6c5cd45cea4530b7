"""Is one run better than another? Statistics on the differences of two runs, problem by problem.

The problem is the unit: both runs answered the same problems, so that easy and hard ones cancel out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from scipy import stats

from eval.schema import Interval
from eval.statistics import CONFIDENCE, RESAMPLES, never_seen, sampling_interval

POWER = 0.80
EXACT_UP_TO = 16
"""With at most this many problems that differ, all their 2^m signs are tried."""
RANDOM_SIGNS = 2**EXACT_UP_TO - 1
"""Otherwise as many are drawn; below 2^17, so that scipy cannot mistake them for all."""
Resample = Literal["problems", "samples"]

_TAIL = (1 - CONFIDENCE) / 2
_CELLS = 2_000_000
_Floats = NDArray[np.float64]


class Tally(NamedTuple):
    """Correct samples, and samples that count, by problem."""

    correct: _Floats
    counting: _Floats

    @property
    def means(self) -> _Floats:
        """Share of correct samples by problem."""
        return self.correct / self.counting


class Difference(BaseModel):
    """The second run's average minus the first's, over the problems for which both have samples that count."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    mean: float
    problems: int
    better: int
    """Problems on which the second run has the higher average."""
    worse: int
    sampling: Interval | None
    """Noise of drawing the samples, with these very problems."""
    population: Interval | None
    """These problems taken as a draw from a population of such problems: t on the differences."""
    bootstrap: Interval | None
    """The same by resampling problems; None where all differences are equal."""
    p: float
    """Two-sided sign-flip test: how often chance alone gives a mean difference at least this far from 0."""
    p_method: Literal["exact", "Monte Carlo"]
    detectable: float | None
    """The smallest true difference that a two-sided test at 5 % would have found with 80 % power."""


def difference(first: Tally, second: Tally, *, resample: Resample = "problems", seed: int = 0) -> Difference:
    """Compare two runs.

    Args:
        first: the run to compare with.
        second: the run that may be better.
        resample: what the bootstrap draws anew; see :func:`bootstrap_interval`.
        seed: of the bootstrap and of the random signs.

    Raises:
        ValueError: no problems, not the same number of them, or one without samples that count.
    """
    if len(first.counting) != len(second.counting) or not len(first.counting):
        raise ValueError(f"{len(first.counting)} and {len(second.counting)} problems: they must be the same, and some")
    if min(first.counting.min(), second.counting.min()) < 1:
        raise ValueError("a problem has no sample that counts")
    differences = second.means - first.means
    p, exact = sign_flip(differences, seed=seed)
    return Difference(
        mean=float(differences.mean()),
        problems=len(differences),
        better=int((differences > 0).sum()),
        worse=int((differences < 0).sum()),
        sampling=newcombe_interval(first, second),
        population=student_interval(differences),
        bootstrap=bootstrap_interval(first, second, resample=resample, seed=seed),
        p=p,
        p_method="exact" if exact else "Monte Carlo",
        detectable=detectable(differences),
    )


def newcombe_interval(first: Tally, second: Tally) -> Interval | None:
    """Noise of drawing the samples of both runs, with these very problems.

    Squares and adds the distances of the two runs' own intervals (Newcombe 1998, Statistics in Medicine 17, method 10).

    Returns:
        None where a run has no problem with two samples that count.
    """
    one, two = sampling_interval(*first), sampling_interval(*second)
    if one is None or two is None:
        return None
    a, b = float(first.means.mean()), float(second.means.mean())
    return Interval(
        low=max(-1.0, b - a - float(np.hypot(b - two.low, one.high - a))),
        high=min(1.0, b - a + float(np.hypot(two.high - b, a - one.low))),
        method="within-problem variance",
    )


def student_interval(differences: _Floats) -> Interval | None:
    """Mean +- t(P - 1) sd / sqrt(P), clipped to -1 .. 1 (Miller 2024, arXiv:2411.00640, section 4).

    If all differences are equal, an unlike problem has at most the chance of :func:`eval.statistics.never_seen`, and
    the interval says how far it could move the mean.

    Returns:
        None for fewer than two problems.
    """
    problems = len(differences)
    if problems < 2:
        return None
    mean = float(differences.mean())
    if np.ptp(differences) == 0:
        unlike = never_seen(problems)
        return Interval(low=mean - (1 + mean) * unlike, high=mean + (1 - mean) * unlike, method="Clopper-Pearson")
    error = _error(differences)
    half = float(stats.t.ppf(1 - _TAIL, problems - 1)) * error
    return Interval(
        low=max(-1.0, mean - half),
        high=min(1.0, mean + half),
        method="t on paired differences",
        standard_error=error,
        degrees_of_freedom=float(problems - 1),
    )


def _error(differences: _Floats) -> float:
    return float(differences.std(ddof=1)) / len(differences) ** 0.5


def detectable(differences: _Floats) -> float | None:
    """(t(0.975, P - 1) + t(0.80, P - 1)) sd / sqrt(P), about 2.9 sd / sqrt(P) for 30 problems.

    The usual formula for the size of a paired study (for example Chow, Shao and Wang, Sample Size Calculations in
    Clinical Research, chapter 3), with t for normal quantiles. It is for one
    comparison: an adjustment for several makes it larger.

    Returns:
        None where the differences do not vary or there are fewer than two: their spread is then unknown.
    """
    if len(differences) < 2 or np.ptp(differences) == 0:
        return None
    reach = stats.t.ppf([1 - _TAIL, POWER], len(differences) - 1).sum()
    return float(reach) * _error(differences)


def bootstrap_interval(
    first: Tally, second: Tally, *, resample: Resample = "problems", seed: int = 0, resamples: int = RESAMPLES
) -> Interval | None:
    """Percentiles of the mean difference over problems drawn anew, the same for both runs.

    Args:
        first: the run to compare with.
        second: the other.
        resample: "problems" keeps the samples of a drawn problem, whose noise is in the differences already. "samples"
            also draws each run's samples anew, which counts that noise twice: wider, and meant as a cautious check.
        seed: of the draws.
        resamples: how many.

    Returns:
        None where all differences are equal and problems are resampled. The order of the problems has no influence.
    """
    order = np.lexsort((*first, *second))
    first, second = (Tally(run.correct[order], run.counting[order]) for run in (first, second))
    problems, random = len(order), np.random.default_rng(seed)
    if resample == "problems" and np.ptp(second.means - first.means) == 0:
        return None
    means: list[_Floats] = []
    batch = max(1, _CELLS // problems)
    for start in range(0, resamples, batch):
        drawn = random.integers(problems, size=(min(batch, resamples - start), problems))
        one, two = (_redrawn(run, drawn, resample, random) for run in (first, second))
        means.append((two - one).mean(axis=1))
    low, high = np.percentile(np.concatenate(means), [100 * _TAIL, 100 * (1 - _TAIL)])
    what = "problems" if resample == "problems" else "problems and their samples"
    return Interval(low=float(low), high=float(high), method=f"paired bootstrap, {resamples} resamples of {what}")


def _redrawn(run: Tally, drawn: NDArray[np.int64], resample: Resample, random: np.random.Generator) -> _Floats:
    if resample == "problems":
        return run.means[drawn]
    counting = run.counting[drawn].astype(int)
    return random.binomial(counting, run.means[drawn]) / counting


def sign_flip(differences: _Floats, *, seed: int = 0) -> tuple[float, bool]:
    """Two-sided permutation test: if the runs are equally good, each difference is as likely with the other sign.

    Problems without a difference change nothing and are left out. Random signs get the correction of Phipson and Smyth
    (2010): p = (1 + extreme) / (1 + drawn), which is never 0.

    Returns:
        The p value, and whether all signs were tried.
    """
    nonzero = np.sort(differences[differences != 0])
    if len(nonzero) < 2:
        return 1.0, True
    exact = len(nonzero) <= EXACT_UP_TO
    # Rounded: sums that are equal but for their order must count as equal.
    found = stats.permutation_test(
        (nonzero,),
        lambda x, axis: np.round(x.sum(axis=axis), 9),
        permutation_type="samples",
        vectorized=True,
        n_resamples=2 ** len(nonzero) if exact else RANDOM_SIGNS,
        batch=max(1, _CELLS // len(nonzero)),
        rng=np.random.default_rng(seed),
    )
    return float(found.pvalue), exact


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p values for several comparisons (Holm 1979): the chance of one false finding among all stays 5 %."""
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = highest
    return adjusted
