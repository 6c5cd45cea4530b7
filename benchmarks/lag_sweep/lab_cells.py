"""Cells of the laboratory: single-threaded processes, one for each worker, each replaced when it dies."""

from __future__ import annotations

import multiprocessing
import os
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from benchmarks.lag_sweep.measures import measure, no_signal, series
from benchmarks.lag_sweep.spec import Spec
from sat_verl.lag import shares

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
    times = {"seconds": time.monotonic() - started, "cpu_seconds": time.process_time() - cpu}
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


def failure(text: str) -> Outcome:
    return {"status": "failed", "error": text.strip()}


def _attend() -> None:
    """End a worker with its parent, also if that is killed: a spawned worker would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _executor() -> ProcessPoolExecutor:
    # One process each: if it dies, it is clear in which cell.
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_attend)


def run_cells(
    specs: Sequence[Spec],
    workers: int,
    started: Callable[[Spec], None],
    finished: Callable[[Spec, Outcome], None],
) -> None:
    """Run cells, ``workers`` at a time; with 0 in this process.

    Args:
        specs: in this order.
        workers: processes.
        started: called with a cell before it runs.
        finished: called with its outcome.
    """
    if workers == 0:
        for spec in specs:
            started(spec)
            finished(spec, run_cell(spec))
        return
    waiting = list(reversed(specs))
    executors = [_executor() for _ in range(min(workers, len(specs)))]
    running: dict[Future[Outcome], tuple[int, Spec]] = {}

    def give(slot: int) -> None:
        if waiting:
            spec = waiting.pop()
            started(spec)
            running[executors[slot].submit(run_cell, spec)] = (slot, spec)

    try:
        for slot in range(len(executors)):
            give(slot)
        while running:
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                slot, spec = running.pop(future)
                try:
                    outcome = future.result()
                except BrokenProcessPool:
                    outcome = failure("the worker process died (killed, or out of memory)")
                    executors[slot].shutdown(wait=False)
                    executors[slot] = _executor()
                finished(spec, outcome)
                give(slot)
    finally:
        for executor in executors:
            for process in list((executor._processes or {}).values()):
                process.terminate()  # interrupted in mid-cell; idle otherwise
            executor.shutdown(wait=False, cancel_futures=True)
