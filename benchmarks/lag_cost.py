"""What an exact lag costs: the same training under several schedules, one after another on the same machine.

``python -m benchmarks.lag_cost out=DIR lags=0,1,8,constant8,bounded8 steps=40 [overrides of recipes.train]``

One run folder per schedule below ``DIR`` (a finished one is kept), then a table and ``DIR/lag_cost.json``: optimizer
steps per second without start-up, validation and the first steps, where the seconds of a step go (waiting for samples,
update, waiting for the rollout to finish, weight sync), and the ages that came of it.
"""

from __future__ import annotations

import json
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from recipes import provenance
from recipes.compose import compose, expand_short_forms
from recipes.launch import run
from recipes.resume import begin_or_go_on, with_earlier
from recipes.schedule import schedule_of
from sat_verl.records import LAG_FILE, METRICS_FILE, read_rows

SKIP = 8
"""First steps that are not timed: engines warm up, and the queue is not yet as full as the schedule makes it."""


def one(out: Path, lag: str, overrides: list[str]) -> Path:
    """The run folder of a schedule; trained now if it is not there."""
    run_dir = out / f"lag-{lag}"
    if not (run_dir / "summary.json").is_file():
        words = begin_or_go_on(run_dir, [*overrides, f"lag={lag}"])
        run(compose(expand_short_forms(with_earlier(words))), command=["python", "-m", "recipes.train", *words])
    return run_dir


def check(lags: list[str], overrides: list[str]) -> None:
    """Refuse, before anything runs, a number of steps that leaves nothing to time."""
    for lag in lags:
        cfg = compose([*overrides, f"lag={lag}"])
        every = schedule_of(cfg).sync_every
        ends = [step for step in range(every, cfg.steps + 1, every) if step >= SKIP]
        if len(ends) < 3:
            raise SystemExit(
                f"steps={cfg.steps}: lag={lag} syncs every {every} steps, and the first {SKIP} steps and the last "
                f"window are not timed. Fix: set steps={SKIP + 3 * every} or more."
            )


def measure(run_dir: Path) -> dict[str, Any]:
    """Numbers of a finished run: seconds are per optimizer step, medians over the windows between two weight syncs."""
    every = OmegaConf.load(run_dir / "config.yaml").trainer.v1.separate_async.parameter_sync_step
    rows = read_rows(run_dir / METRICS_FILE)
    # A window's rows are written at its end. The last window holds a checkpoint and the validation: not timed.
    ends = [row for row in rows if row["step"] % every == 0 and row["step"] >= SKIP][:-1]
    windows = [later["time"] - earlier["time"] for earlier, later in pairwise(ends)]

    def part(name: str) -> float:
        return median(row.get(f"timing_s/{name}", 0.0) for row in ends[1:]) / every

    lag = json.loads((run_dir / LAG_FILE).read_text())
    return {
        "steps_per_s": every / median(windows),
        "windows": len(windows),
        "wait_for_samples_s": part("gen"),
        "update_s": part("update_actor"),
        "drain_s": part("drain"),
        "weight_sync_s": part("update_weights"),
        "lag": lag,
        "success": json.loads((run_dir / "summary.json").read_text())["success_after"],
    }


def table(results: dict[str, dict[str, Any]]) -> Table:
    first = next(iter(results.values()))["steps_per_s"]
    out = Table("lag", "realised ages", "kept", "mixed", "steps/s", "ratio", "samples", "update", "drain", "sync")
    for lag, row in results.items():
        ages = " ".join(f"{age}:{share:.0%}" for age, share in row["lag"]["realised"].items())
        mixed = f"{row['lag']['mixed_responses'] / max(row['lag']['responses'], 1):.1%}"
        seconds = [f"{row[name]:.2f} s" for name in ("wait_for_samples_s", "update_s", "drain_s", "weight_sync_s")]
        speed = (f"{row['steps_per_s']:.2f}", f"{row['steps_per_s'] / first:.2f}")
        out.add_row(lag, ages, "yes" if row["lag"]["ok"] else "NO", mixed, *speed, *seconds)
    return out


def main(arguments: list[str]) -> int:
    options = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    if "out" not in options:
        raise SystemExit(
            "python -m benchmarks.lag_cost out=DIR lags=0,8,constant8,bounded8 [overrides of recipes.train]"
        )
    out = Path(options.pop("out")).absolute()
    lags = options.pop("lags", "0,1,8,constant8,bounded8").split(",")
    overrides = ["checkpoint.every=1000000", *(f"{key}={value}" for key, value in options.items())]
    check(lags, overrides)
    results = {lag: measure(one(out, lag, overrides)) for lag in lags}
    report = {"overrides": overrides, "results": results, "provenance": provenance.collect()}
    (out / "lag_cost.json").write_text(json.dumps(report, indent=2) + "\n")
    Console().print(table(results))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
