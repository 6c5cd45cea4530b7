"""How the agreement of the two engines is shown: one card, tables, overlaid curves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from benchmarks.report.agreement import MARGIN, OUTCOMES, SAME, Comparison, Pair, Where, pairs, unlike
from benchmarks.report.answer import Finding, Tone, counted, interval, joined, p_text
from benchmarks.report.drawing import Look
from benchmarks.report.estimates import Difference, Unpaired, estimate
from benchmarks.report.figures import Legend, Plates, Plot, curve, draw
from benchmarks.report.studies import Study, label
from benchmarks.report.tables import Shown, Table, number, with_spread

TITLE = "Does the laboratory predict the real stack?"
LAB, VERL = Look(0, 1), Look(1, 0)
_TONES = {"agree": "yes", "differ": "no", "interim": "muted", "not run": "muted"}
_MECHANICS = {
    "age": "age", "d_bar": "d-bar", "clip": "clip", "q": "q", "eps_eff_low": "eps_eff low",
    "eps_eff_high": "eps_eff high", "intercepted": "intercepted",
}  # fmt: skip


def gap(found: Unpaired | None) -> str:
    """``+0.031 [−0.002, +0.064]``."""
    return interval(found) if found else "not run"


def _side(values: dict[int, float]) -> Shown:
    return Shown(with_spread(estimate(list(values.values())))) if values else Shown("not run", "", "muted")


def _count(one: Comparison) -> str:
    return f"{len(one.lab)} : {len(one.verl)}"


def _names(one: Comparison) -> list[Shown]:
    return [Shown(label(one.name[0])), *map(Shown, one.name[1:])]


def _verdict(one: Comparison) -> Shown:
    return Shown(one.verdict, "", _TONES.get(one.verdict, ""))


def scores(pair: Pair) -> Table:
    """AUC and final score of both engines, the differences, the verdict; the means over places last."""
    rows = []
    judged, other = ([*pair.compared(name), *pair.together(name)] for name in OUTCOMES)
    for auc, final in zip(judged, other, strict=True):
        found = auc.found
        rows.append([
            *_names(auc), Shown(_count(auc)), _side(auc.lab), _side(auc.verl), Shown(gap(found)),
            Shown(p_text(found.p if found else None)), Shown(p_text(auc.adjusted)),
            _side(final.lab), _side(final.verl), Shown(gap(final.found)), _verdict(auc),
        ])  # fmt: skip
    head = ["method", "task", "lag", "n (lab : verl)", "AUC, lab", "AUC, verl", "verl − lab [95 %]", "p", "p (Holm)",
            "final, lab", "final, verl", "verl − lab, final [95 %]", "verdict"]  # fmt: skip
    note = (
        f"Means over seeds ± half width of Student's 95 % interval; differences with Welch's 95 % interval, seeds "
        f"unpaired. The verdict is of the AUC. Agree: its interval lies within ±{MARGIN:g}. Differ: it does not, and p "
        "(Holm) is below 0.05. Open: neither; the seeds cannot tell. The last rows average over the places of a task, "
        "seed by seed; they are uncorrected, and the main answer."
    )
    return Table(f"{pair.id}-scores", "Scores of the two engines", head, rows, 2, note)


def effects(pair: Pair) -> Table:
    """SAT against its base and its matched radius, in each engine, and whether the effects are the same."""
    rows = []
    for one, lab, verl in pair.effects():
        sat, control, task, lag = one.name
        sides = [Shown(interval(found)) if found else Shown("not run", "", "muted") for found in (lab, verl)]
        rows.append([Shown(f"{label(sat)} − {label(control)}"), Shown(task), Shown(lag), Shown(_count(one)), *sides,
                     Shown(gap(one.found)), Shown(p_text(one.found.p if one.found else None)),
                     Shown(_signs(lab, verl))])  # fmt: skip
    head = ["comparison", "task", "lag", "n (lab : verl)", "effect, lab [95 %]", "effect, verl [95 %]",
            "verl − lab [95 %]", "p", "sign (lab, verl)"]  # fmt: skip
    note = (
        "Differences of the AUC, paired by seed within each engine. The last difference says whether the engines would "
        "lead to the same conclusion. Sign: of each effect, 0 where its interval holds 0. Uncorrected; described, not "
        "tested, and without a verdict: the effects are smaller than the margin of the scores."
    )
    return Table(f"{pair.id}-effects", "What SAT does in the two engines", head, rows, 2, note)


def _signs(*effects: Difference | None) -> str:
    """``+, 0``: the sign of each effect whose interval leaves one."""

    def sign(found: Difference | None) -> str:
        if found is None or found.low is None or found.high is None:
            return "?"
        return "+" if found.low > 0 else "−" if found.high < 0 else "0"

    return ", ".join(map(sign, effects))


def mechanics(pair: Pair) -> Table:
    """Staleness, clipping and SAT's numbers side by side."""
    names = [name for name in _MECHANICS if any(pair.values("verl", place, name) for place in pair.shared)]
    rows = []
    for place in pair.shared:
        row = [Shown(label(place.arm)), Shown(place.block.task), Shown(str(place.lag))]
        for name in names:
            sides = [list(pair.values(engine, place, name).values()) for engine in ("lab", "verl")]
            means = [float(np.mean(side)) if side else None for side in sides]
            lab, verl = means
            ratio = f"x {verl / lab:.2f}" if lab and verl is not None else ""
            row.append(Shown(f"{number(lab)} | {number(verl)}" if means != [None, None] else "–", ratio))
        rows.append(row)
    head = ["method", "task", "lag", *(_MECHANICS[name] for name in names)]
    note = "Laboratory | real stack, means over steps and seeds; small: the second over the first."
    return Table(f"{pair.id}-mechanics", "Staleness, clipping and radii of the two engines", head, rows, 2, note)


