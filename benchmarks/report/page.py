"""The files: ``FILE.html``, ``FILE.md`` and ``cells.parquet``.

The page holds no script and asks for nothing outside itself, and its content security policy forbids both. Names and
error texts are escaped by the template engine.
"""

from __future__ import annotations

import functools
import json
import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined

import eval as evaluation
from benchmarks.report import agreement_view, figures, glossary, paper, tables
from benchmarks.report.answer import Finding, counted, findings
from benchmarks.report.protocol import Family, Name, Test, described, families, further, is_the_protocols
from benchmarks.report.studies import Study, shown
from eval.storage import write_atomically
from eval.text import visible
from eval.wording import flat
from recipes import provenance

TABLE_FILE = "cells.parquet"


@dataclass(frozen=True)
class Part:
    """A study, worked out."""

    study: Study
    families: dict[Name, Family]
    rest: list[Test]
    """Comparisons outside the families."""
    findings: list[Finding]
    closed: bool

    @property
    def protocols(self) -> bool:
        return is_the_protocols(self.study)

    @property
    def described(self) -> bool:
        return described(self.study)

    @property
    def progress(self) -> str:
        """How much of what was asked for is there."""
        states = pd.Series(list(self.study.status.values()), dtype=object).value_counts()
        rest = "".join(f", {states[name]:,} {name}" for name in ("failed", "interrupted", "pending") if name in states)
        return f"{int(states.get('done', 0)):,} of {counted(len(self.study.status), 'cell')} done{rest}"

    @property
    def complete(self) -> bool:
        return set(self.study.status.values()) <= {"done"}

    @functools.cached_property
    def main_tables(self) -> list[tables.Table]:
        return [tables.scores(self.study, block) for block in self.study.blocks]

    @functools.cached_property
    def test_tables(self) -> list[tables.Table]:
        found = [tables.tests(self.study, family) for family in self.families.values() if family.tests]
        return [*found, *([tables.further_tests(self.study, self.rest)] if self.rest else [])]

    def plates(self) -> list[figures.Plates]:
        drawn = [figures.score_by_lag(self.study), *figures.mechanism(self.study), figures.throughput(self.study),
                 figures.learning(self.study)]  # fmt: skip
        return [plates for plates in drawn if plates is not None and plates.plots]

    def forests(self) -> list[figures.Plates]:
        drawn = [figures.differences(self.study, family) for family in self.families.values()]
        return [plates for plates in drawn if plates is not None]

    @functools.cached_property
    def detail_tables(self) -> list[tables.Table]:
        study = self.study
        return [tables.outcomes(study), tables.mechanics(study), tables.radii(study)]

    @functools.cached_property
    def mark_tables(self) -> list[tables.Table]:
        study = self.study
        return [tables.collapsed(study), tables.silent(study), tables.missing(study)]

    @functools.cached_property
    def provenance(self) -> dict[str, list[tuple[str, str]]]:
        """Shared settings, and what the cells ran on: every value that occurs."""
        found: dict[str, dict[str, int]] = {}
        for cell in self.study.cells:
            origin = {name: cell.provenance.get(name) for name in ("versions", "git", "hardware")}
            for name, value in flat({"code version": cell.code_version, **origin}):
                values = found.setdefault(name, {})
                values[value] = values.get(value, 0) + 1
        rows = [
            (name, "; ".join(value if len(values) == 1 else f"{value} ({counted(n, 'cell')})"
                             for value, n in values.items()))
            for name, values in found.items()
        ]  # fmt: skip
        times = sorted(str(cell.provenance["time"]) for cell in self.study.cells if "time" in cell.provenance)
        seconds = sum(cell.metrics.get("seconds") or 0 for cell in self.study.cells)
        spent = [("first and last cell", f"{times[0]}, {times[-1]}")] if times else []
        spent += [("wall time of the cells together", f"{seconds / 3600:.2f} h")]
        folders = [("folders", "\n".join(map(shown, self.study.folders)))]
        return {"Shared settings": [*folders, *flat(self.study.settings)], "Origin of the cells": [*spent, *rows]}


@functools.cache
def _environment(escaped: bool) -> Environment:
    assert evaluation.__file__ is not None
    shared = Path(evaluation.__file__).with_name("templates")
    environment = Environment(
        loader=FileSystemLoader([Path(__file__).with_name("templates"), shared]), autoescape=escaped,
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["cell"] = _markdown_cell
    return environment


def _markdown_cell(text: Any) -> str:
    """Text for a markdown table: no column ends in it, no markup acts."""
    return re.sub(r"([\\|`*_<>\[\]])", r"\\\1", " ".join(str(text).split()))


def parts(studies: Sequence[Study], *, closed: bool = False) -> list[Part]:
    """Work out the families and answers of every study; the protocol's comes first."""
    found = []
    for study in studies:
        tests = families(study, closed=closed)
        rest = further(study, tests.values())
        found.append(Part(study, tests, rest, findings(study, tests, rest), closed))
    return sorted(found, key=lambda part: not part.protocols)


def _gpu(studies: Sequence[Study]) -> str:
    ran = sum(len(study.done) for study in studies if study.gpu)
    asked = sum(len(study.status) for study in studies if study.gpu)
    if asked:
        return f"GPU cells: {ran:,} of {asked:,} done, {asked - ran:,} not run."
    return f"GPU cells: not run. The paper's setting ({2 * len(paper.ROWS)} cells at lags 1 and 8) was not run here."


def context(studies: Sequence[Study], redraw: Sequence[str], *, closed: bool = False) -> dict[str, Any]:
    """What both templates show.

    Args:
        studies: at least one.
        redraw: the command that makes the report.
        closed: the sweeps go no further.
    """
    worked = parts(studies, closed=closed)
    paper_tables = paper.tables([part.study for part in worked])
    return {
        "parts": worked,
        "paper_tables": paper_tables,
        "agreements": agreement_view.sections([part.study for part in worked]),
        "differences": [(part.study, paper.differences(part.study)) for part in worked],
        "gpu": _gpu(studies),
        "glossary": {"Statistics": glossary.STATISTICS, "Measures of a cell": glossary.METRICS},
        "redraw": shlex.join(redraw),
        "made": {name: value for name, value in provenance.collect(list(redraw)).items() if name != "command"},
        "flat": flat,
    }


def render(content: dict[str, Any], template: str) -> str:
    """One of the two templates, with control characters made visible."""
    return visible(_environment(template.endswith(".html.j2")).get_template(template).render(content))


def table(studies: Sequence[Study]) -> pd.DataFrame:
    """One row a cell that is there, of all studies, with the study's number and settings (as JSON)."""
    frames = [study.frame.assign(settings=json.dumps(study.settings)) for study in studies if not study.frame.empty]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def write(studies: Sequence[Study], out: Path, redraw: Sequence[str], *, closed: bool = False) -> list[Path]:
    """Write the page, the markdown and the table; returns their paths."""
    content = context(studies, redraw, closed=closed)
    out.parent.mkdir(parents=True, exist_ok=True)
    text, cells = out.with_suffix(".md"), out.with_name(TABLE_FILE)
    write_atomically(out, render(content, "sweep.html.j2"))
    write_atomically(text, render(content, "sweep.md.j2"))
    table(studies).to_parquet(cells, index=False)
    return [out, text, cells]
