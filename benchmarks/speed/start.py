"""From the command to the first optimizer step: ``python -m benchmarks.speed start``.

The command as a user gives it, with the worker processes forked from one that has imported the stack (what a CPU run
does), and with each importing it for itself (what Ray and verl do); in turn.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.arguments import result_file
from benchmarks.speed import result
from benchmarks.speed.timing import spread
from recipes.launch import RunFailedError
from recipes.provenance import ROOT
from recipes.tasks.cli import parse_settings
from sat_verl.records import METRICS_FILE, PHASES_FILE, read_rows

USAGE = """usage: python -m benchmarks.speed start [repeats=3] [run_dir=runs/speed/start]
           [out=benchmarks/results/speed_start.json] [overrides of recipes.train]
Seconds from the command to the first optimizer step and where they go, with forked workers and without."""
DEFAULTS: dict[str, Any] = {
    "repeats": 3,
    "run_dir": "runs/speed/start",
    "out": "benchmarks/results/speed_start.json",
}
WAYS = {"forked": [], "imported by each": [f"ray_kwargs.ray_init.runtime_env.py_executable={sys.executable}"]}
PHASES = ("checks", "Ray and the driver", "engines", "validation", "first step")


def main(words: Sequence[str]) -> int:
    settings = parse_settings(words, DEFAULTS, [])
    out = result_file(settings["out"])
    overrides = ["steps=2", "lag=1", *(f"{name}={value}" for name, value in settings["difficulty"].items())]
    folder = Path(settings["run_dir"]).absolute()
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for repeat in range(settings["repeats"]):
        for place, (way, more) in enumerate(WAYS.items()):
            found[way].append(started([*overrides, *more], folder / f"{repeat}-{place}"))
            print(f"{way}: first step after {sum(found[way][-1].values()):.1f} s", flush=True)
    rows = [
        {"way": way, "total_s": spread([sum(run.values()) for run in runs])}
        | {"phases": {name: spread([run[name] for run in runs]) for name in PHASES}}
        for way, runs in found.items()
    ]
    result.save(out, ["start", *words], {"rows": rows, "overrides": overrides})
    print(table(rows))
    return 0


def started(overrides: Sequence[str], run_dir: Path) -> dict[str, float]:
    """Seconds of each of :data:`PHASES` of one run."""
    shutil.rmtree(run_dir, ignore_errors=True)
    begin = time.time()
    words = [sys.executable, "-m", "recipes.train", f"run_dir={run_dir}", *overrides]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFailedError(done.stdout[-3000:] + done.stderr[-3000:])
    phases = read_rows(run_dir / PHASES_FILE)
    at = {row["phase"]: row["time"] for row in reversed(phases)}  # the first of each
    first = next(row["time"] for row in read_rows(run_dir / METRICS_FILE) if row["step"] == 1)
    train = next(row["time"] for row in phases if row["phase"] == "train" and row["time"] >= at["validate"])
    ends = [(run_dir / "config.yaml").stat().st_mtime, at["start engines"], at["engines ready"], train, first]
    return {name: end - start for name, start, end in zip(PHASES, [begin, *ends], ends, strict=False)}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: seconds to the first optimizer step and of each phase; the ratio to the first row."""
    lines = [f"| workers | first step after, s | ratio | {' | '.join(PHASES)} |", "|---" * (3 + len(PHASES)) + "|"]
    for row in rows:
        phases = " | ".join(f"{row['phases'][name]['median']:.1f}" for name in PHASES)
        ratio = row["total_s"]["median"] / rows[0]["total_s"]["median"]
        lines.append(f"| {row['way']} | {row['total_s']['median']:.1f} | {ratio:.2f} | {phases} |")
    return "\n".join(lines)