def radii(pair: Pair) -> Table:
    """The radii of the matched arms in both engines: each is matched to its own SAT."""
    rows = []
    for place in pair.shared:
        sides = [_radii(study, place) for study in (pair.lab, pair.verl)]
        if any(sides):
            rows.append([Shown(label(place.arm)), Shown(place.block.task), Shown(str(place.lag)),
                         *(Shown("; ".join(side) or "–") for side in sides)])  # fmt: skip
    head = ["method", "task", "lag", "lower / upper, lab", "lower / upper, verl"]
    return Table(f"{pair.id}-radii", "Matched radii of the two engines", head, rows, 2)


def _radii(study: Study | None, place: Where) -> list[str]:
    cells = study.cells_at(*place) if study else []
    found = [f"{number(cell.matched.low)} / {number(cell.matched.high)}" for cell in cells if cell.matched]
    return list(dict.fromkeys(found))


def overlays(pair: Pair) -> list[Plates]:
    """Learning curves, and d-bar over the steps, of both engines in one plot a place."""
    drawn: list[tuple[Literal["success", "d_bar"], str, str, str]] = [
        ("success", "Learning curves of the two engines", "score",
         "Held-out score: mean over the seeds that are there, band: 95 % interval of that engine's mean."),
        ("d_bar", "d-bar of the two engines, step by step", "d-bar",
         "Mean |log pi − log mu| of each step's tokens, mean over seeds, band: 95 % interval."),
    ]  # fmt: skip
    legends = [Legend(LAB.swatch, "laboratory"), Legend(VERL.swatch, "real stack")]
    found = []
    for name, title, y_name, caption in drawn:
        plots = [plot for place in pair.shared if (plot := _overlay(pair, place, name))]
        if plots:
            svgs = draw(plots, "optimizer step", y_name, score=name == "success")
            found.append(Plates(f"{pair.id}-{name}", title, svgs, caption, legends, folded=name == "d_bar"))
    return found


def _overlay(pair: Pair, place: Where, name: str) -> Plot | None:
    curves = []
    for study, engine, look in ((pair.lab, "laboratory", LAB), (pair.verl, "real stack", VERL)):
        points = _points(study, place, name)
        found = curve(engine, look, sorted(points.items()))
        curves += [found] if found else []
    title = f"{label(place.arm)}, {place.block.task}, lag {place.lag}"
    # d-bar grows with the lag many times over: one axis for each.
    axis = place.block.task if name == "success" else f"{place.block.task} {place.lag}"
    return Plot(axis, title, curves) if curves else None


def _points(study: Study | None, place: Where, name: str) -> dict[float, list[float]]:
    points: dict[float, list[float]] = {}
    for cell in study.cells_at(*place) if study else ():
        source = cell.evaluations if name == "success" else cell.series
        for x, y in zip(source.get("step", []), source.get(name, []), strict=True):
            if x is not None and y is not None:
                points.setdefault(x, []).append(y)
    return points


