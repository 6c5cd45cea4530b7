"""The tables, as text: the page and the markdown show the same cells."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from benchmarks.lag_sweep.store import Place
from benchmarks.report.answer import counted, interval, p_text
from benchmarks.report.estimates import Estimate, estimate
from benchmarks.report.protocol import QUESTIONS, Family, Test
from benchmarks.report.studies import Block, Study, label


class Shown(NamedTuple):
    """A cell of a table: the number, what stands small below it, and a class for its colour."""

    text: str
    small: str = ""
    tone: str = ""


@dataclass(frozen=True)
class Table:
    """``head``: names of the columns; the first ``names`` of them are names, the others numbers."""

    id: str
    title: str
    head: list[str]
    rows: list[list[Shown]]
    names: int = 1
    note: str = ""
    folded: bool = False


def score(value: float | None, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def number(value: float | None) -> str:
    """Three significant digits; a dash where there is none."""
    return "–" if value is None else f"{value:.3g}"


def with_spread(found: Estimate | None) -> str:
    """``0.846 ± 0.031``."""
    if found is None:
        return "–"
    return score(found.mean) + ("" if found.half_width is None else f" ± {found.half_width:.3f}")


def _plain(texts: Iterable[str]) -> list[Shown]:
    return [Shown(text) for text in texts]


def _marks(study: Study, block: Block, arm: str, lag: int) -> list[str]:
    """What a reader of this place's mean must know."""
    seeds = study.asked.get((block, arm, lag), [])
    states = Counter(study.status[Place(block.task, arm, block.lr, lag, seed)] for seed in seeds)
    here = study.cells_at(block, arm, lag)
    collapsed = sum(cell.metrics.get("collapse_step") is not None for cell in here)
    silent = sum(bool(cell.no_signal) for cell in here)
    marks = [f"{collapsed} collapsed"] if collapsed else []
    marks += [f"{silent} no signal"] if silent else []
    return marks + [f"{states[name]} {name}" for name in ("failed", "interrupted", "pending") if states[name]]


def scores(study: Study, block: Block) -> Table:
    """The main table of one task: method x lag."""
    lags = study.lags(block)
    rows = []
    for arm in study.arms(block):
        row = [Shown(label(arm), arm)]
        for lag in lags:
            asked = study.asked.get((block, arm, lag))
            if asked is None:
                row.append(Shown("", "not asked for", "muted"))
                continue
            found = estimate(list(study.values(block, arm, lag).values()))
            marks = _marks(study, block, arm, lag)
            count = f"n {found.n if found else 0}/{len(asked)}"
            parts = [f"IQM {score(found.iqm)}"] if found else []
            tone = "alert" if any("pending" not in mark for mark in marks) else ""
            row.append(Shown(with_spread(found), " · ".join([*parts, count, *marks]), tone))
        rows.append(row)
    note = (
        "Final score: mean ± half width of the 95 % interval over seeds; small: interquartile mean, n of those asked."
    )
    return Table(f"scores-{study.number}-{block.task}-{block.lr:g}", f"Final score, {block}",
                 ["method", *(f"lag {lag}" for lag in lags)], rows, note=note)  # fmt: skip


_TEST_HEAD = ["comparison", "task", "lag", "n", "difference [95 %]", "p", "p (Holm)", "p (Wilcoxon)", "P(improvement)",
              "seeds won", "verdict"]  # fmt: skip
_UNTESTED_HEAD = [name for name in _TEST_HEAD if name not in ("p (Holm)", "verdict")]
_TONES = {"better": "yes", "worse": "no", "not answered": "muted"}


def _sides(test: Test) -> str:
    """What is subtracted from what; with the lags where they differ."""
    same = test.first[1] == test.second[1]
    return " − ".join(label(arm) + ("" if same else f", lag {lag}") for arm, lag in (test.first, test.second))


