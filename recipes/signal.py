"""Was there anything to learn, and could the method act? What a run that ends well may still not have had.

Two arms without a signal look alike; that is no finding about the methods. Each check reads the metrics rows of the
optimizer steps and returns the warnings it has; keys that a run does not have are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Rows = Sequence[Mapping[str, Any]]

DEAD_SHARE = 0.5
"""Share of steps that makes them the rule: a healthy run has some, early on or when all is solved."""

EQUAL_REWARDS_STD = 1e-9
"""The standard deviation of equal rewards is 0 up to rounding; one other reward among a million gives 1e-3."""

RATIO_ONE = 1e-9
"""Mean |log-ratio| below which the two log-probs are the same numbers: float32 has steps of 1e-7 near 1, and even the
same weights in two engines differ by about 1e-6."""

ALL_TRUNCATED = 0.99
"""Share of cut-off responses that counts as all of them: one short answer in a large batch makes no difference."""

EMPTY_LENGTH = 1.0
"""Average length in tokens of responses that hold the end-of-sequence token alone."""


def warnings(rows: Rows) -> list[str]:
    """One line, ``no signal: ...``, for each thing that was missing; empty for a healthy run."""
    found = [check(rows) for check in (equal_rewards, zero_gradient, ratio_of_one, empty_gate, truncated, empty)]
    return [f"no signal: {line}" for line in found if line]


def _numbers(rows: Rows, key: str) -> list[float]:
    """The values of a key where it is a number (non-finite ones are written as words)."""
    return [row[key] for row in rows if isinstance(row.get(key), int | float)]


def _dead(flags: Sequence[bool]) -> str | None:
    """``k of n`` where the share of true flags is :data:`DEAD_SHARE` or more."""
    if flags and sum(flags) >= DEAD_SHARE * len(flags):
        return f"{sum(flags)} of {len(flags)} optimizer steps"
    return None


def equal_rewards(rows: Rows) -> str | None:
    """Equal rewards within every prompt group; of runs that lack that metric, equal rewards in the whole step."""
    key, limit, what = "reward/groups_with_signal", 0.0, "within every prompt group"
    if not _numbers(rows, key):
        key, limit, what = "reward/std", EQUAL_REWARDS_STD, "of the whole batch"
    known = [row for row in rows if _numbers([row], key)]
    dead = _dead([row[key] <= limit for row in known])
    if dead is None:
        return None
    means = _numbers([row for row in known if row[key] <= limit], "reward/mean")
    mean = f" (mean reward {sum(means) / len(means):.3g})" if means else ""
    return f"all rewards {what} were equal in {dead}{mean}: the group-normalised advantages are 0"


def zero_gradient(rows: Rows) -> str | None:
    """The gradient that verl clips, before the clip."""
    dead = _dead([value == 0 for value in _numbers(rows, "actor/grad_norm")])
    return dead and f"the gradient was 0 in {dead}: the weights did not move"


def ratio_of_one(rows: Rows) -> str | None:
    """No drift on data that is some steps old; at age 0 a ratio of 1 is as it should be."""
    stale = [row for row in rows if _numbers([row], "lag/age") and row["lag/age"] > 0]
    drift = _numbers(stale, "actor/abs_log_ratio")
    if not drift or max(drift) >= RATIO_ONE:
        return None
    age = sum(_numbers(stale, "lag/age")) / len(stale)
    return (
        f"the policy ratio was 1 in all {len(drift)} optimizer steps on old data (mean age {age:.2g} steps): "
        "no clip could act; the weights did not move, or the denominator is not the rollout's"
    )


def empty_gate(rows: Rows) -> str | None:
    """SAT's quantile over too few values: of 8 equally long sequences none is beyond their 90 % quantile."""
    moving = [row for row in rows if _numbers([row], "actor/sat/q") and row["actor/sat/q"] > 0]
    dead = _dead([rate == 0 for rate in _numbers(moving, "actor/sat/gate_rate")])
    return dead and (
        f"SAT's gate was empty in {dead}: its loss was the base loss; take the quantile over more sequences "
        "(policy_loss.quantile_scope=batch)"
    )


def truncated(rows: Rows) -> str | None:
    dead = _dead([share >= ALL_TRUNCATED for share in _numbers(rows, "response_length/truncated")])
    return dead and f"all responses were cut off at the length limit in {dead}: raise data.max_response_length"


def empty(rows: Rows) -> str | None:
    dead = _dead([length <= EMPTY_LENGTH for length in _numbers(rows, "response_length/average")])
    return dead and f"all responses were empty in {dead}"
