"""What a run leaves behind while it runs: one JSON line per optimizer step, and its phases."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"
VALIDATION_FILE = "validation.jsonl"
PHASES_FILE = "phases.jsonl"
WORKER_FILE = "worker.json"


def plain(value: Any) -> Any:
    """A JSON value for a metric: numpy and torch scalars become numbers, non-finite numbers become their names."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, bool | int | float | str) or value is None:
        return value
    return str(value)


class RunRecorder:
    """Appends to the files of a run folder; every line is complete when it appears.

    Optimizer steps are numbered 1, 2, ... over the whole run. verl's metrics of a global step (one weight sync, maybe
    several optimizer steps) are merged into the line of its last optimizer step.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._pending: list[dict[str, Any]] = []

    def phase(self, name: str) -> None:
        self._append(PHASES_FILE, {"phase": name, "time": time.time()})

    def worker(self, reports: list[dict[str, Any]]) -> None:
        """Store what the workers say of themselves, one entry per trainer rank."""
        target = self.run_dir / WORKER_FILE
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(reports, indent=2) + "\n")
        os.replace(partial, target)

    def validation(self, global_step: int, metrics: dict[str, Any], seconds: float) -> None:
        row = {"global_step": global_step, "seconds": seconds}
        self._append(VALIDATION_FILE, row | {key: plain(value) for key, value in metrics.items()})

    def add(self, metrics: dict[str, Any]) -> None:
        """Hold one optimizer step's metrics until its global step is complete."""
        self._pending.append({key: plain(value) for key, value in metrics.items()})

    def flush(self, global_step: int, parameter_sync_step: int, window: dict[str, Any]) -> None:
        """Write the optimizer steps of ``global_step`` (numbered from 1); ``window`` holds its own metrics."""
        first = (global_step - 1) * parameter_sync_step + 1
        rows, self._pending = self._pending, []
        for offset, row in enumerate(rows):
            line = {"step": first + offset, "global_step": global_step, "time": time.time()}
            if offset == len(rows) - 1:
                # The step's own value wins: with several steps per sync, verl's is their average.
                line |= {key: plain(value) for key, value in window.items()}
            self._append(METRICS_FILE, line | row)

    def _append(self, name: str, row: dict[str, Any]) -> None:
        # One write of one line: a reader never sees half of it, and a killed run loses at most this line.
        with open(self.run_dir / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
