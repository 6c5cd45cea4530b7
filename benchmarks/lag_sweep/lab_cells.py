"""Cells of the laboratory."""

from __future__ import annotations

import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.lag_sweep.measures import measure, no_signal, series
from benchmarks.lag_sweep.spec import Spec
from benchmarks.lag_sweep.workers import run_all
from sat_verl.lag import shares

ROOT = Path(__file__).resolve().parent.parent.parent
Outcome = dict[str, Any]
"""Fields of a :class:`benchmarks.lag_sweep.store.Cell` that come from running it."""


def run_cell(spec: Spec) -> Outcome:
    """Run one cell in this process; what it raises becomes a failed record."""
    from benchmarks.lab import run

    started, cpu, marks = time.monotonic(), time.process_time(), []
    try:
        result = run(spec.lab_config, lambda _: marks.append(time.monotonic()))
    except Exception:  # whatever a cell runs into, the others go on
        return failure(traceback.format_exc(limit=-4))
    found = series(result.rows, "lab")
    tokens: Counter[int] = Counter()
    for row in result.rows:
        tokens[int(row["age"])] += round(row["response_tokens"] * spec.lab_config.responses)
    metrics = measure(found, result.evaluations)
    speed = spec.lab_config.responses * (len(marks) - 1) / (marks[-1] - marks[0]) if len(marks) > 1 else None
    names = ("step", "success")
    times: dict[str, float | None] = {"seconds": time.monotonic() - started, "cpu_seconds": time.process_time() - cpu}
    return {
        "status": "done",
        "metrics": rounded(metrics | {"samples_per_s": speed} | times),
        "ages": shares(tokens),
        "no_signal": no_signal(found, metrics),
        "digest": result.digest,
        "evaluations": {name: [row[name] for row in result.evaluations] for name in names},
        "series": found,
    }


def rounded(metrics: dict[str, float | None]) -> dict[str, float | None]:
    return {name: value if value is None else float(f"{value:.6g}") for name, value in metrics.items()}


def failure(text: str, *folders: Path) -> Outcome:
    """A failed record. Paths below ``folders``, this clone, the Python installation and the home folder become relative
    to them: records are shown to others, and compared between machines.
    """
    for folder in (*map(str, folders), str(ROOT), sys.prefix, sys.base_prefix):
        text = text.replace(f"{folder}/", "")
    return {"status": "failed", "error": text.replace(str(Path.home()), "~").strip()}


def run_cells(
    specs: Sequence[Spec],
    workers: int,
    started: Callable[[Spec], None],
    finished: Callable[[Spec, Outcome], None],
) -> None:
    """Run cells, ``workers`` at a time; with 0 in this process.

    Args:
        specs: in this order.
        workers: processes, of one thread each.
        started: called with a cell before it runs.
        finished: called with its outcome.
    """
    died = "the worker process died (killed, or out of memory)"
    run_all(run_cell, specs, workers, started, lambda spec, outcome: finished(spec, outcome or failure(died)))
