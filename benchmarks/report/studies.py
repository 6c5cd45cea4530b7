"""Folders of the lag sweep, joined into studies: cells that share all settings but the axes of the matrix."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from benchmarks.arms import ARMS
from benchmarks.lag_sweep import Cell, Sweep, load
from benchmarks.lag_sweep.matched import SUFFIX, base_of, matched_to
from benchmarks.lag_sweep.store import SWEEP_FILE, Asked, Entry, Place


class Block(NamedTuple):
    """Cells that differ in arm, lag and seed alone."""

    task: str
    lr: float

    def __str__(self) -> str:
        return f"{self.task}, learning rate {self.lr:g}"


class Group(NamedTuple):
    """Arms that are drawn together."""

    name: str
    arms: list[str]


def label(arm: str) -> str:
    """The name of an arm for people; the arm's own where it is unknown."""
    if (source := matched_to(arm)) is not None:
        base, own = base_of(source), arm.removesuffix(SUFFIX) in ARMS
        return f"{base.label}, fixed at SAT's radius" if own else f"{base.label}, fixed as {ARMS[source].label}"
    return ARMS[arm].label if arm in ARMS else arm


@dataclass
class Study:
    """One sweep, from one folder or several whose settings are equal.

    Attributes:
        number: from 1.
        settings: shared by all cells.
        folders: where they were read.
        sweep: cells, and what was asked for.
        notes: what a reader should know of how the folders were joined.
    """

    number: int
    settings: dict[str, Any]
    folders: list[Path]
    sweep: Sweep
    notes: list[str] = field(default_factory=list)

    @property
    def name(self) -> str:
        """A title that tells it from the others."""
        s = self.settings
        extra = [f"{name} {s[name]}" for name in ("dual_clip", "quantile_scope") if s.get(name) is not None]
        extra += [f"noise {s['noise']:g}"] if s.get("noise") else []
        extra += [", ".join(s["overrides"])] if s.get("overrides") else []
        size = f"{s['steps']} steps of {s['prompts_per_step']} x {s['responses_per_prompt']} responses"
        parts = (f"engine={s['engine']}", f"model {s['model']}", f"{s['schedule']} lag", size,
                 f"{s['eval_problems']} held-out problems", *extra)  # fmt: skip
        return ", ".join(parts)

    @property
    def commands(self) -> list[dict[str, Any]]:
        """Every command that asked for its cells."""
        return self.sweep.asked.commands

    @property
    def gpu(self) -> bool:
        """Whether its cells run on GPUs: the recipes' CUDA backend was asked for."""
        return any("backend=cuda" in word for word in self.settings.get("overrides", []))

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row a cell that is there, failed ones included: ``Sweep.frame`` and the number of the study."""
        frame = self.sweep.frame()
        if frame.empty:
            frame = pd.DataFrame(columns=["task", "arm", "lr", "lag", "seed", "status", "final", "key"])
        return frame.assign(study=self.number)

    @cached_property
    def done(self) -> pd.DataFrame:
        return self.frame[self.frame.status == "done"]

    @property
    def cells(self) -> Iterator[Cell]:
        """The done ones."""
        return (cell for cell in self.sweep.cells if cell.status == "done")

    def cells_at(self, block: Block, arm: str, lag: int) -> list[Cell]:
        """The done cells of a place, whatever their seed."""
        return [cell for cell in self.cells if (cell.task, cell.lr, cell.arm, cell.lag) == (*block, arm, lag)]

    @cached_property
    def asked(self) -> dict[tuple[Block, str, int], list[int]]:
        """Seeds asked for, by block, arm and lag, in the order of the commands."""
        found: dict[tuple[Block, str, int], list[int]] = {}
        for entry in self.sweep.asked.entries:
            found.setdefault((Block(entry.task, entry.lr), entry.arm, entry.lag), []).append(entry.seed)
        return found

    @property
    def blocks(self) -> list[Block]:
        return list(dict.fromkeys(block for block, _, _ in self.asked))

    def lags(self, block: Block) -> list[int]:
        return sorted({lag for where, _, lag in self.asked if where == block})

    def arms(self, block: Block | None = None) -> list[str]:
        """In the order of the paper and the controls, each matched arm after its SAT arm."""
        have = {arm for where, arm, _ in self.asked if block is None or where == block}
        controls = {arm: f"{arm.removeprefix('sat_')}{SUFFIX}" for arm in ARMS if arm.startswith("sat_")}
        order = [name for arm in ARMS for name in (arm, controls.get(arm, arm))]
        known = [name for name in dict.fromkeys(order) if name in have]
        return known + sorted(have - set(known))

    def groups(self, block: Block) -> list[Group]:
        """A base loss with SAT and with the matched radius; then all others, beside GRPO."""
        arms = self.arms(block)
        found = []
        for base in arms:
            trio = [name for name in (base, f"sat_{base}", f"{base}{SUFFIX}") if name in arms]
            if len(trio) > 1 or base in ("grpo", "gspo"):
                found.append(Group(label(base), trio))
        rest = [arm for arm in arms if not any(arm in group.arms for group in found)]
        if rest:
            found.append(Group("other arms", [*(["grpo"] if "grpo" in arms else []), *rest]))
        return found

    def values(self, block: Block, arm: str, lag: int, metric: str = "final") -> dict[int, float]:
        """A metric of the done cells by seed; those that do not have it are left out."""
        return self._values.get((block, arm, lag, metric), {})

    @cached_property
    def _values(self) -> dict[tuple[Block, str, int, str], dict[int, float]]:
        found: dict[tuple[Block, str, int, str], dict[int, float]] = {}
        for cell in self.cells:
            for metric, value in cell.metrics.items():
                if value is not None:
                    where = (Block(cell.task, cell.lr), cell.arm, cell.lag, metric)
                    found.setdefault(where, {})[cell.seed] = value
        return found

    @cached_property
    def status(self) -> dict[Place, str]:
        """Of every cell asked for: ``done``, ``failed``, ``interrupted`` or ``pending``."""
        there = {cell.place: cell.status for cell in self.sweep.cells}
        return {entry.place: there.get(entry.place, "pending") for entry in self.sweep.asked.entries}


def read(folders: Sequence[Path]) -> list[Study]:
    """Read sweep folders, or folders of them, and join those whose shared settings are equal.

    A cell that two folders hold is taken from the first that has it done. Cells of one place with different keys
    (matched radii from other seeds, another code version) are named in the study's notes.

    Raises:
        ConfigError: a folder holds no sweep, or a file of another version.
    """
    joined: dict[str, list[tuple[Path, Sweep]]] = {}
    for folder in dict.fromkeys(within for given in folders for within in _sweeps(given.resolve())):
        sweep = load(folder)
        joined.setdefault(json.dumps(sweep.asked.settings, sort_keys=True), []).append((folder, sweep))
    return [_study(number, parts) for number, parts in enumerate(joined.values(), 1)]


def _sweeps(folder: Path) -> list[Path]:
    """The folder, or the sweeps in it where it is none itself."""
    within = sorted(file.parent for file in folder.glob(f"*/{SWEEP_FILE}"))
    return within if within and not (folder / SWEEP_FILE).is_file() else [folder]


def shown(folder: Path) -> str:
    """A folder for readers: relative to the working folder, or its name alone; others have other places."""
    try:
        return str(folder.relative_to(Path.cwd()))
    except ValueError:
        return folder.name


def _study(number: int, parts: list[tuple[Path, Sweep]]) -> Study:
    entries: dict[Place, Entry] = {}
    cells: dict[Place, Cell] = {}
    commands: list[dict[str, Any]] = []
    notes = []
    for folder, sweep in parts:
        commands += sweep.asked.commands
        for entry in sweep.asked.entries:
            entries.setdefault(entry.place, entry)
        for cell in sweep.cells:
            held = cells.get(cell.place)
            if held is not None and held.key != cell.key:
                notes.append(
                    f"{place_text(cell.place)} is there twice, with different keys; {shown(folder)} has the second"
                )
            if held is None or (held.status != "done" and cell.status == "done"):
                cells[cell.place] = cell
    asked = Asked(settings=parts[0][1].asked.settings, commands=commands, entries=list(entries.values()))
    present = [cells[place] for place in entries if place in cells]
    sweep = Sweep(asked, present, [place for place in entries if place not in cells])
    notes += _oddities(present)
    return Study(number, asked.settings, [folder for folder, _ in parts], sweep, notes)


def _oddities(cells: Sequence[Cell]) -> list[str]:
    """Differences between cells that a comparison should not have."""
    notes = []
    versions = sorted({cell.code_version for cell in cells})
    if len(versions) > 1:
        notes.append(f"the cells come from different code versions: {', '.join(map(str, versions))}")
    radii: dict[tuple[Block, str, int], set[tuple[float, float]]] = {}
    for cell in cells:
        if cell.matched:
            where = (Block(cell.task, cell.lr), cell.arm, cell.lag)
            radii.setdefault(where, set()).add((cell.matched.low, cell.matched.high))
    for (block, arm, lag), found in radii.items():
        if len(found) > 1:
            notes.append(f"{arm} has different radii among its seeds ({block}, lag {lag}): {sorted(found)}")
    return notes


def place_text(place: Place) -> str:
    return f"{place.task} {place.arm} lag {place.lag} seed {place.seed} lr {place.lr:g}"