def finding(pair: Pair, labs: Sequence[Study]) -> Finding:
    """The card: a headline by the rule, and what it rests on."""
    if pair.verl is None:
        return Finding(TITLE, "Not run: no study of engine=verl is among the folders", "open")
    if pair.lab is None:
        return Finding(
            TITLE, "Not run: no laboratory study has the real stack's settings", "open", _why(pair.verl, labs)
        )
    if not pair.shared:
        return Finding(TITLE, "Not run: the engines have no done cell of a place in common", "open")
    judged, mean = pair.compared("auc"), pair.together()
    counts: Counter[str] = Counter(one.verdict for one in judged)
    texts = [f"{one.name[1]}, {one.name[0]}: {gap(one.found)}, {one.verdict}." for one in mean]
    parts = ", ".join(f"{number_} {name}" for name, number_ in counts.items())
    texts.append(
        f"AUC of the real stack minus the laboratory's, place by place: {parts}, of {counted(len(judged), 'place')}."
    )
    texts += [
        f"Differs: {label(one.name[0])}, {one.name[1]} at lag {one.name[2]}: {gap(one.found)}, p (Holm) "
        f"{p_text(one.adjusted)}." for one in judged if one.verdict == "differ"
    ]  # fmt: skip
    if pair.alone:
        texts.append(f"Of the real stack alone, the laboratory has no such arms: {joined(map(label, pair.alone))}.")
    headline, tone = _headline(counts, [one.verdict for one in mean])
    return Finding(TITLE, headline, tone, texts)


def _headline(counts: Counter[str], mean: Sequence[str]) -> tuple[str, Tone]:
    if counts["interim"] or counts["not run"]:
        return "Not answered: cells of one engine or of both are missing", "open"
    where = [f"in {counted(counts['differ'], 'place')}"] if counts["differ"] else []
    where += ["on average over the places"] if "differ" in mean else []
    if where:
        return f"No: the engines differ {joined(where)}", "no"
    if mean and set(mean) == {"agree"}:
        return f"Yes, on average over the places, within ±{MARGIN:g}; no place differs", "yes"
    return f"Undecided: no place differs, and the seeds cannot show agreement within ±{MARGIN:g}", "open"


def _why(verl: Study, labs: Sequence[Study]) -> list[str]:
    """What keeps each laboratory study from being the real stack's partner."""
    texts = []
    for lab in labs:
        unlike_ = [
            f"{name} {lab.settings.get(name)} (real stack: {verl.settings.get(name)})" for name in (*SAME, "overrides")
            if lab.settings.get(name) != verl.settings.get(name)
        ]  # fmt: skip
        texts.append(f"Study {lab.number} has {', '.join(unlike_)}.")
    return texts or ["No study of engine=lab is among the folders."]


@dataclass
class Section:
    """One pair, ready to be shown."""

    pair: Pair
    labs: list[Study]

    @property
    def commands(self) -> list[dict[str, object]]:
        return self.pair.commands

    @property
    def complete(self) -> bool:
        """Whether both engines have something to compare."""
        return bool(self.pair.shared)

    @property
    def name(self) -> str:
        lab, verl = self.pair.lab, self.pair.verl
        if lab and verl:
            return f"Study {lab.number} (laboratory) and study {verl.number} (real stack): {verl.name}"
        return f"Study {verl.number}: {verl.name}" if verl else ""

    @cached_property
    def finding(self) -> Finding:
        return finding(self.pair, self.labs)

    @cached_property
    def plates(self) -> list[Plates]:
        return overlays(self.pair)

    @cached_property
    def tables(self) -> list[Table]:
        made = (scores, effects, mechanics, radii) if self.complete else (scores,)
        return [table for make in made if (table := make(self.pair)).rows]

    @property
    def unlike(self) -> list[tuple[str, str, str]]:
        return unlike(self.pair) if self.pair.lab and self.pair.verl else []


def sections(studies: Sequence[Study]) -> list[Section]:
    """One for each pair of studies; never none."""
    labs = [study for study in studies if study.settings["engine"] == "lab"]
    return [Section(pair, labs) for pair in pairs(studies)]
