"""The files of a sweep: ``sweep.json``, ``cells/<key>.json``, ``sweep.parquet``; what the report reads.

>>> from benchmarks.lag_sweep import load
>>> frame = load("DIR").frame()  # doctest: +SKIP
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pandas as pd
from pydantic import BaseModel, ConfigDict, ValidationError

from recipes.errors import ConfigError

SCHEMA_VERSION: Literal[1] = 1
SWEEP_FILE, CELLS, TABLE_FILE = "sweep.json", "cells", "sweep.parquet"


class Place(NamedTuple):
    """Where a cell stands in the matrix."""

    task: str
    arm: str
    lr: float
    lag: int
    seed: int


class Matched(BaseModel):
    """Radii of a matched arm, and its cap for A < 0: the means over the cells with these keys."""

    model_config = ConfigDict(extra="forbid")
    arm: str
    low: float
    high: float
    cap: float | None = None
    keys: list[str]


class Cell(BaseModel):
    """The record of one cell; the file is this, as JSON.

    Attributes:
        schema_version: of this record.
        key: digest of the full composed config and the code version; the file's name.
        config_hash: digest of the config alone.
        engine, code_version: what ran it.
        task, model, arm, lr, lag, schedule, seed, steps: its place and size. Arms with one key share one file, whose
            ``arm`` is the first of them; :func:`load` gives each its own.
        words: of ``python -m recipes.train`` that make the cell, or would on the real stack.
        matched: of an arm with matched radii, where they come from.
        status: ``done``; ``failed``, with ``error``; ``interrupted``, which the next call goes on with.
        metrics: see :func:`benchmarks.lag_sweep.measures.measure`; and ``samples_per_s`` (responses sampled and trained
            on per second, evaluations between the steps included), ``seconds`` (wall time of the whole cell) and, in
            the laboratory, ``cpu_seconds``, which other programs on the machine change less.
        ages: realised lag, share of the trained tokens by age in optimizer steps.
        no_signal: reasons why the cell says nothing of its method.
        digest: of the final weights (``lab``) or of the scores and gradient norms (``verl``): cells that share it did
            the same thing.
        evaluations: ``step`` and ``success``, the held-out score.
        series: by name, one value a step (:data:`benchmarks.lag_sweep.measures.NAMES`).
        run_dir: of ``engine=verl``, the run folder, relative to the sweep's.
        provenance: see :func:`recipes.provenance.collect`.
    """

    model_config = ConfigDict(extra="forbid")

    schema_version: Literal[1] = SCHEMA_VERSION
    key: str
    config_hash: str
    engine: Literal["lab", "verl"]
    code_version: int
    task: str
    model: str
    arm: str
    lr: float
    lag: int
    schedule: str
    seed: int
    steps: int
    words: list[str]
    matched: Matched | None = None
    status: Literal["done", "failed", "interrupted"]
    error: str | None = None
    metrics: dict[str, float | None] = {}
    ages: dict[str, float] = {}
    no_signal: list[str] = []
    digest: str | None = None
    evaluations: dict[str, list[float]] = {}
    series: dict[str, list[float | None]] = {}
    run_dir: str | None = None
    provenance: dict[str, Any] = {}

    @property
    def place(self) -> Place:
        return Place(self.task, self.arm, self.lr, self.lag, self.seed)


class Entry(BaseModel):
    """One cell of the matrix that was asked for; ``key`` is None while a matched arm waits for its radii."""

    model_config = ConfigDict(extra="forbid")
    task: str
    arm: str
    lr: float
    lag: int
    seed: int
    key: str | None = None

    @property
    def place(self) -> Place:
        return Place(self.task, self.arm, self.lr, self.lag, self.seed)


class Asked(BaseModel):
    """The content of ``sweep.json``.

    Attributes:
        settings: those that all cells of the folder share.
        commands: every command that asked for cells, with its time and commit.
        entries: the cells asked for, in order.
    """

    model_config = ConfigDict(extra="forbid")
    schema_version: Literal[1] = SCHEMA_VERSION
    settings: dict[str, Any]
    commands: list[dict[str, Any]] = []
    entries: list[Entry] = []


class Sweep(NamedTuple):
    """A sweep as it stands: what was asked for, the cells that are there, and the places of those that are not."""

    asked: Asked
    cells: list[Cell]
    pending: list[Place]

    def frame(self) -> pd.DataFrame:
        """One row a cell that is there, with its metrics as columns; ``identical_to`` names arms with the same digest.

        Lists are text: ``no_signal`` and ``identical_to`` joined, ``ages`` as JSON.
        """
        alike: dict[tuple[Any, ...], list[str]] = {}
        for cell in self.cells:
            if cell.digest:
                alike.setdefault((cell.task, cell.lr, cell.lag, cell.seed, cell.digest), []).append(cell.arm)
        rows = []
        for cell in self.cells:
            same = alike.get((cell.task, cell.lr, cell.lag, cell.seed, cell.digest), [])
            fields = cell.model_dump(
                include={
                    "key", "config_hash", "engine", "code_version", "task", "model", "arm", "lr", "lag", "schedule",
                    "seed", "steps", "status", "error", "digest",
                }
            )  # fmt: skip
            radii = {f"matched_{side}": getattr(cell.matched, side, None) for side in ("low", "high")}
            text = {
                "no_signal": "; ".join(cell.no_signal),
                "identical_to": ", ".join(name for name in same if name != cell.arm),
                "ages": json.dumps(cell.ages),
                "commit": (cell.provenance.get("git") or {}).get("commit"),
                "evaluations": json.dumps(cell.evaluations.get("success", [])),
            }
            rows.append({**fields, **radii, **cell.metrics, **text})
        return pd.DataFrame(rows)


def write_json(path: Path, text: str) -> None:
    """Replace a file as a whole: whoever reads it, or is killed while writing it, has the old or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.{os.getpid()}")
    staged.write_text(text + "\n")
    os.replace(staged, path)


