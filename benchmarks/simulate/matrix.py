"""Run the cells of a matrix and write what came of it."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import timedelta
from typing import Any

import pandas as pd
from rich.console import Console

from benchmarks.simulate import report
from benchmarks.simulate.measures import measure
from benchmarks.simulate.settings import Cell, Settings
from benchmarks.simulate.trainer import SimulatedRun
from recipes import provenance
from sat_verl.records import read_rows


def one(settings: Settings, cell: Cell) -> dict[str, Any]:
    """The row of a cell: what it is, and :func:`benchmarks.simulate.measures.measure`."""
    scenario = settings.scenario(cell)
    schedule, strategy = cell.policy
    rows = SimulatedRun(scenario, schedule, strategy, cell.seed).run()
    found: dict[str, Any] = {
        "name": cell.name,
        "schedule": cell.schedule,
        "lag_steps": cell.lag,
        "gpus": cell.gpus,
        "seed": cell.seed,
    }
    found |= measure(rows, scenario, schedule)
    rollout = scenario.replicas * settings.gpus_per_replica
    if cell.schedule == "colocated":  # the same GPUs train while no replica has a sequence
        found["gpu_idle"] = found["rollout_idle"] - (1 - found["trainer_idle"])
        return found | dict.fromkeys(("trainer_idle", "rollout_idle", "wait"))
    found["gpu_idle"] = (rollout * found["rollout_idle"] + (cell.gpus - rollout) * found["trainer_idle"]) / cell.gpus
    return found


def run(settings: Settings, command: list[str], console: Console) -> int:
    """All cells; ``simulate.json``, ``cells.parquet``, ``table.md`` and plots in the folder ``out``.

    Cells that ``cells.jsonl`` has already are kept, each with the commit that it was simulated with. Interrupted, it
    writes what it has.
    """
    settings.out.mkdir(parents=True, exist_ok=True)
    cells = settings.cells()
    store = settings.out / "cells.jsonl"
    kept = {row.pop("key"): row for row in read_rows(store)}
    keys = {cell: settings.key(cell) for cell in cells}
    todo = [cell for cell in cells if keys[cell] not in kept]
    work = {cell: settings.scenario(cell).prompts for cell in todo}
    commit = provenance.commit()["commit"]
    begin, done, interrupted = time.monotonic(), 0, False
    try:
        for index, cell in enumerate(todo, 1):
            row = kept[keys[cell]] = one(settings, cell) | {"commit": commit}
            with open(store, "a", encoding="utf-8") as file:
                file.write(json.dumps({"key": keys[cell]} | row) + "\n")
            done += work[cell]
            left = timedelta(seconds=round((time.monotonic() - begin) / done * (sum(work.values()) - done)))
            text = f"{row['samples_per_s']:.2f} samples/s, {row['gpu_idle']:.0%} of GPU time idle"
            line = f"{index}/{len(todo)} {cell.gpus} GPUs, {cell.name}, seed {cell.seed}: {text}; {left} left"
            console.print(line, highlight=False, soft_wrap=True)
    except KeyboardInterrupt:
        interrupted = True
    results = [kept[key] for key in keys.values() if key in kept]
    if not results:
        raise KeyboardInterrupt
    rows = report.over_seeds(results)
    text = report.markdown(rows)
    (settings.out / "table.md").write_text(text)
    flat = [{key: value for key, value in row.items() if not isinstance(value, dict)} for row in results]
    ages = [{f"age_{age}": share for age, share in row["ages"].items()} for row in results]
    pd.DataFrame([a | b for a, b in zip(flat, ages, strict=True)]).to_parquet(settings.out / "cells.parquet")
    report.draw(rows, settings.out)
    content = {
        "complete": not interrupted,
        "settings": settings.model_dump(mode="json", exclude={"out"}),
        "scenarios": {str(cell.gpus): asdict(settings.scenario(cell)) for cell in cells if cell.name != "colocated"},
        "results": rows,
        "cells": results,
        "provenance": provenance.collect(command),
    }
    (settings.out / "simulate.json").write_text(json.dumps(content, indent=1) + "\n")
    console.print(text, highlight=False, soft_wrap=True)
    if interrupted:
        return 130
    return 0 if all(row["kept"] for row in rows) else 1
