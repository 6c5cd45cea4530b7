"""What a sweep says while it runs, and what ``plan`` prints."""

from __future__ import annotations

import time
from collections import Counter
from datetime import timedelta
from statistics import fmean
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from benchmarks.lag_sweep.spec import Spec
from benchmarks.lag_sweep.store import Cell

if TYPE_CHECKING:
    from benchmarks.lag_sweep.runner import Matrix


def seconds_by_task(matrix: Matrix) -> dict[str, float]:
    """Mean wall seconds of the done cells, by task."""
    found: dict[str, list[float]] = {}
    for cell in matrix.records.values():
        if cell.status == "done" and cell.metrics.get("seconds"):
            found.setdefault(cell.task, []).append(float(cell.metrics["seconds"] or 0))
    return {task: fmean(values) for task, values in found.items()}


def left(matrix: Matrix) -> tuple[float | None, int]:
    """Estimated wall seconds of the cells that are not done, from those that are, and their number.

    None where no cell of a task was measured in this folder.
    """
    measured = seconds_by_task(matrix)
    rest: Counter[str] = Counter()
    seen = set()
    for place in matrix.places:
        key = matrix.keys.get(place, str(place))
        failed = matrix.status(place) == "failed" and not matrix.settings.retry
        if key not in seen and matrix.status(place) != "done" and not failed:
            rest[place.task] += 1
        seen.add(key)
    if any(task not in measured for task in rest):
        return None, rest.total()
    workers = max(matrix.settings.workers, 1) if matrix.settings.engine == "lab" else 1
    return sum(measured[task] * count for task, count in rest.items()) / workers, rest.total()


class Report:
    """One line a cell, with the time that is left."""

    def __init__(self, matrix: Matrix, console: Console) -> None:
        self.matrix, self.console = matrix, console
        self.done = 0
        self._running: dict[str, Spec] = {}
        self._begun = time.monotonic()

    def started(self, spec: Spec) -> None:
        key = spec.identity().key
        self.matrix.tried.add(key)
        self._running[key] = spec

    def running(self) -> list[Spec]:
        return list(self._running.values())

    def finished(self, cell: Cell) -> None:
        del self._running[cell.key]
        self.done += 1
        if cell.status == "done":
            text = f"final {cell.metrics['final']:.3f}, {cell.metrics['seconds']:.1f} s"
        else:
            text = f"{cell.status}: {(cell.error or '').strip().splitlines()[-1]}"
        seconds, number = left(self.matrix)
        eta = f", {number} left: {timedelta(seconds=round(seconds))}" if seconds is not None else f", {number} left"
        self._line(f"{_name(cell)}: {text}{eta}")

    def say(self, spec: Spec, text: str) -> None:
        self._running.pop(spec.identity().key, None)
        self._line(f"{spec.place.task} {spec.place.arm} lag {spec.place.lag} seed {spec.place.seed}: {text}")

    def end(self) -> None:
        states = Counter(self.matrix.status(place) for place in self.matrix.places)
        spent = timedelta(seconds=round(time.monotonic() - self._begun))
        self._line(f"{', '.join(f'{number} {state}' for state, number in states.items())}; {self.done} run in {spent}")
        if states["failed"]:
            self._line("run the failed cells again with retry=true")

    def _line(self, text: str) -> None:
        self.console.print(text, highlight=False, soft_wrap=True)


def _name(cell: Cell) -> str:
    return f"{cell.task} {cell.arm} lag {cell.lag} seed {cell.seed} lr {cell.lr:g}"


def plan(matrix: Matrix, console: Console) -> None:
    """Print the cells by arm and lag, with how many are done, and the time that the rest will take."""
    settings = matrix.settings
    table = Table(title=f"{settings.engine}, {settings.schedule}, {settings.steps} steps: cells done / asked for")
    table.add_column("task")
    table.add_column("arm")
    table.add_column("lr")
    for lag in settings.lags:
        table.add_column(f"lag {lag}", justify="right")
    rows: dict[tuple[str, str, float], dict[int, list[str]]] = {}
    for place in matrix.places:
        row = rows.setdefault((place.task, place.arm, place.lr), {})
        row.setdefault(place.lag, []).append(matrix.status(place))
    for (task, arm, lr), row in rows.items():
        table.add_row(task, arm, f"{lr:g}", *(_state(row.get(lag, [])) for lag in settings.lags))
    console.print(table)
    seconds, number = left(matrix)
    console.print(f"{number} cells to run: {_estimate(matrix, seconds)}", highlight=False, soft_wrap=True)
    shared = len(set(matrix.keys.values()))
    if shared < len(matrix.keys):
        console.print(f"{len(matrix.keys) - shared} cells are the same run as another, and are run once")


def _state(states: list[str]) -> str:
    counts = Counter(states)
    rest = [f"{counts[name]} {name}" for name in ("failed", "interrupted", "waiting") if counts[name]]
    return ", ".join([f"{counts['done']}/{len(states)}", *rest])


def _estimate(matrix: Matrix, seconds: float | None) -> str:
    if seconds is not None:
        basis = ", ".join(f"{task} {value:.1f} s" for task, value in seconds_by_task(matrix).items())
        return f"about {timedelta(seconds=round(seconds))} (mean of the done cells: {basis})"
    return "time unknown until a cell of each task is done; nothing is assumed of other machines"
