"""What asynchrony pays, by lag: ``python -m benchmarks.speed overlap``.

The same training on the same machine, one run after another: verl's synchronous trainer, whose engine and trainer take
turns, and the project's at several lags. Responses per second, and what each side does meanwhile.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.arguments import result_file
from benchmarks.speed import curve, result, training
from benchmarks.speed.stock import SYNC
from benchmarks.speed.sync import SHAPES, dense_model
from benchmarks.speed.timing import spread
from recipes.tasks.cli import parse_settings
from sat_verl.records import LAG_FILE, METRICS_FILE, read_rows

USAGE = """usage: python -m benchmarks.speed overlap [lags=sync,0,1,2,4,8,bounded2,bounded8] [steps=40]
           [run_dir=runs/speed/overlap] [out=benchmarks/results/speed_overlap.json] [overrides of recipes.train]
Responses per second by lag, beside verl's synchronous trainer (`sync`), and the utilisation of both sides; plotted
beside `out`, as .png. A run that is done is kept; the whole takes the time of its runs. `model` may be one of the sizes
of `benchmarks.speed sync`."""
DEFAULTS: dict[str, Any] = {
    "lags": "sync,0,1,2,4,8,bounded2,bounded8",
    "steps": 40,
    "run_dir": "runs/speed/overlap",
    "out": "benchmarks/results/speed_overlap.json",
}


def main(words: Sequence[str]) -> int:
    settings = parse_settings(words, DEFAULTS, [])
    out = result_file(settings["out"])
    folder, rows = Path(settings["run_dir"]).absolute(), []
    more = settings["difficulty"]
    overrides = [f"steps={settings['steps']}", *(f"{name}={value}" for name, value in more.items())]
    size = more.get("model")
    model = [f"model={dense_model(folder / 'models' / size, *SHAPES[size])}"] if size in SHAPES else []
    of_run = [*(word for word in overrides if not model or word != f"model={size}"), *model]
    for lag in str(settings["lags"]).split(","):
        trainer, schedule = (SYNC, "0") if lag == "sync" else (training.OURS, lag)
        run_dir = folder / f"lag-{lag}"
        marks = training.trained(trainer, [*of_run, f"lag={schedule}"], run_dir)
        rows.append({"lag": lag} | measured(marks, run_dir, lag == "sync"))
        result.save(out, ["overlap", *words], {"rows": rows, "overrides": overrides})  # so far
        print(f"lag {lag}: {rows[-1]['responses_per_s']['median']:.1f} responses/s", flush=True)
    if curve.series(rows):  # more than verl's synchronous trainer
        curve.draw(rows, out.with_suffix(".png"))
    print(table(rows))
    return 0


def measured(marks: Sequence[dict[str, Any]], run_dir: Path, sync: bool) -> dict[str, Any]:
    """One row: medians over the windows between two weight syncs, shares over all of them together."""
    every = 1 if sync else training.window_steps(run_dir)
    begin, end = marks[0], marks[-1]
    seconds, windows = end["time"] - begin["time"], list(pairwise(marks))
    responses = _responses(run_dir) * every

    def share(*names: str) -> float:
        return sum(mark["data"].get(name, 0.0) for mark in marks[1:] for name in names) / seconds

    busy = share("timing_s/gen") if sync else _covered(run_dir, begin["time"], end["time"]) / seconds
    return {
        "windows": len(windows),
        "responses_per_s": spread([responses / (b["time"] - a["time"]) for a, b in windows]),
        "all_responses_per_s": responses * len(windows) / seconds,
        "step_s": seconds / len(windows) / every,
        "cpu_s_per_step": (end["cpu"] - begin["cpu"]) / len(windows) / every,
        "trainer_waits": share("timing_s/gen"),
        "update": share("timing_s/update_actor"),
        "weight_sync": share("timing_s/update_weights"),
        "rollout_has_requests": busy,
        "cpu_s_by_process": training.cpu_by(begin, end, len(windows) * every),
        "drain": 0.0 if sync else _drained(run_dir, begin["time"], end["time"]) / seconds,
    } | ({} if sync else _lag(run_dir))


def _drained(run_dir: Path, begin: float, end: float) -> float:
    """Seconds between two times in which the trainer waited for the rollout to finish before a weight sync."""
    rows = (row for row in read_rows(run_dir / METRICS_FILE) if begin < row["time"] <= end)
    return sum(row.get("timing_s/drain", 0.0) for row in rows)


def _lag(run_dir: Path) -> dict[str, Any]:
    """What became of the schedule in the whole run, its first steps counted."""
    lag = json.loads((run_dir / LAG_FILE).read_text())
    mixed = lag["mixed_responses"] / lag["responses"]
    return {"kept": lag["ok"], "mean_age": lag["mean_age"], "ages": lag["realised"], "mixed_responses": mixed}


def _responses(run_dir: Path) -> int:
    from omegaconf import OmegaConf

    cfg = OmegaConf.load(run_dir / "config.yaml")
    return cfg.actor_rollout_ref.actor.ppo_mini_batch_size * cfg.actor_rollout_ref.rollout.n


def _covered(run_dir: Path, begin: float, end: float) -> float:
    """Seconds between two times in which a response to a prompt of some step was being generated."""
    return union([row["generated_between"] for row in read_rows(run_dir / "samples.jsonl")], begin, end)


def union(spans: Iterable[Sequence[float]], begin: float, end: float) -> float:
    """Length of the union of intervals within ``[begin, end]``."""
    total, reached = 0.0, begin
    for start, stop in sorted((max(start, begin), min(stop, end)) for start, stop in spans):
        total += max(0.0, stop - max(start, reached))
        reached = max(reached, stop)
    return total


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown; the ratio is to the first row."""
    lines = [
        "| lag | responses/s | ratio | s / step | CPU s / step | trainer waits | drains | updates | syncs | "
        "rollout busy | mean age | mixed |",
        "|" + "---|" * 12,
    ]
    for row in rows:
        names = ("trainer_waits", "drain", "update", "weight_sync", "rollout_has_requests")
        ages = f"{row['mean_age']:.1f} | {100 * row['mixed_responses']:.1f} %" if "mean_age" in row else " | "
        lines.append(
            f"| {row['lag']} | {row['all_responses_per_s']:.1f} | "
            f"{row['all_responses_per_s'] / rows[0]['all_responses_per_s']:.2f} | {row['step_s']:.2f} | "
            f"{row['cpu_s_per_step']:.2f} | {' | '.join(f'{100 * row[name]:.0f} %' for name in names)} | {ages} |"
        )
    return "\n".join(lines)
