"""Times for the simulator from a finished run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.simulate.measured import MeasuredRun, generation_seconds, summary
from benchmarks.simulate.measures import steady, warm_windows, windows
from benchmarks.simulate.scenario import Engine, Lengths, Scenario, Training
from benchmarks.simulate.trainer import SimulatedRun

UNLIMITED = 10**9
"""Slots of a replica whose batch no run has shown the limit of."""
_HALVINGS = 10
_ROUNDS = 2


@dataclass(frozen=True)
class Fit:
    """Fitted times.

    Attributes:
        scenario: for the sizes of the run that it was fitted to.
        identified: whether the trainer ever waited for the rollout; if not, ``request_s`` is but an upper bound.
        target_s, reached_s: seconds per optimizer step that the trainer waited for samples and in drains, as measured
            and as simulated.
    """

    scenario: Scenario
    identified: bool
    target_s: float
    reached_s: float


def _spread(values: Sequence[float]) -> float:
    """Standard deviation of the logarithms; 0 for fewer than three positive values."""
    logs = [math.log(value) for value in values if value > 0]
    return statistics.stdev(logs) if len(logs) > 2 else 0.0


def fit(run: MeasuredRun, chosen: slice, seeds: Sequence[int]) -> Fit:
    """Fit to the windows of ``chosen``.

    Taken from the records: time of an optimizer step, of a weight sync and between global steps (means, and the spread
    of the first); tokens per response (mean); the time from request to response (mean), which becomes the decoder's.
    Found by simulation: the host's time per request, so that the simulated trainer waits as long as the real one did
    (bisection), and the time to store a response, so that responses spend as long in the queue.
    """
    parts = run.windows[chosen]
    every = run.schedule.sync_every
    steps = [part.train / every for part in parts]
    length = max(1, round(sum(part.tokens for part in parts) / sum(part.responses for part in parts)))
    latency = sum(part.in_flight * part.responses for part in parts) / sum(part.responses for part in parts)
    noise = _spread(steps) * math.sqrt(every)  # the spread of a mean of that many
    taken = [found for part in parts if run.schedule.exact and (found := generation_seconds(run, part)) is not None]
    base = Scenario(
        replicas=run.replicas,
        engine=Engine(
            slots=UNLIMITED, iteration_s=latency / length, noise=_spread([value - latency for value in taken])
        ),
        # exp(noise * normal) has the mean exp(noise**2 / 2).
        training=Training(statistics.fmean(steps) * math.exp(-(noise**2) / 2), noise=noise),
        lengths=Lengths("fixed", length, 0.0, max(run.response_limit, length)),
        prompts=run.prompts,
        responses=run.responses,
        prompt_tokens=run.prompt_tokens,
        steps=(warm_windows(run.schedule) + len(parts)) * every,
        sync_s=statistics.fmean(part.sync for part in parts),
        other_s=max(0.0, statistics.fmean(part.other for part in parts)),
        poll_s=run.poll_s,
    )
    target = sum(part.wait + part.drain for part in parts) / len(parts) / every
    wall = sum(part.wall for part in parts) / len(parts) / every
    queued = summary(run, chosen)["in_queue_s"]
    store_s = 0.0
    for _ in range(_ROUNDS):
        scenario, reached, in_queue = _bisect(_with(base, 0.0, store_s), target, wall, run, seeds)
        if queued is not None:
            store_s = max(0.0, store_s + queued - in_queue)
    scenario, reached, _ = _bisect(_with(base, 0.0, store_s), target, wall, run, seeds)
    return Fit(scenario, target > 0.02 * wall, target, reached)


def _with(scenario: Scenario, request_s: float, store_s: float) -> Scenario:
    return replace(scenario, engine=replace(scenario.engine, request_s=request_s, store_s=store_s))


def _bisect(
    base: Scenario, target: float, wall: float, run: MeasuredRun, seeds: Sequence[int]
) -> tuple[Scenario, float, float]:
    """Find the time per request; returns the scenario with it, and its :func:`waiting`."""
    low, high = 0.0, 2 * run.replicas * wall / (run.prompts * run.responses)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if waiting(_with(base, middle, base.engine.store_s), run, seeds)[0] < target:
            low = middle
        else:
            high = middle
    scenario = _with(base, high, base.engine.store_s)
    return scenario, *waiting(scenario, run, seeds)


def waiting(scenario: Scenario, run: MeasuredRun, seeds: Sequence[int]) -> tuple[float, float]:
    """Simulated seconds per optimizer step that the trainer waits for samples and in drains; those in the queue."""
    found = [simulated(scenario, run, seed) for seed in seeds]
    waits = statistics.fmean((one["wait"] + one["drain"]) * one["step_s"] for one in found)
    return waits, statistics.fmean(one["in_queue_s"] for one in found)


def simulated(scenario: Scenario, run: MeasuredRun, seed: int) -> dict[str, Any]:
    """The steady part of a simulated run with the schedule of a real one."""
    rows = SimulatedRun(scenario, run.schedule, run.strategy, seed).run()
    return steady(windows(rows)[warm_windows(run.schedule) - 1 :], scenario.replicas, scenario.engine.slots)


def transferred(found: Fit, run: MeasuredRun, count: int) -> Scenario:
    """Fitted times with the sizes and the schedule of ``run``, for ``count`` windows after the start."""
    return replace(
        found.scenario,
        replicas=run.replicas,
        prompts=run.prompts,
        responses=run.responses,
        poll_s=run.poll_s,
        steps=(warm_windows(run.schedule) + count) * run.schedule.sync_every,
    )


def halves(run: MeasuredRun) -> tuple[slice, slice]:
    middle = len(run.windows) // 2
    return slice(0, middle), slice(middle, len(run.windows))
