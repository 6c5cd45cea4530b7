"""Fit the simulator to one half of a real run, and compare what it says of the other half with what was measured."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import arguments
from benchmarks.simulate import fit as fitting
from benchmarks.simulate.fit import Fit
from benchmarks.simulate.measured import MeasuredRun, read, summary
from recipes import provenance
from recipes.errors import ConfigError

QUANTITIES = (
    # name, heading, whether it is a share (the error is then in points, else relative), what counts as agreement
    ("samples_per_s", "samples/s", False, 0.10),
    ("step_s", "seconds per step", False, 0.10),
    ("trainer_idle", "trainer idle", True, 0.05),
    ("wait", "  waits for samples", True, 0.05),
    ("drain", "  drain", True, 0.05),
    ("sync", "  weight sync", True, 0.05),
    ("submit", "  submission", True, 0.05),
    ("other", "  other", True, 0.05),
    ("rollout_quiet", "rollout without a request", True, 0.05),
    ("in_flight_s", "request to response, s", False, 0.10),
    ("in_queue_s", "response to trainer, s", False, 0.10),
    ("queued", "responses in the queue", False, 0.10),
    ("mean_age", "mean age", False, 0.10),
    ("mixed", "responses that mix ages", True, 0.05),
)


def compare(scenario: Any, run: MeasuredRun, chosen: slice, seeds: Sequence[int]) -> dict[str, Any]:
    """Predicted (mean and standard deviation over the seeds) and measured, by quantity.

    ``ages_distance`` is half the sum of the differences of the two age histograms, 0 to 1.
    """
    said = [fitting.simulated(scenario, run, seed) for seed in seeds]
    seen = summary(run, chosen)
    found: dict[str, Any] = {"quantities": {}}
    for name, _, share, limit in QUANTITIES:
        predicted = statistics.fmean(one[name] for one in said)
        measured = seen[name]
        entry = {
            "predicted": predicted,
            "spread": statistics.stdev(one[name] for one in said) if len(said) > 1 else 0.0,
            "measured": measured,
            "error": None,
        }
        if measured is not None:
            entry["error"] = predicted - measured if share else (predicted / measured - 1 if measured else 0.0)
            low = name == "rollout_quiet" and seen["rollout_quiet_is_bound"]
            entry["at_least"] = low
            # Above a lower bound nothing is tested.
            entry["agrees"] = None if low and predicted > measured else abs(entry["error"]) <= limit
        found["quantities"][name] = entry
    ages = {age for one in said for age in one["ages"]} | set(seen["ages"])
    mean = {age: statistics.fmean(one["ages"].get(age, 0.0) for one in said) for age in sorted(ages, key=int)}
    distance = sum(abs(mean[age] - seen["ages"].get(age, 0.0)) for age in ages) / 2
    return found | {"ages_predicted": mean, "ages_measured": seen["ages"], "ages_distance": distance}


def table(run: MeasuredRun, source: str, found: Fit, result: dict[str, Any]) -> Table:
    lag = f"{run.schedule.kind} {run.schedule.steps}" if run.schedule.steps else "synchronous"
    out = Table("", "fitted to", "predicted", "measured", "error", "", title=f"{run.name}: {lag}, fitted to {source}")
    for name, heading, share, _ in QUANTITIES:
        entry = result["quantities"][name]
        form = "{:.1%}" if share else "{:.3g}"
        basis = result["fitted_to_measured"][name]
        begin = [heading, "" if basis is None else form.format(basis)]
        begin.append(f"{form.format(entry['predicted'])} ± {form.format(entry['spread'])}")
        if entry["measured"] is None:
            out.add_row(*begin, "not recorded", "", "")
            continue
        error = f"{entry['error'] * 100:+.1f} points" if share else f"{entry['error']:+.1%}"
        least = "at least " if entry["at_least"] else ""
        mark = {None: "not tested", True: "", False: "DISAGREES"}[entry["agrees"]]
        out.add_row(*begin, least + form.format(entry["measured"]), error, mark)
    ages = [
        " ".join(f"{age}:{share:.1%}" for age, share in result[f"ages_{side}"].items())
        for side in ("predicted", "measured")
    ]
    mark = "" if result["ages_distance"] <= 0.05 else "DISAGREES"
    out.add_row("ages", "", *ages, f"{result['ages_distance'] * 100:.1f} points", mark)
    engine = found.scenario.engine
    times = (
        f"{engine.request_s * 1e3:.1f} ms per request",
        f"{engine.store_s * 1e3:.1f} ms to store a response",
        f"{found.scenario.training.fixed_s:.2f} s per optimizer step",
        f"{found.scenario.sync_s:.2f} s per sync",
        f"while both work {found.scenario.trainer_slowed:.2f} and {found.scenario.rollout_slowed:.2f} times slower",
    )
    bound = "" if found.identified else "; the trainer never waited: the host's times are but upper bounds"
    out.caption = ", ".join(times) + bound
    return out


def _options(words: Sequence[str]) -> tuple[list[Path], list[Path], list[int], int | None, Path | None]:
    folders = [Path(word) for word in words if "=" not in word]
    options = dict(word.split("=", 1) for word in words if "=" in word)
    unknown = sorted(set(options) - {"fit", "seeds", "steps", "out"})
    if unknown:
        raise ConfigError(unknown[0], options[unknown[0]], "there is no such setting", "use fit, seeds, steps, out")
    if not folders:
        raise ConfigError("run", "", "no run is named", "add the folders of finished runs of recipes.train")
    try:
        seeds = [int(seed) for seed in arguments.seed_range(options.get("seeds", "8"))]
    except ValueError:
        seeds = []
    if not seeds:
        raise ConfigError("seeds", options["seeds"], "it must be a number or a list of numbers", "set seeds=8")
    fit_to = [Path(word) for word in arguments.split_items(options.get("fit", ""))]
    if len(fit_to) > 2:
        raise ConfigError("fit", options["fit"], "it is one run, or a synchronous one and another", "name two runs")
    steps = options.get("steps")
    if steps is not None and not steps.isdecimal():
        raise ConfigError("steps", steps, "it must be a number", "name the last optimizer step that is to be compared")
    until = None if steps is None else int(steps)
    return folders, fit_to, seeds, until, Path(options["out"]) if "out" in options else None


def _fit(runs: Sequence[MeasuredRun], seeds: Sequence[int]) -> Fit:
    if len(runs) == 2 and (runs[0].schedule.steps or not runs[1].schedule.steps):
        raise ConfigError(
            "fit", ",".join(run.name for run in runs), "how far the sides slow each other down shows between a "
            "synchronous run and one that is not", "name them in this order",
        )  # fmt: skip
    found = fitting.fit(runs[0], slice(None), seeds)
    return fitting.with_contention(found, runs[1], seeds) if len(runs) == 2 else found


def main(words: Sequence[str], command: list[str], console: Console) -> int:
    """Compare every run; returns 0, whether or not they agree: that is a finding."""
    folders, fit_to, seeds, until, out = _options(words)
    others = [read(folder, 2) for folder in fit_to]
    shared = _fit(others, seeds[:2]) if others else None
    source = " and ".join(one.name for one in others) or "its first half"
    results = []
    for folder in folders:
        run = read(folder, 2 if others else 4, until)
        first, rest = (slice(0, 0), slice(None)) if shared else fitting.halves(run)
        found = shared or fitting.fit(run, first, seeds[:2])
        scenario = fitting.transferred(found, run, len(run.windows[rest]))
        basis = summary(others[-1], slice(None)) if others else summary(run, first)
        result = compare(scenario, run, rest, seeds) | {"fitted_to_measured": basis}
        console.print(table(run, source, found, result))
        results.append(
            {
                "run": run.name,
                "schedule": run.schedule.kind,
                "lag": run.schedule.steps,
                "fitted_to": source,
                "until_step": until,
                "windows": [len(run.windows[first]), len(run.windows[rest])],
                "identified": found.identified,
                "waits_per_step_s": {"measured": found.target_s, "simulated": found.reached_s},
                "scenario": asdict(scenario),
                **result,
            }
        )
    if out:
        out.mkdir(parents=True, exist_ok=True)
        content = {"runs": results, "provenance": provenance.collect(command)}
        (out / "validate.json").write_text(json.dumps(content, indent=1) + "\n")
    return 0
