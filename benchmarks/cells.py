"""Runs of a benchmark in one JSON file: what is there is not run again, and an interruption loses one run at most."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks.lab import LabConfig, Result, cell_key, identity, run
from benchmarks.statistics import summary
from recipes.errors import ConfigError
from recipes.provenance import collect

Cells = dict[str, dict[str, Any]]
"""By key: summary, evaluations, one list per metric, seconds, identity, and the place of its provenance in the file."""


def run_cells(out: Path, runs: Mapping[str, Sequence[LabConfig]]) -> tuple[list[tuple[str, str, int]], Cells]:
    """Do the runs that ``out`` does not hold yet; it is written after each.

    Args:
        out: the JSON file.
        runs: by arm, one run per seed.

    Returns:
        (arm, key, seed) of every run asked for, in order, and the cells of the file by key.

    Raises:
        ConfigError: ``out`` holds something else.
    """
    document = _read(out)
    cells: Cells = document["cells"]
    wanted = [(arm, cell_key(config), config) for arm, configs in runs.items() for config in configs]
    # Seed by seed, so that a run of the benchmark that is cut short has every arm.
    missing = sorted((cell for cell in wanted if cell[1] not in cells), key=lambda cell: cell[2].seed)
    if missing:
        document["provenance"].append(collect())
        _run_missing(out, document, missing)
    return [(arm, key, config.seed) for arm, key, config in wanted], cells


def _run_missing(out: Path, document: dict[str, Any], missing: Sequence[tuple[str, str, LabConfig]]) -> None:
    """Run cells in order into ``document`` and its file, with a bar for the cells and one for the steps."""
    cells: Cells = document["cells"]
    columns = (TextColumn("{task.description:32}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn()) as bars:
        overall = bars.add_task("runs", total=len(missing))
        steps = bars.add_task("", total=None)
        for arm, key, config in missing:
            if key not in cells:  # two arms may be the same run
                bars.reset(steps, description=f"{config.task} {arm} seed {config.seed}", total=config.steps)
                cells[key] = _cell(config, lambda _: bars.advance(steps))
                cells[key]["provenance"] = len(document["provenance"]) - 1
                _write(out, document)
            bars.advance(overall)


def _cell(config: LabConfig, report: Callable[[dict[str, float]], None]) -> dict[str, Any]:
    started = time.monotonic()
    result = run(config, report)
    return {
        "summary": {name: _short(value) for name, value in summary(result).items()},
        "seconds": round(time.monotonic() - started, 1),
        **_columns(result),
        "identity": identity(config),
    }


def _columns(result: Result) -> dict[str, Any]:
    """The rows turned into one list per metric, which is a third of the size."""
    return {
        "evaluations": {name: [row[name] for row in result.evaluations] for name in result.evaluations[0]},
        "series": {name: [_short(row[name]) for row in result.rows] for name in result.rows[0]},
    }


def _short(value: float) -> float:
    return float(f"{value:.5g}")


def _read(out: Path) -> dict[str, Any]:
    if not out.exists():
        return {"provenance": [], "cells": {}}
    try:
        document: dict[str, Any] = json.loads(out.read_text())
        document["cells"], document["provenance"]
    except (json.JSONDecodeError, KeyError, TypeError):
        raise ConfigError("out", out, "the file is not one of this benchmark's", "name another") from None
    return document


def _write(out: Path, document: dict[str, Any]) -> None:
    """Replace the file as a whole: an interruption leaves the old one."""
    out.parent.mkdir(parents=True, exist_ok=True)
    staged = out.with_suffix(".tmp")
    staged.write_text(json.dumps(document))
    os.replace(staged, out)