def _test_row(test: Test, corrected: bool) -> list[Shown]:
    found = test.found
    due = (found.n if found else 0) + test.missing + test.failed
    count = f"{found.n if found else 0}/{due}" + (f" ({test.failed} failed)" if test.failed else "")
    names = [_sides(test), test.block.task, str(test.lag)]
    if found is None:
        numbers = ["–"] * 5
    else:
        p = [p_text(found.p), *([p_text(test.adjusted)] if corrected else []), p_text(found.wilcoxon)]
        numbers = [interval(found), *p, score(found.improvement, 2), f"{found.wins} : {found.losses}"]
    if found is None and corrected:
        numbers.append("–")
    verdict = [Shown(test.verdict, "", _TONES.get(test.verdict, ""))] if corrected else []
    return [*_plain([*names, count, *numbers]), *verdict]


def tests(study: Study, family: Family) -> Table:
    """One family, with verdicts if it is tested."""
    rest = len(family.tests) - family.answered
    note = f"{counted(len(family.tests), 'test')}, corrected together by Holm." + (
        f" {counted(rest, 'test')} not answered yet, counted as p = 1: their numbers are interim." if rest else ""
    )
    if not family.tested:
        note = "Described, not tested: too few seeds. 95 % intervals and p without correction, and no claim."
    rows = [_test_row(test, family.tested) for test in family.tests]
    head = _TEST_HEAD if family.tested else _UNTESTED_HEAD
    return Table(f"{family.name}-{study.number}", f"{family.name}: {QUESTIONS[family.name]}", head, rows, 2, note)


def further_tests(study: Study, found: Sequence[Test]) -> Table:
    """Everything outside the families; no correction and no verdict."""
    head = list(_UNTESTED_HEAD)
    head.insert(2, "rate")
    rows = []
    for test in found:
        row = _test_row(test, False)
        rows.append([*row[:2], Shown(f"{test.block.lr:g}"), *row[2:]])
    note = (
        "Each arm against its base, and SAT against its matched radius, where no family has it. Uncorrected: no claim."
    )
    return Table(f"further-{study.number}", "Further differences", head, rows, 2, note, folded=True)


_OUTCOMES = {"final": "final", "peak": "peak", "drop": "drop", "auc": "AUC", "initial": "initial"}
_COSTS = {"samples_per_s": "samples/s", "seconds": "seconds", "cpu_seconds": "CPU seconds"}
_MECHANICS = {
    "age": "age", "d_bar": "d-bar", "d_bar_end": "d-bar, end", "d_bar_spikes": "d-bar spikes", "kl": "KL", "ess": "ESS",
    "entropy_end": "entropy", "grad_norm_spikes": "gradient spikes", "clip": "clip", "dual_clip": "dual clip",
    "gate": "gate", "intercepted": "intercepted", "q": "q", "eps_eff_low": "eps_eff low",
    "eps_eff_high": "eps_eff high",
}  # fmt: skip


def _places(study: Study) -> list[tuple[Block, str, int]]:
    return [
        (block, arm, lag)
        for block in study.blocks for arm in study.arms(block) for lag in study.lags(block)
        if study.values(block, arm, lag)
    ]  # fmt: skip


def _names(block: Block, arm: str, lag: int) -> list[str]:
    return [label(arm), block.task, f"{block.lr:g}", str(lag)]


def _mean(study: Study, block: Block, arm: str, lag: int, metric: str) -> str:
    values = list(study.values(block, arm, lag, metric).values())
    return number(float(np.mean(values))) if values else "–"


def outcomes(study: Study) -> Table:
    """Every place: all score summaries, collapse, speed."""
    rows = []
    for block, arm, lag in _places(study):
        found = [estimate(list(study.values(block, arm, lag, name).values())) for name in _OUTCOMES]
        n = len(study.values(block, arm, lag))
        collapsed = len(study.values(block, arm, lag, "collapse_step"))
        costs = [_mean(study, block, arm, lag, name) for name in _COSTS]
        rows.append(_plain([*_names(block, arm, lag), str(n), *map(with_spread, found),
                            score(found[0].iqm if found[0] else None), f"{collapsed}/{n}", *costs]))  # fmt: skip
    head = ["method", "task", "rate", "lag", "n", *_OUTCOMES.values(), "final, IQM", "collapsed", *_COSTS.values()]
    return Table(f"outcomes-{study.number}", "Every outcome", head, rows, 2, folded=True,
                 note="Means over seeds ± half width of the 95 % interval; speed as means.")  # fmt: skip


