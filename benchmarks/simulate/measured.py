"""What a finished run of ``recipes.train`` measured, by global step."""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from benchmarks.simulate.measures import warm_windows, windows
from recipes.errors import ConfigError
from sat_verl.lag import LagSchedule, shares
from sat_verl.records import LAG_FILE, METRICS_FILE, SAMPLES_FILE, read_rows


@dataclass(frozen=True)
class Window:
    """One global step; seconds, without the time of a validation.

    Attributes:
        end: Unix time at which it was recorded, ``testing`` seconds of validation before it.
        wall: since the end of the global step before.
        wait: for samples. ``drain``, ``sync``: as recorded. ``train``: of the optimizer steps, without ``wait``.
        submit: the rest of verl's time of the step, in which prompts are submitted; 0 where a checkpoint was written,
            whose time it cannot be told from (``saved``).
        other: the rest of ``wall``.
        mixed: responses whose tokens are of different ages. ``ages``: tokens by age.
        in_flight, in_queue: means over responses.
        generated: for each optimizer step the Unix times between which its responses were in flight; none in the
            records of older runs.
    """

    end: float
    testing: float
    wall: float
    wait: float
    train: float
    saved: bool
    drain: float
    sync: float
    submit: float
    other: float
    responses: int
    mixed: int
    tokens: float
    ages: Counter[int]
    in_flight: float
    in_queue: float
    generated: list[tuple[float, float]]


@dataclass(frozen=True)
class MeasuredRun:
    """A run folder.

    Attributes:
        name: of the folder.
        windows: the global steps after the start, all but the typical ones left out.
        after_validation: for each of them, whether a validation ran just before it.
    """

    name: str
    schedule: LagSchedule
    strategy: str | None
    prompts: int
    responses: int
    replicas: int
    slots: int
    poll_s: float
    prompt_tokens: int
    response_limit: int
    windows: list[Window]
    after_validation: list[bool]


def read(folder: Path, least: int, until: int | None = None) -> MeasuredRun:
    """Read the records of a run, which must have ``least`` global steps after its start.

    Args:
        folder: of the run.
        least: see above.
        until: the last optimizer step to be read; None for all of them.

    Raises:
        ConfigError: no run is there, it has not ended, or it is too short.
    """
    if not (folder / LAG_FILE).is_file():
        raise ConfigError(
            "run", folder.name, f"there is no {LAG_FILE} in it", "name the folder of a run of recipes.train that ended"
        )
    cfg = OmegaConf.load(folder / "config.yaml")
    schedule = LagSchedule(cfg.lag.schedule, cfg.lag.steps)
    strategy = None if schedule.exact else cfg.lag.get("strategy") or "wait"
    samples = {row["step"]: row for row in read_rows(folder / SAMPLES_FILE)}
    rows = [row | samples.get(row["step"], {}) for row in read_rows(folder / METRICS_FILE)]
    rows = [row for row in rows if until is None or row["step"] <= until]
    parts = windows(rows)
    every = schedule.sync_every
    found = [_window(before[-1]["time"], part) for before, part in itertools.pairwise(parts) if len(part) == every][
        warm_windows(schedule) - 1 :
    ]
    if len(found) < least:
        raise ConfigError(
            "run", folder.name, f"it has {len(found)} weight syncs after its start, but {least} are needed",
            f"use a run of {(warm_windows(schedule) + least) * every} steps or more",
        )  # fmt: skip
    return MeasuredRun(
        name=folder.name,
        schedule=schedule,
        strategy=strategy,
        prompts=cfg.prompts_per_step,
        responses=cfg.responses_per_prompt,
        replicas=cfg.rollout_replicas,
        slots=cfg.actor_rollout_ref.rollout.max_num_seqs,
        poll_s=float(cfg.trainer.v1.sampler.sampler_kwargs.get("poll_interval_s", 0.05)),
        prompt_tokens=round(statistics.fmean(part[-1]["prompt_length/mean"] for part in parts)),
        response_limit=cfg.data.max_response_length,
        windows=found,
        after_validation=[
            earlier[-1].get("timing_s/testing", 0.0) > 0 for earlier in parts[warm_windows(schedule) - 1 : -1]
        ][: len(found)],
    )


