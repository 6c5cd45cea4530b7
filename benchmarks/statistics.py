"""Summaries of runs, and differences between runs that share their seeds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, NamedTuple

from scipy.stats import t as student_t

if TYPE_CHECKING:  # the laboratory takes seconds to import
    from benchmarks.lab import Result

FINAL_EVALUATIONS = 3
"""The final success is the mean of this many last evaluations."""


class Interval(NamedTuple):
    """A mean and the half width of its 95 % interval."""

    mean: float
    half_width: float

    def __str__(self) -> str:
        return f"{self.mean:+.3f} ± {self.half_width:.3f}"


def paired(first: Sequence[float], second: Sequence[float]) -> Interval:
    """Mean of ``first - second`` over common seeds with Student's 95 % interval; infinitely wide for one seed."""
    differences = [a - b for a, b in zip(first, second, strict=True)]
    n = len(differences)
    if n < 2:
        return Interval(fmean(differences), math.inf)
    t = float(student_t.ppf(0.975, n - 1))
    return Interval(fmean(differences), t * stdev(differences) / math.sqrt(n))


def summary(result: Result) -> dict[str, float]:
    """Numbers of one run.

    ``final``: mean success of the last evaluations; ``auc``: of all, the one before the first step included;
    ``peak_drop``: best evaluation minus ``final``. The rest are means over the steps of the metrics of the same names,
    0 where the loss has none, and ``max_grad_norm``.
    """
    success = [row["success"] for row in result.evaluations]
    final = fmean(success[-FINAL_EVALUATIONS:])
    means = {
        "gate_rate": "actor/sat/gate_rate",
        "intercepted": "actor/sat/intercepted",
        "q": "actor/sat/q",
        "eps_eff_high": "actor/sat/eps_eff_high",
        "q_spread": "q_spread",
        "empty_gates": "empty_gates",
        "clip_fraction": "actor/pg_clipfrac",
        "abs_log_ratio": "abs_log_ratio",
    }
    return {
        "final": final,
        "auc": fmean(success),
        "peak_drop": max(success) - final,
        **{name: fmean(row.get(key, 0.0) for row in result.rows) for name, key in means.items()},
        "max_grad_norm": max(row["grad_norm"] for row in result.rows),
    }
