"""Numbers of a simulated run: throughput, idle shares, ages, memory; over its steady part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from benchmarks.simulate.scenario import Scenario
from sat_verl.lag import LagSchedule, shares, verdict

GB = 1e9


def warm_windows(schedule: LagSchedule) -> int:
    """Global steps at the start that are not typical: ages are younger, and the queue fills."""
    return 1 + (schedule.steps if schedule.sync_every == 1 else 0)


def windows(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows of optimizer steps by global step, in order."""
    found: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["global_step"], []).append(row)
    return [found[key] for key in sorted(found)]


def steady(parts: Sequence[list[dict[str, Any]]], replicas: int, slots: int) -> dict[str, Any]:
    """Numbers of consecutive global steps, the first of which only says where the clock and the sums begin.

    Args:
        parts: rows of :meth:`benchmarks.simulate.trainer.SimulatedRun.run` by global step, at least two.
        replicas, slots: of the rollout.

    Returns:
        ``samples_per_s``; ``step_s``, seconds per optimizer step; ``trainer_idle``, the share of time in which the
        trainer does not train, and its parts ``wait`` (for samples), ``drain``, ``sync``, ``submit`` (until prompts are
        submitted) and ``other``;
        ``rollout_idle``, the share of time in which a replica has no sequence, mean over the replicas, and
        ``slots_used``, the mean share of slots with one; ``rollout_quiet``, the share of time without any request in
        flight; ``mean_length`` of what is trained on, in tokens; ``tokens_per_s`` generated; ``wasted``, the share of
        those that was dropped; ``ages``, ``mean_age``, ``mixed``; means over responses ``in_flight_s`` and
        ``in_queue_s``; ``queued``, the mean number of responses in the queue that wait to be trained on (Little's law:
        their rate times ``in_queue_s``); ``queue_peak_gb`` and ``queue_mean_gb``; ``outstanding_prompts``
        after a weight sync.
    """
    before, rows = parts[0][-1], [row for part in parts[1:] for row in part]
    ends = [part[-1] for part in parts[1:]]
    last = ends[-1]
    span = last["end"] - before["end"]
    responses = sum(row["responses"] for row in rows)
    ages: Counter[int] = Counter()
    for row in rows:
        ages.update({int(age): count for age, count in row["tokens_by_age"].items()})
    idle = {
        "wait": sum(row["wait_s"] for row in rows) / span,
        "drain": sum(row["drain_seconds"] for row in rows) / span,
        "sync": sum(row["sync_s"] for row in ends) / span,
        "submit": sum(row["submit_s"] for row in ends) / span,
        "other": sum(row["other_s"] for row in ends) / span,
    }

    def grown(name: str) -> float:
        return last[name] - before[name]

    return {
        "samples_per_s": responses / span,
        "step_s": span / len(rows),
        "trainer_idle": sum(idle.values()),
        **idle,
        "rollout_idle": grown("pool_idle_s") / span / replicas,
        "rollout_quiet": 1 - grown("pool_busy_s") / span,
        "slots_used": grown("pool_slot_s") / span / replicas / slots,
        "mean_length": sum(row["tokens"] for row in rows) / responses,
        "tokens_per_s": grown("pool_tokens") / span,
        "wasted": grown("dropped_tokens") / max(grown("pool_tokens"), 1),
        "ages": shares(ages),
        "mean_age": sum(age * count for age, count in ages.items()) / ages.total(),
        "mixed": sum(row["mixed_responses"] for row in rows) / responses,
        "in_flight_s": sum(row["in_flight_s"] * row["responses"] for row in rows) / responses,
        "in_queue_s": sum(row["in_queue_s"] * row["responses"] for row in rows) / responses,
        "queued": sum(row["in_queue_s"] * row["responses"] for row in rows) / span,
        "queue_peak_gb": max(row["queue_peak_bytes"] for row in ends) / GB,
        "queue_mean_gb": sum(row["queue_byte_s"] for row in ends) / span / GB,
        "outstanding_prompts": sum(row["outstanding_prompts"] for row in ends) / len(ends),
    }


def measure(rows: Sequence[dict[str, Any]], scenario: Scenario, schedule: LagSchedule) -> dict[str, Any]:
    """:func:`steady` of a whole run, with the verdict of ``lag.json`` over all of it."""
    found = steady(windows(rows)[warm_windows(schedule) - 1 :], scenario.replicas, scenario.engine.slots)
    return found | {"lag": verdict(schedule, rows)}
