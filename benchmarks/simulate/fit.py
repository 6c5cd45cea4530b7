"""Times for the simulator from a finished run."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from scipy.optimize import least_squares

from benchmarks.simulate.measured import MeasuredRun, generation_seconds, summary
from benchmarks.simulate.measures import steady, warm_windows, windows
from benchmarks.simulate.scenario import Engine, Lengths, Scenario, Training
from benchmarks.simulate.trainer import SimulatedRun

STORE_ROUNDS = 3
"""Times that an agent loop worker comes back to a response until it is stored: when the engine has ended it, when it is
graded, and when its group is put (sat_verl/agent_loops.py; verl alone makes four round trips for each response)."""
MATCHED = ("wait", "drain", "submit", "in_queue_s", "in_flight_s")
"""What is fitted, of :func:`~benchmarks.simulate.measures.steady`."""
_HALVINGS = 9
_EVALUATIONS = 12
_ROUNDS = 2
_SLOWEST = 4.0


@dataclass(frozen=True)
class Fit:
    """Fitted times.

    Attributes:
        scenario: for the sizes of the run that it was fitted to.
        identified: whether the trainer ever waited for the rollout; if not, the host's work is but an upper bound.
        target_s, reached_s: seconds per optimizer step that the trainer waited for the rollout, as measured and as
            simulated.
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
    of the first), and tokens per response (mean). Found by simulation (least squares): the host's work per response,
    the part of it that comes after the response, and the decoder's time per token, so that the simulated trainer waits
    as long as the real one did, and responses are as long in flight and then between their end and the trainer.
    """
    base, seen = _recorded(run, chosen), summary(run, chosen)
    wall, target = seen["step_s"], waits(seen, run)
    per_response = wall * run.replicas / (run.prompts * run.responses)
    per_token = seen["in_flight_s"] / base.lengths.typical

    def with_times(relative: Sequence[float]) -> Scenario:
        host, share, token = map(float, relative)
        times = {"request_s": host * (1 - share) * per_response, "store_s": host * share * per_response}
        return replace(base, engine=replace(base.engine, iteration_s=token * per_token, **times))

    def said(relative: Sequence[float]) -> dict[str, float]:
        found = [simulated(with_times(relative), run, seed) for seed in seeds]
        return {name: statistics.fmean(one[name] for one in found) for name in (*MATCHED, "step_s")}

    def errors(relative: Sequence[float]) -> list[float]:
        found = said(relative)
        timed = [name for name in ("in_queue_s", "in_flight_s") if seen[name]]
        return [(waits(found, run) - target) / wall, *(found[name] / seen[name] - 1 for name in timed)]

    # Relative to the time that there is. Steps of 5 %, since the sampler looks only now and then.
    result = least_squares(
        errors, (0.7, 0.5, 0.5), bounds=((0, 0, 1e-3), (2, 1, 1)), diff_step=0.05, max_nfev=_EVALUATIONS
    )
    reached = waits(said(result.x), run)
    return Fit(with_times(result.x), target > 0.02 * wall, target, reached)


def _recorded(run: MeasuredRun, chosen: slice) -> Scenario:
    """What the records say of the times; those of the rollout are still to be found."""
    parts = run.windows[chosen]
    every = run.schedule.sync_every
    steps = [part.train / every for part in parts]
    length = max(1, round(sum(part.tokens for part in parts) / sum(part.responses for part in parts)))
    noise = _spread(steps) * math.sqrt(every)  # the spread of a mean of that many
    taken = [found for part in parts if run.schedule.exact and (found := generation_seconds(run, part)) is not None]
    return Scenario(
        replicas=run.replicas,
        engine=Engine(slots=run.slots, iteration_s=0.0, store_rounds=STORE_ROUNDS, noise=_spread(taken)),
        # exp(noise * normal) has the mean exp(noise**2 / 2).
        training=Training(statistics.fmean(steps) * math.exp(-(noise**2) / 2), noise=noise),
        lengths=Lengths("fixed", length, 0.0, max(run.response_limit, length)),
        prompts=run.prompts,
        responses=run.responses,
        prompt_tokens=run.prompt_tokens,
        steps=(warm_windows(run.schedule) + len(parts)) * every,
        sync_s=statistics.fmean(part.sync for part in parts),
        # A submission waits for nobody in an exact schedule: what it takes is the trainer's own work.
        other_s=max(0.0, statistics.fmean(part.other + part.submit * run.schedule.exact for part in parts)),
        poll_s=run.poll_s,
    )


def _bisect(enough: Callable[[float], bool], low: float, high: float) -> float:
    """Where ``enough`` turns true; the ends where it does not."""
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def with_contention(found: Fit, run: MeasuredRun, seeds: Sequence[int]) -> Fit:
    """Times of a synchronous run, and by how much each side slows the other down, from a run in which they overlap.

    Two factors (:class:`~benchmarks.simulate.scenario.Scenario`), so that training and a whole step take as long as
    they did.
    """
    seen, base = summary(run, slice(None)), transferred(found, run, len(run.windows))
    trained = seen["step_s"] * (1 - seen["trainer_idle"])
    trainer = rollout = 1.0

    def steps(trainer: float, rollout: float) -> list[dict[str, Any]]:
        scenario = replace(base, trainer_slowed=trainer, rollout_slowed=rollout)
        return [simulated(scenario, run, seed) for seed in seeds]

    def trains_longer(factor: float) -> bool:
        said = steps(factor, rollout)
        return statistics.fmean(one["step_s"] * (1 - one["trainer_idle"]) for one in said) >= trained

    def takes_longer(factor: float) -> bool:
        return statistics.fmean(one["step_s"] for one in steps(trainer, factor)) >= seen["step_s"]

    for _ in range(_ROUNDS):
        trainer = _bisect(trains_longer, 1.0, _SLOWEST)
        rollout = _bisect(takes_longer, 1.0, _SLOWEST)
    return replace(found, scenario=replace(found.scenario, trainer_slowed=trainer, rollout_slowed=rollout))


def waits(said: dict[str, Any], run: MeasuredRun) -> float:
    """Seconds per optimizer step that the trainer waits for the rollout: for samples, in drains and in submissions."""
    return (said["wait"] + said["drain"] + (0.0 if run.schedule.exact else said["submit"])) * said["step_s"]


def simulated(scenario: Scenario, run: MeasuredRun, seed: int) -> dict[str, Any]:
    """The steady part of a simulated run with the schedule of a real one."""
    rows = SimulatedRun(scenario, run.schedule, run.strategy, seed).run()
    return steady(windows(rows)[warm_windows(run.schedule) - 1 :], scenario.replicas, scenario.engine.slots)


def transferred(found: Fit, run: MeasuredRun, count: int) -> Scenario:
    """Fitted times with the sizes and the schedule of ``run``, for ``count`` windows after the start."""
    return replace(
        found.scenario,
        engine=replace(found.scenario.engine, slots=run.slots),
        replicas=run.replicas,
        prompts=run.prompts,
        responses=run.responses,
        poll_s=run.poll_s,
        steps=(warm_windows(run.schedule) + count) * run.schedule.sync_every,
    )


def halves(run: MeasuredRun) -> tuple[slice, slice]:
    middle = len(run.windows) // 2
    return slice(0, middle), slice(middle, len(run.windows))
