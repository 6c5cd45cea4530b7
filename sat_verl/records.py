"""What a run leaves behind while it runs: one JSON line per optimizer step, and its phases."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sat_verl.lag import LagSchedule, verdict

METRICS_FILE = "metrics.jsonl"
VALIDATION_FILE = "validation.jsonl"
PHASES_FILE = "phases.jsonl"
WORKER_FILE = "worker.json"
SAMPLES_FILE = "samples.jsonl"
LAG_FILE = "lag.json"
WAIT_FILE = "wait.json"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The complete JSON lines of a file; none if there is no file (a killed process may leave half a line)."""
    text = path.read_text() if path.is_file() else ""
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line]


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
        self._pending_samples: list[dict[str, Any]] = []
        self._waiting_for = ""

    def phase(self, name: str) -> None:
        self._append(PHASES_FILE, {"phase": name, "time": time.time()})

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Say in ``wait.json`` what the trainer waits for, so that a watcher can end a wait that has no end."""
        self.touch(what)
        yield
        self.touch("")

    def touch(self, what: str | None = None) -> None:
        """The wait makes progress, or is now for something else."""
        self._waiting_for = what if what is not None else self._waiting_for
        self._replace(WAIT_FILE, {"for": self._waiting_for, "since": time.time()})

    def worker(self, reports: list[dict[str, Any]]) -> None:
        """Store what the workers say of themselves, one entry per trainer rank."""
        self._replace(WORKER_FILE, reports)

    def validation(
        self, global_step: int, metrics: dict[str, Any], seconds: float, problems: dict[str, list[int]] | None = None
    ) -> None:
        """Store one validation: verl's metrics, and the counts of each problem (:func:`sat_verl.validation.tally`)."""
        row = {"global_step": global_step, "seconds": seconds} | ({"problems": problems} if problems else {})
        self._append(VALIDATION_FILE, row | {key: plain(value) for key, value in metrics.items()})

    def add(self, metrics: dict[str, Any], samples: dict[str, Any]) -> None:
        """Hold one optimizer step's metrics, and what it trained on, until its global step is complete."""
        self._pending.append({key: plain(value) for key, value in metrics.items()})
        self._pending_samples.append(samples)

    def add_drain(self, seconds: float) -> None:
        """Seconds that the trainer waited for the rollout after the last optimizer step."""
        if self._pending:
            self._pending_samples[-1]["drain_seconds"] += seconds
            self._pending[-1]["timing_s/drain"] = self._pending_samples[-1]["drain_seconds"]

    def flush(self, global_step: int, parameter_sync_step: int, window: dict[str, Any]) -> None:
        """Write the optimizer steps of ``global_step`` (numbered from 1); ``window`` holds its own metrics."""
        first = (global_step - 1) * parameter_sync_step + 1
        rows, self._pending = self._pending, []
        samples, self._pending_samples = self._pending_samples, []
        for offset, (row, sample) in enumerate(zip(rows, samples, strict=True)):
            place = {"step": first + offset, "global_step": global_step}
            line = place | {"time": time.time()}
            if offset == len(rows) - 1:
                # The step's own value wins: with several steps per sync, verl's is their average.
                line |= {key: plain(value) for key, value in window.items()}
            self._append(SAMPLES_FILE, place | sample)
            self._append(METRICS_FILE, line | row)

    def broken_step(self, step: int, global_step: int, samples: dict[str, Any]) -> None:
        """A step that was refused: the samples of its global step so far are written, and it is the last."""
        for offset, pending in enumerate(self._pending_samples):
            earlier = step - len(self._pending_samples) + offset
            self._append(SAMPLES_FILE, {"step": earlier, "global_step": global_step} | pending)
        self._pending, self._pending_samples = [], []
        self._append(SAMPLES_FILE, {"step": step, "global_step": global_step} | samples)

    def finish_lag(self, schedule: LagSchedule) -> dict[str, Any]:
        """Write ``lag.json``, the promise and what became of it over all steps of the run, resumed ones included."""
        found = verdict(schedule, read_rows(self.run_dir / SAMPLES_FILE))
        self._replace(LAG_FILE, found)
        return found

    def _append(self, name: str, row: dict[str, Any]) -> None:
        # One write of one line: a reader never sees half of it, and a killed run loses at most this line.
        with open(self.run_dir / name, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def _replace(self, name: str, content: Any) -> None:
        partial = self.run_dir / (name + ".partial")
        partial.write_text(json.dumps(content, indent=2) + "\n")
        os.replace(partial, self.run_dir / name)