def mechanics(study: Study) -> Table:
    """Every place: staleness, clipping, SAT's own numbers, as means over seeds."""
    metrics = [name for name in _MECHANICS if any(study.values(*place, name) for place in _places(study))]
    rows = [
        _plain([*_names(*place), *(_mean(study, *place, name) for name in metrics)]) for place in _places(study)
    ]  # fmt: skip
    head = ["method", "task", "rate", "lag", *(_MECHANICS[name] for name in metrics)]
    return Table(f"mechanics-{study.number}", "Staleness, clipping and radii", head, rows, 2, folded=True,
                 note="Means over the steps and seeds. A dash: the loss or the engine does not report it.")  # fmt: skip


def _seeds(seeds: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(seeds)))


def _gathered(found: Iterable[tuple[tuple[str, ...], int]]) -> list[list[Shown]]:
    """Rows of one text and the seeds that have it."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for names, seed in found:
        rows.setdefault(names, []).append(seed)
    return [_plain([*names[:-1], _seeds(seeds), names[-1]]) for names, seeds in rows.items()]


_MARK_HEAD = ["method", "task", "rate", "lag", "seeds"]


def _named(place: Place) -> tuple[str, ...]:
    return tuple(_names(Block(place.task, place.lr), place.arm, place.lag))


def missing(study: Study) -> Table:
    """Cells that are asked for and not done, by what they are, with the last line of an error."""
    errors = {cell.place: (cell.error or "").strip().splitlines()[-1:] for cell in study.sweep.cells}
    found = [
        ((*_named(place), ": ".join([state, *errors.get(place, [])])), place.seed)
        for place, state in study.status.items() if state != "done"
    ]  # fmt: skip
    total = Counter(state for state in study.status.values() if state != "done")
    note = ", ".join(f"{count:,} {state}" for state, count in total.items()) + f" of {len(study.status):,} cells."
    return Table(f"missing-{study.number}", "Cells that are not done", [*_MARK_HEAD, "state"], _gathered(found), 2,
                 note if found else "", folded=len(found) > 12)  # fmt: skip


def collapsed(study: Study) -> Table:
    """Cells that collapsed."""
    found = [
        ((*_named(cell.place), f"from step {step:g}"), cell.seed)
        for cell in study.cells
        if (step := cell.metrics.get("collapse_step")) is not None
    ]
    return Table(f"collapsed-{study.number}", "Collapsed cells", [*_MARK_HEAD, "collapsed"], _gathered(found), 2)


def silent(study: Study) -> Table:
    """Cells that say nothing of their method, and arms that are one run."""
    frame = study.done
    found = []
    for row in frame.itertuples():
        place = Place(row.task, row.arm, row.lr, row.lag, row.seed)
        # The share differs from cell to cell; the reason does not.
        reasons = [text.partition(": ")[2] if text.startswith("SAT intercepted") else text
                   for text in row.no_signal.split("; ") if text]  # fmt: skip
        found += [((*_named(place), f"no signal: {reason}"), row.seed) for reason in reasons]
        found += [((*_named(place), f"identical to {row.identical_to}"), row.seed)] if row.identical_to else []
    return Table(f"silent-{study.number}", "No signal, and identical arms", [*_MARK_HEAD, "why"], _gathered(found), 2)


def radii(study: Study) -> Table:
    """Where the radii of the matched arms come from."""
    found: dict[tuple[Block, str, int], Counter[tuple[float, float, int]]] = {}
    for cell in study.cells:
        if cell.matched:
            where = (Block(cell.task, cell.lr), cell.arm, cell.lag)
            found.setdefault(where, Counter())[cell.matched.low, cell.matched.high, len(cell.matched.keys)] += 1
    rows = [
        _plain([*_names(*where), number(low), number(high), str(cells), str(count)])
        for where, counts in found.items() for (low, high, cells), count in counts.items()
    ]  # fmt: skip
    head = ["method", "task", "rate", "lag", "lower", "upper", "mean over SAT cells", "n"]
    return Table(f"radii-{study.number}", "Radii of the matched arms", head, rows, 2, folded=True)
