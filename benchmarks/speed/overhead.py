"""What the project's trainer and sampler add to verl's: ``python -m benchmarks.speed overhead``.

The same bounded-staleness training by three: verl's ``separate_async`` as it is, the same with the project's agent
loops, and the project's trainer. The last two differ in trainer, sampler, checks and records alone. Runs alternate.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.arguments import result_file
from benchmarks.speed import result, training
from benchmarks.speed.stock import ASYNC, ASYNC_OUR_LOOPS
from benchmarks.speed.timing import spread
from recipes.tasks.cli import parse_settings

USAGE = """usage: python -m benchmarks.speed overhead [repeats=2] [steps=30] [lag=bounded1]
           [run_dir=runs/speed/overhead] [out=benchmarks/results/speed_overhead.json] [overrides of recipes.train]
Seconds and CPU seconds of a step: verl's separate_async, the same with our agent loops, ours."""
DEFAULTS: dict[str, Any] = {
    "repeats": 2,
    "steps": 30,
    "lag": "bounded1",
    "run_dir": "runs/speed/overhead",
    "out": "benchmarks/results/speed_overhead.json",
}
TRAINERS = (ASYNC_OUR_LOOPS, training.OURS, ASYNC)


def main(words: Sequence[str]) -> int:
    settings = parse_settings(words, DEFAULTS, [])
    out = result_file(settings["out"])
    overrides = [f"{name}={settings[name]}" for name in ("steps", "lag")]
    overrides += [f"{name}={value}" for name, value in settings["difficulty"].items()]
    folder = Path(settings["run_dir"]).absolute()
    found: dict[str, list[list[float]]] = {name: [] for name in TRAINERS}
    for repeat in range(settings["repeats"]):
        for name in TRAINERS[:: -1 if repeat % 2 else 1]:
            marks = training.trained(name, overrides, folder / f"{name}-{repeat}")
            steps = [[b["time"] - a["time"], b["cpu"] - a["cpu"]] for a, b in pairwise(marks)]
            found[name] += steps
            print(f"{name}: {spread([seconds for seconds, _ in steps])['median']:.2f} s per step", flush=True)
    rows = [row(name, steps) for name, steps in found.items()]
    result.save(out, ["overhead", *words], {"rows": rows, "overrides": overrides})
    print(table(rows))
    return 0


def row(name: str, steps: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Of one trainer's steps, each with seconds by the clock and of CPU time."""
    clock, cpu = zip(*steps, strict=True)
    return {
        "trainer": name,
        "steps": len(steps),
        "step_s": spread(list(clock)),
        "cpu_s": spread(list(cpu)),
        "mean_step_s": sum(clock) / len(steps),
        "mean_cpu_s": sum(cpu) / len(steps),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown; ratios are to verl's trainer with the project's agent loops."""
    base = rows[0]
    lines = [
        "| trainer | steps | s per step (quartiles) | ratio of means | CPU s per step (quartiles) | ratio of means |",
        "|---|---|---|---|---|---|",
    ]
    for one in rows:
        cells = [one["trainer"], str(one["steps"])]
        for name, mean in (("step_s", "mean_step_s"), ("cpu_s", "mean_cpu_s")):
            cells.append(f"{one[name]['median']:.2f} ({one[name]['low']:.2f}-{one[name]['high']:.2f})")
            cells.append(f"{one[mean] / base[mean]:.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
