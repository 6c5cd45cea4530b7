"""A training run that is measured while it runs: the clock and the CPU time at the end of every step.

The trainer is the project's, or one of verl's own on the same recipe (:mod:`benchmarks.speed.stock`).
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
from omegaconf import OmegaConf

from benchmarks.speed.stack import started
from recipes import launch, report
from sat_verl.records import read_rows

OURS = "sat_verl"
MARKS_FILE, LOG_ROWS = "marks.json", "verl_log.jsonl"
SKIP = 5
"""First steps that are not measured: engines warm up, and the queue is not yet as full as the lag makes it."""
_LOOK_S = 0.02


def trained(trainer: str, overrides: Sequence[str], run_dir: Path) -> list[dict[str, Any]]:
    """Train, and return a mark for each window between two weight syncs; a run that is done is only read.

    Args:
        trainer: :data:`OURS` or a name of :data:`benchmarks.speed.stock.TRAINERS`.
        overrides: of recipes.train.
        run_dir: the run's folder, emptied first if the run was not finished.

    Returns:
        By window ``time`` in seconds since the epoch, ``cpu``, the CPU seconds of all processes so far, ``cpu_by`` kind
        of process, and verl's metrics as ``data``. The first mark is the end of the first steps, which are not
        measured; nor is the last window, which holds a checkpoint and the validation.

    Raises:
        ConfigError: bad overrides.
        RunFailedError: the run failed, or is too short to measure.
    """
    if not (run_dir / MARKS_FILE).is_file():
        shutil.rmtree(run_dir, ignore_errors=True)
        marks = _train(trainer, overrides, run_dir)
        (run_dir / MARKS_FILE).write_text(json.dumps(marks))
    marks = json.loads((run_dir / MARKS_FILE).read_text())[math.ceil(SKIP / window_steps(run_dir)) - 1 : -1]
    if len(marks) < 2:
        raise launch.RunFailedError(f"{run_dir}: {len(marks)} windows to measure; set more steps")
    return marks


def _train(trainer: str, overrides: Sequence[str], run_dir: Path) -> list[dict[str, Any]]:
    program = ["-m", "recipes.driver"] if trainer == OURS else ["-m", "benchmarks.speed.stock", trainer]
    env = {"VERL_FILE_LOGGER_PATH": str(run_dir / LOG_ROWS)}
    with started(trainer, [*overrides, "checkpoint.every=1000000"], run_dir, program, env=env) as supervisor:
        marks = _watch(supervisor, run_dir / LOG_ROWS)
    if supervisor.returncode:
        raise launch.RunFailedError(report.failure(run_dir / launch.LOG_FILE, supervisor.returncode, 0))
    return marks


def _watch(supervisor: subprocess.Popen, rows: Path) -> list[dict[str, Any]]:
    marks: list[dict[str, Any]] = []
    spent: dict[int, tuple[str, float]] = {}
    seen = 0
    while supervisor.poll() is None:
        time.sleep(_LOOK_S)
        # A line that is being written has no end yet.
        lines = rows.read_text().count("\n") if rows.is_file() else 0
        if lines > seen:
            _read_cpu(supervisor.pid, spent)
            by: defaultdict[str, float] = defaultdict(float)
            for kind, seconds in spent.values():
                by[kind] += seconds
            marks += [{"time": time.time(), "cpu": sum(by.values()), "cpu_by": by}] * (lines - seen)
            seen = lines
    return [
        mark | {"data": row["data"]}
        for mark, row in zip(marks, read_rows(rows), strict=True)
        if "timing_s/step" in row["data"]  # not the validation before training
    ]


def _read_cpu(root: int, spent: dict[int, tuple[str, float]]) -> None:
    """Kind and CPU seconds of each process below; those that have ended stay as they were seen last."""
    for process in psutil.Process(root).children(recursive=True):
        try:
            times, title = process.cpu_times(), " ".join(process.cmdline())
        except psutil.Error:
            continue
        spent[process.pid] = (kind_of(title), times.user + times.system)


def kind_of(title: str) -> str:
    """What a process of a run is, by its title: the actor's or engine's name, ``raylet``, ``gcs_server`` or other."""
    found = re.match(r"(?:ray::|VLLM::)(\w+)", title)
    if found:
        return found[1]
    return next((name for name in ("raylet", "gcs_server") if name in title.split(" ")[0]), "other")


def cpu_by(begin: dict[str, Any], end: dict[str, Any], steps: int) -> dict[str, float]:
    """CPU seconds of a step by kind of process, the largest first."""
    spent = {kind: (seconds - begin["cpu_by"].get(kind, 0.0)) / steps for kind, seconds in end["cpu_by"].items()}
    return {kind: round(seconds, 3) for kind, seconds in sorted(spent.items(), key=lambda item: -item[1])}


def window_steps(run_dir: Path) -> int:
    """Optimizer steps between two weight syncs of a run."""
    return OmegaConf.load(run_dir / "config.yaml").trainer.v1.separate_async.parameter_sync_step