def cell_path(out: Path, key: str) -> Path:
    return out / CELLS / f"{key}.json"


def write_cell(out: Path, cell: Cell) -> None:
    write_json(cell_path(out, cell.key), cell.model_dump_json())


def read_cell(out: Path, key: str) -> Cell | None:
    """The record of this key; None if there is none.

    Raises:
        ConfigError: the file is no such record.
    """
    path = cell_path(out, key)
    if not path.is_file():
        return None
    return _read(Cell, path)


def read_asked(out: Path) -> Asked | None:
    """What was asked of this folder so far; None if nothing was.

    Raises:
        ConfigError: the file is something else.
    """
    path = out / SWEEP_FILE
    return _read(Asked, path) if path.is_file() else None


def _read(kind: type[Any], path: Path) -> Any:
    try:
        return kind.model_validate_json(path.read_text())
    except (ValidationError, UnicodeDecodeError) as error:
        problem = f"{path.name} is not a file of this version of the sweep ({type(error).__name__})"
        raise ConfigError("out", path, problem, "name another folder, or move the file away") from None


def load(out: str | Path) -> Sweep:
    """Read a sweep.

    Args:
        out: its folder.

    Raises:
        ConfigError: there is no sweep, or a file is not of this version.
    """
    out = Path(out)
    asked = read_asked(out)
    if asked is None:
        raise ConfigError("out", out, "there is no sweep in this folder", "run python -m benchmarks.lag_sweep out=...")
    cells, pending = [], []
    records: dict[str, Cell | None] = {}
    for entry in asked.entries:
        if entry.key is not None and entry.key not in records:
            records[entry.key] = read_cell(out, entry.key)
        record = records.get(entry.key) if entry.key else None
        if record is None:
            pending.append(entry.place)
        else:
            cells.append(record.model_copy(update={"arm": entry.arm}))
    return Sweep(asked, cells, pending)


def write_table(out: Path) -> None:
    """Write ``sweep.parquet`` from the cells that are there."""
    frame = load(out).frame()
    staged = out / f".{TABLE_FILE}.{os.getpid()}"
    frame.to_parquet(staged, index=False)
    os.replace(staged, out / TABLE_FILE)
