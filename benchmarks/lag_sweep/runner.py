"""From the matrix to its records: what is missing is run, what is there is kept."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.lag_sweep import lab_cells, verl_cells
from benchmarks.lag_sweep.lab_cells import Outcome
from benchmarks.lag_sweep.matched import Radii, matched_to, mean_radii
from benchmarks.lag_sweep.progress import Report
from benchmarks.lag_sweep.settings import Settings
from benchmarks.lag_sweep.spec import Spec, group_by_key, places, sources
from benchmarks.lag_sweep.store import (
    SWEEP_FILE,
    Asked,
    Cell,
    Entry,
    Matched,
    Place,
    read_asked,
    read_cell,
    write_cell,
    write_json,
    write_table,
)
from recipes import provenance
from recipes.errors import ConfigError
from recipes.lock import locked

LOCK_PATIENCE_S = 5.0


class Matrix:
    """The cells of one call, and the records of the folder.

    Args:
        settings: the call.
        command: its words, for the record.

    Raises:
        ConfigError: the folder holds a sweep with other shared settings, or something else.
    """

    def __init__(self, settings: Settings, command: Sequence[str]) -> None:
        self.settings = settings
        self.out: Path = settings.out
        self.provenance: dict[str, Any] = provenance.collect(list(command))
        self.places = list(places(settings))
        self.keys: dict[Place, str] = {}
        self.radii: dict[Place, Matched] = {}
        self.records: dict[str, Cell] = {}
        self.asked = self._asked()
        self.tried: set[str] = set()
        self.resolve()

    def _asked(self) -> Asked:
        shared = self.settings.shared()
        before = read_asked(self.out)
        if before is None:
            return Asked(settings=shared)
        for name, value in shared.items():
            if before.settings.get(name) != value:
                problem = f"the sweep in {self.out} has {before.settings.get(name)}, and its cells would not compare"
                raise ConfigError(name, value, problem, "leave it as it was, or name another out=DIR")
        return before

    def spec(self, place: Place) -> Spec:
        radii = self.radii.get(place)
        return Spec(place, self.settings, Radii(radii.low, radii.high, radii.cap) if radii else None)

    def resolve(self) -> None:
        """Find the keys and records of all cells; a matched arm has a key once the cells of its SAT arm are done."""
        for place in sorted(self.places, key=lambda place: matched_to(place.arm) is not None):
            if place in self.keys:
                continue
            if matched_to(place.arm):
                radii = self._matched(place)
                if radii is None:
                    continue
                self.radii[place] = radii
            key = self.spec(place).identity().key
            self.keys[place] = key
            if key not in self.records and (record := read_cell(self.out, key)) is not None:
                self.records[key] = record

    def _matched(self, place: Place) -> Matched | None:
        """None while a cell of the SAT arm is to run yet; a failed one that is not retried is left out of the mean."""
        cells = [self.record(source) for source in sources(place, self.settings)]
        if any(cell is None or self._again(cell) for cell in cells):
            return None
        done = [cell for cell in cells if cell is not None and cell.status == "done"]
        radii = [(cell.metrics["eps_eff_low"], cell.metrics["eps_eff_high"], cell.metrics.get("cap")) for cell in done]
        known = [Radii(low, high, cap) for low, high, cap in radii if low is not None and high is not None]
        if not known:
            return None
        return Matched(arm=done[0].arm, **mean_radii(known)._asdict(), keys=[cell.key for cell in done])

    def record(self, place: Place) -> Cell | None:
        key = self.keys.get(place)
        return self.records.get(key) if key else None

    def status(self, place: Place) -> str:
        """``done``, ``failed``, ``interrupted``, ``waiting`` (for the SAT arm), or ``pending``."""
        record, key = self.record(place), self.keys.get(place)
        if record is not None:
            return record.status
        if key is None:
            return "waiting"
        folder = verl_cells.run_dir(self.out, key)
        return "interrupted" if self.settings.engine == "verl" and verl_cells.begun(folder) else "pending"

    def _again(self, cell: Cell) -> bool:
        """Whether a cell that has a record is to be run, in this call once."""
        again = ("interrupted", "failed") if self.settings.retry else ("interrupted",)
        return cell.status in again and cell.key not in self.tried

    def to_run(self) -> list[Spec]:
        """One spec per key that has no record yet, or one to be made again."""
        groups = group_by_key(self.spec(place) for place in self.places if place in self.keys)
        known = {key: self.records.get(key) for key in groups}
        return [
            group[0]
            for key, group in groups.items()
            if (key not in self.tried if (cell := known[key]) is None else self._again(cell))
        ]

    def keep(self, spec: Spec, outcome: Outcome) -> Cell:
        """Write the record of a cell."""
        identity, place = spec.identity(), spec.place
        folder = verl_cells.run_dir(self.out, identity.key)
        cell = Cell(
            **identity._asdict(),
            engine=self.settings.engine,
            model=self.settings.model,
            **place._asdict(),
            schedule=self.settings.schedule,
            steps=self.settings.steps,
            words=spec.words,
            matched=self.radii.get(place),
            run_dir=f"{verl_cells.RUNS}/{folder.name}" if self.settings.engine == "verl" else None,
            provenance=self.provenance | {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())},
            **outcome,
        )
        write_cell(self.out, cell)
        self.records[identity.key] = cell
        return cell

    def save(self, command: bool = False) -> None:
        """Write ``sweep.json``: earlier calls' cells stay, this call's are added or get their keys."""
        entries = {entry.place: entry for entry in self.asked.entries}
        for place in self.places:
            entries[place] = Entry(**place._asdict(), key=self.keys.get(place))
        self.asked.entries = list(entries.values())
        if command:
            call = {name: self.provenance[name] for name in ("time", "git")}
            self.asked.commands.append({"command": shlex.join(self.provenance["command"]), **call})
        write_json(self.out / SWEEP_FILE, self.asked.model_dump_json(indent=1))


def run(settings: Settings, command: Sequence[str], console: Console) -> int:
    """Run what is missing; returns 0 if every cell is done, else 1.

    Raises:
        ConfigError: bad input, or a folder that is in use.
    """
    with locked(settings.out, console, LOCK_PATIENCE_S, "out"):
        matrix = Matrix(settings, command)
        matrix.save(command=True)
        report = Report(matrix, console)
        try:
            while specs := matrix.to_run():
                _run_all(matrix, specs, report)
                matrix.resolve()  # the matched arms, now that the SAT arms are done
                matrix.save()
        finally:
            write_table(settings.out)
        report.end()
    unfinished = [place for place in matrix.places if matrix.status(place) != "done"]
    return 1 if unfinished and settings.submit == "local" else 0


def _run_all(matrix: Matrix, specs: Sequence[Spec], report: Report) -> None:
    def finished(spec: Spec, outcome: Outcome) -> None:
        report.finished(matrix.keep(spec, outcome))

    if matrix.settings.engine == "lab":
        with _interrupted(matrix, report):
            lab_cells.run_cells(specs, matrix.settings.workers, report.started, finished)
        return
    for spec in specs:
        folder = verl_cells.run_dir(matrix.out, spec.identity().key)
        report.started(spec)
        if verl_cells.finished(folder):
            finished(spec, verl_cells.read_or_fail(folder))
        elif matrix.settings.submit == "local":
            with _interrupted(matrix, report):
                finished(spec, verl_cells.run_cell(spec, folder))
        elif not verl_cells.begun(folder) or matrix.settings.retry:
            how = verl_cells.submit_ray if matrix.settings.submit == "ray" else verl_cells.submit_slurm
            report.say(spec, f"submitted: {how(spec, folder)}")
        else:
            report.say(spec, "submitted before, not finished")


@contextmanager
def _interrupted(matrix: Matrix, report: Report) -> Iterator[None]:
    """Record the cells that ctrl-C or SIGTERM cut short."""
    try:
        yield
    except KeyboardInterrupt:
        for spec in report.running():
            matrix.keep(spec, {"status": "interrupted"})
        raise
