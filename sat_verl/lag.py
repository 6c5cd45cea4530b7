"""Policy lag as a schedule that is set and a record that proves it; plain Python, no clock, no Ray.

Policy version v is the weights after v optimizer steps; batch t (t = 1, 2, ...) is what optimizer step t trains on, so
the weights that it meets are version t - 1. The *age* of a token is t - 1 minus the version that generated it: 0 is
on-policy. (The paper's "lag n" is the ``broadcast`` schedule: weights every n steps, arXiv 2607.18722.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

LAG_SUMS = "actor/lag_sums/"
"""Prefix of the workers' sums over the tokens of one age, as verl names their metrics (:mod:`sat_verl.drift`)."""

SCHEDULES = ("broadcast", "constant", "bounded")


class LagViolationError(RuntimeError):
    """A batch was trained whose age is not what the schedule promises."""


@dataclass(frozen=True)
class LagSchedule:
    """When the rollout gets new weights, and how far it generates ahead.

    Args:
        kind: ``broadcast``: the rollout gets the weights every ``steps`` optimizer steps and generates one batch ahead;
            ages run 1, 2, ..., ``steps``, again and again. ``constant``: every batch is exactly ``steps`` optimizer
            steps old. ``bounded``: verl's own asynchrony, at most ``steps`` old. ``steps=0`` is synchronous in all.
        steps: the lag in optimizer steps, 0 or more.

    Raises:
        ValueError: an unknown kind, or a number of steps that is not a whole number of at least 0.
    """

    kind: str
    steps: int

    def __post_init__(self) -> None:
        if self.kind not in SCHEDULES:
            raise ValueError(f"lag.schedule={self.kind}: there is no such schedule; use {', '.join(SCHEDULES)}")
        if not isinstance(self.steps, int) or isinstance(self.steps, bool) or self.steps < 0:
            raise ValueError(f"lag.steps={self.steps}: use a whole number of at least 0")

    @property
    def exact(self) -> bool:
        """Whether the age of every batch is fixed, rather than bounded."""
        return self.kind != "bounded" or self.steps == 0

    @property
    def sync_every(self) -> int:
        """Optimizer steps between two weight syncs (verl's ``parameter_sync_step``)."""
        return self.steps if self.kind == "broadcast" and self.steps else 1

    @property
    def batches_ahead(self) -> int:
        """Batches that are submitted before the first step, beyond those of the first window."""
        return min(self.steps, 1) if self.kind == "broadcast" else self.steps

    def age(self, step: int) -> int:
        """Age of every token of the batch of optimizer step ``step`` (from 1); the bound, where only that is promised.

        The first batches are younger: no version before 0 could have generated them.
        """
        if self.kind != "broadcast" or self.steps == 0:
            return min(step - 1, self.steps)
        return 0 if step == 1 else (step - 2) % self.steps + 1

    def keeps(self, step: int, ages: Iterable[int]) -> bool:
        """Whether a batch with tokens of these ages is what the schedule promises for this optimizer step."""
        promised = self.age(step)
        return all(age == promised if self.exact else 0 <= age <= promised for age in ages)

    def describe(self) -> str:
        if self.steps == 0:
            return "synchronous"
        if self.kind == "broadcast":
            return f"weights every {self.steps} steps: ages 1 to {self.steps}" if self.steps > 1 else "age 1"
        return f"age {self.steps}" if self.kind == "constant" else f"age at most {self.steps}"


def token_ages(step: int, sync_every: int, segments: Iterable[tuple[int, int]]) -> Counter[int]:
    """Tokens by age in optimizer steps.

    Args:
        step: the optimizer step that trains on them, from 1.
        sync_every: optimizer steps per weight sync.
        segments: ``(weight sync that generated them, number of tokens)``; verl counts syncs, 0 for the initial weights.
    """
    ages: Counter[int] = Counter()
    for sync, tokens in segments:
        ages[step - 1 - sync * sync_every] += tokens
    return ages


def shares(tokens: Mapping[int, int]) -> dict[str, float]:
    """A histogram as ``{age: share of tokens}``, with the ages as JSON keys in ascending order."""
    total = sum(tokens.values())
    return {str(age): count / total for age, count in sorted(tokens.items()) if count} if total else {}


def verdict(schedule: LagSchedule, rows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What was promised and what happened, over all optimizer steps of a run (the content of ``lag.json``).

    Args:
        schedule: the promise.
        rows: one per optimizer step, with ``step``, ``tokens_by_age`` (JSON keys), and the counts of
            :class:`sat_verl.trainer.SATAsyncTrainer`.

    Returns:
        ``promised`` and ``realised`` as {age: share of tokens}. What an exact schedule promises is one age per step;
        its share is that of the step's tokens. A bounded schedule promises ``{"at_most": steps}``. ``ok``: every step
        from 1 on is there, once, and kept it.
    """
    realised: Counter[int] = Counter()
    promised: Counter[int] = Counter()
    broken: list[int] = []
    steps: list[int] = []
    totals: Counter[str] = Counter()
    for row in rows:
        ages = {int(age): count for age, count in row["tokens_by_age"].items()}
        realised.update(ages)
        promised[schedule.age(row["step"])] += sum(ages.values())
        if not schedule.keeps(row["step"], ages):
            broken.append(row["step"])
        totals.update({name: row[name] for name in COUNTS})
        totals.update({name: row[name] * row["responses"] for name in TIMES})
        steps.append(row["step"])
    tokens = sum(realised.values())
    return {
        "schedule": schedule.kind,
        "steps": schedule.steps,
        "unit": "optimizer steps",
        "promised": shares(promised) if schedule.exact else {"at_most": schedule.steps},
        "realised": shares(realised),
        "mean_age": sum(age * count for age, count in realised.items()) / tokens if tokens else 0.0,
        "ok": not broken and tokens > 0 and steps == list(range(1, len(steps) + 1)),
        "broken_steps": broken,
        "tokens": tokens,
        "optimizer_steps": len(steps),
        **{name: round(totals[name], 3) for name in COUNTS},
        **{name: round(totals[name] / max(totals["responses"], 1), 3) for name in TIMES},
    }


TIMES = ("in_flight_s", "in_queue_s")
"""Means over the responses of a step, and in ``lag.json`` over all: seconds from request to response, and from there to
the trainer."""

COUNTS = ("responses", "mixed_responses", "dropped_groups", "refilled_groups", "retried_groups", "drain_seconds")
"""Counted per optimizer step and summed in ``lag.json``: responses trained on; those generated by more than one policy
version; prompt groups thrown away as too old, replaced by new prompts, and generated again after a failure; seconds
that the trainer waited for the rollout before a weight sync, the price of an exact schedule."""