def _window(before: float, part: list[dict[str, Any]]) -> Window:
    last = part[-1]

    def timing(name: str) -> float:
        return float(last.get(f"timing_s/{name}", 0.0))

    responses = sum(row["responses"] for row in part)
    wall = last["time"] - before - timing("testing")
    wait, drain, sync = timing("gen"), timing("drain"), timing("update_weights")
    steps, saved = sum(row["timing_s/optimizer_step"] for row in part), timing("save_checkpoint") > 0
    submit = 0.0 if saved else timing("step") - steps - drain - sync
    ages: Counter[int] = Counter()
    for row in part:
        ages.update({int(age): count for age, count in row["tokens_by_age"].items()})
    return Window(
        end=last["time"],
        testing=timing("testing"),
        wall=wall,
        wait=wait,
        train=steps - wait,
        saved=saved,
        drain=drain,
        sync=sync,
        submit=submit,
        other=wall - steps - drain - sync - submit,
        responses=responses,
        mixed=sum(row["mixed_responses"] for row in part),
        tokens=sum(row["response_length/tokens"] for row in part),
        ages=ages,
        in_flight=sum(row["in_flight_s"] * row["responses"] for row in part) / responses,
        in_queue=sum(row["in_queue_s"] * row["responses"] for row in part) / responses,
        generated=[tuple(row["generated_between"]) for row in part if "generated_between" in row],
    )


def generation_seconds(run: MeasuredRun, window: Window) -> float | None:
    """Seconds that the rollout took for what was submitted in a window of an exact schedule, from submission.

    None where nobody waited for its end, or where a checkpoint was written after it.
    """
    if run.schedule.steps == 0:
        return window.wait
    waited = window.drain > 2 * run.poll_s and not window.saved
    return window.submit + window.wait + window.train + window.drain if waited else None


def summary(run: MeasuredRun, chosen: slice) -> dict[str, Any]:
    """The windows of ``chosen`` with the names of :func:`benchmarks.simulate.measures.steady`.

    ``rollout_quiet`` is None where the records cannot tell, and ``rollout_quiet_is_bound`` says that it is at least
    that much. ``in_queue_s`` leaves out what waited for a validation.
    """
    parts, after = run.windows[chosen], run.after_validation[chosen]
    span = sum(part.wall for part in parts)
    responses = sum(part.responses for part in parts)
    ages: Counter[int] = sum((part.ages for part in parts), Counter())
    kinds = ("wait", "drain", "sync", "submit", "other")
    idle = {name: sum(getattr(part, name) for part in parts) / span for name in kinds}
    queued = [part for part, late in zip(parts, after, strict=True) if not late]
    in_queue = statistics.fmean(part.in_queue for part in queued) if queued else None
    quiet, bound = _quiet(run, parts, span)
    return {
        "samples_per_s": responses / span,
        "step_s": span / len(parts) / run.schedule.sync_every,
        "trainer_idle": sum(idle.values()),
        **idle,
        "rollout_quiet": quiet,
        "rollout_quiet_is_bound": bound,
        "ages": shares(ages),
        "mean_age": sum(age * count for age, count in ages.items()) / ages.total(),
        "mixed": sum(part.mixed for part in parts) / responses,
        "in_flight_s": sum(part.in_flight * part.responses for part in parts) / responses,
        "in_queue_s": in_queue,
        "queued": None if in_queue is None else in_queue * responses / span,
    }


def _quiet(run: MeasuredRun, parts: Sequence[Window], span: float) -> tuple[float | None, bool]:
    """Share of time without a request in flight."""
    if all(part.generated for part in parts):
        # What is trained on later than here was partly generated here.
        begin, end = parts[0].end - parts[0].wall - parts[0].testing, parts[-1].end
        tests = [(part.end - part.testing, part.end) for part in parts if part.testing]
        seen = [pair for part in run.windows for pair in part.generated]
        busy = covered(seen, begin, end) - sum(covered(seen, *test) for test in tests)
        return 1 - busy / span, False
    if not run.schedule.exact:
        return None, False
    known = [generation_seconds(run, part) for part in parts]
    busy = sum(
        part.submit + part.wait + part.train + part.drain if seconds is None else seconds
        for part, seconds in zip(parts, known, strict=True)
    )
    return 1 - busy / span, None in known


def covered(pairs: Sequence[tuple[float, float]], begin: float, end: float) -> float:
    """Length of the part of ``begin`` to ``end`` that any of the intervals covers."""
    found, reached = 0.0, begin
    for low, high in sorted(pairs):
        low, high = max(low, reached), min(high, end)
        if high > low:
            found += high - low
            reached = high
    return found
