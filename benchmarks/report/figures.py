"""What is drawn of a study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from benchmarks.lag_sweep.matched import SUFFIX
from benchmarks.report.drawing import Bar, Curve, Look, forest, lines, scatter, span_of
from benchmarks.report.estimates import Difference, estimate
from benchmarks.report.protocol import MATTERS, QUESTIONS, Family, Name, Test
from benchmarks.report.studies import Block, Group, Study, label


@dataclass(frozen=True)
class Legend:
    """An entry: its line as SVG, and the name."""

    swatch: str
    name: str


@dataclass(frozen=True)
class Plates:
    """Plots that stand together under one caption."""

    id: str
    title: str
    plots: list[str]
    caption: str
    legends: list[Legend] = field(default_factory=list)
    folded: bool = False


BASE, SAT, MATCHED = Look(0, 0, 0), Look(1, 0, 1), Look(2, 1, 2)


def looks(group: Group) -> dict[str, Look]:
    """The trio looks the same everywhere; other arms take the rest of the colours in turn."""
    found, others = {}, 0
    for arm in group.arms:
        if group.name != "other arms" or arm == "grpo":
            found[arm] = SAT if arm.startswith("sat_") else MATCHED if arm.endswith(SUFFIX) else BASE
        else:
            found[arm] = Look(3 + others % 5, others % 4, 3 + others % 5)
            others += 1
    return found


def curve(arm: str, look: Look, points: Sequence[tuple[float, Sequence[float]]], *, dots: bool = False) -> Curve | None:
    """Means with bands of (x, values over seeds); ``dots``: the values, too."""
    known = [(x, one) for x, values in points if (one := estimate(values)) is not None]
    if not known:
        return None
    means = [one for _, one in known]
    single = [(x, value) for x, values in points for value in values] if dots else []
    return Curve(label(arm), look, [x for x, _ in known], [one.mean for one in means], [one.low for one in means],
                 [one.high for one in means], single)  # fmt: skip


class Plot(NamedTuple):
    """Curves of one plot, before its axes are known."""

    task: str
    title: str
    curves: list[Curve]
    ticks: list[int] | None = None


def draw(plots: Sequence[Plot], x_name: str, y_name: str, *, log: bool = False, score: bool = False) -> list[str]:
    """Plots whose y axis is one for each task, so that they can be compared; ``score``: what is drawn is a share."""
    bounds = (0.0, 1.0) if score else ()
    tasks = {plot.task for plot in plots}
    spans = {
        task: span_of((one for plot in plots if plot.task == task for one in plot.curves), *bounds) for task in tasks
    }
    return [
        lines(plot.curves, title=plot.title, x_name=x_name, y_name=y_name, ticks=plot.ticks, log=log,
              marks=plot.ticks is not None, span=None if log else spans[plot.task])
        for plot in plots
    ]  # fmt: skip


def _legends(study: Study, plots: Sequence[Plot]) -> list[Legend]:
    """What each line of the plots is. The trio is named by its roles."""
    shown = {one.name for plot in plots for one in plot.curves}
    groups = [group for block in study.blocks for group in study.groups(block)]
    found: dict[str, str] = {}
    for group in groups:
        for arm, look in looks(group).items():
            if label(arm) not in shown:
                continue
            roles = {BASE: "base loss", SAT: "SAT", MATCHED: "base loss, fixed at SAT's radius"}
            name = roles.get(look, label(arm)) if group.name != "other arms" or arm == "grpo" else label(arm)
            found.setdefault(name, look.swatch)
    return [Legend(swatch, name) for name, swatch in found.items()]


def _by_lag(study: Study, metric: str, *, log: bool = False, dots: bool = False) -> list[Plot]:
    plots = []
    for block in study.blocks:
        for group in study.groups(block):
            curves = []
            for arm, look in looks(group).items():
                points = [(lag, list(study.values(block, arm, lag, metric).values())) for lag in study.lags(block)]
                if log:
                    points = [(lag, values) for lag, values in points if not values or np.mean(values) > 0]
                found = curve(arm, look, points, dots=dots)
                curves += [found] if found else []
            if curves:
                plots.append(Plot(block.task, f"{group.name}, {_short(study, block)}", curves, study.lags(block)))
    return plots


def _short(study: Study, block: Block) -> str:
    rates = {other.lr for other in study.blocks if other.task == block.task}
    return block.task + (f", rate {block.lr:g}" if len(rates) > 1 else "")


def score_by_lag(study: Study) -> Plates:
    """Final score over the lags."""
    plots = _by_lag(study, "final", dots=True)
    return Plates(f"curves-{study.number}", "Final score over lag", draw(plots, "lag", "final score", score=True),
                  "Mean over the seeds that are there, band: 95 % interval (one seed: an open mark), dots: seeds. The "
                  "lags stand at equal distances; one axis for each task.", _legends(study, plots))  # fmt: skip


def mechanism(study: Study) -> list[Plates]:
    """d-bar, effective radius and intercepted share over the lags."""
    drawn = [
        ("d_bar", "d-bar", "d-bar over lag", False, "Mean over the steps and seeds of the mean |log pi − log mu|."),
        ("eps_eff_high", "upper eps_eff", "SAT's effective radius over lag", True,
         "The fixed radius with which PPO would have SAT's gradient, mean over the steps and seeds. Logarithmic."),
        ("intercepted", "intercepted share", "What SAT intercepts, over lag", False,
         "Share of the active tokens whose gradient SAT removes where the base loss keeps it."),
    ]  # fmt: skip
    plates = []
    for metric, y_name, title, log, caption in drawn:
        plots = _by_lag(study, metric, log=log)
        plates += [
            Plates(f"{metric}-{study.number}", title, draw(plots, "lag", y_name, log=log), caption,
                   _legends(study, plots))
        ] if plots else []  # fmt: skip
    return plates


def learning(study: Study) -> Plates:
    """Held-out score over the steps, one plot a task, group and lag."""
    plots: list[Plot] = []
    cells: dict[tuple[Block, str, int], list[dict[str, list[float]]]] = {}
    for cell in study.cells:
        cells.setdefault((Block(cell.task, cell.lr), cell.arm, cell.lag), []).append(cell.evaluations)
    for block in study.blocks:
        for group in study.groups(block):
            for lag in study.lags(block):
                curves = []
                for arm, look in looks(group).items():
                    points: dict[float, list[float]] = {}
                    for run in cells.get((block, arm, lag), []):
                        for step, score in zip(run.get("step", []), run.get("success", []), strict=True):
                            points.setdefault(step, []).append(score)
                    found = curve(arm, look, sorted(points.items()))
                    curves += [found] if found else []
                if curves:
                    plots.append(Plot(block.task, f"{group.name}, {_short(study, block)}, lag {lag}", curves))
    return Plates(f"learning-{study.number}", "Learning curves", draw(plots, "optimizer step", "score", score=True),
                  "Held-out score over the optimizer steps: mean over the seeds that are there, band: 95 % interval.",
                  _legends(study, plots), folded=len(plots) > 12)  # fmt: skip


def throughput(study: Study) -> Plates | None:
    """Speed against score; None but for the real stack: the laboratory has no asynchronous machinery to be fast."""
    if study.settings["engine"] != "verl":
        return None
    drawn = []
    for block in study.blocks:
        for group in study.groups(block):
            curves = []
            for arm, look in looks(group).items():
                found = [
                    (lag, np.mean(list(speed.values())), np.mean(list(study.values(block, arm, lag).values())))
                    for lag in study.lags(block)
                    if (speed := study.values(block, arm, lag, "samples_per_s"))
                ]
                if found:
                    lags, xs, ys = zip(*found, strict=True)
                    curves.append(Curve(label(arm), look, xs, ys, lags, lags))
            if curves:
                drawn.append(Plot(block.task, f"{group.name}, {_short(study, block)}", curves))
    plots = [scatter(one.curves, title=one.title, x_name="samples/s", y_name="final score") for one in drawn]
    return Plates(f"speed-{study.number}", "Throughput against score", plots,
                  "Means over seeds; the number at a mark is its lag.", _legends(study, drawn))  # fmt: skip


def _bar(test: Test, many: bool) -> Bar | None:
    if test.found is None:
        return None
    rate = f", {test.block.lr:g}" if many else ""
    look = Look(0 if test.base.startswith("grpo") else 1, 0, 0 if test.base.startswith("grpo") else 1)
    n = "" if test.answered and not test.failed else f" (n {test.found.n})"
    return Bar(f"{test.block.task}{rate}, lag {test.lag}{n}", look, test.found.mean, test.found.low, test.found.high,
               faint=not test.answered)  # fmt: skip


FEW = 5
"""The interval of fewer interim seeds does not set the axis: of two it is 13 standard errors wide on each side."""


def _ends(found: Difference, answered: bool) -> tuple[float | None, ...]:
    """What of a difference the axis must hold."""
    return (found.mean, found.low, found.high) if answered or found.n >= FEW else (found.mean,)


def differences(study: Study, family: Family) -> Plates | None:
    """The differences of a family with their intervals; None while there is none."""
    blocks = {test.block for test in family.tests}
    many = len(blocks) > len({block.task for block in blocks})
    rows = {base: [bar for test in family.of(base) if (bar := _bar(test, many)) is not None] for base in family.bases}
    ends = [end for test in family.tests if test.found for end in _ends(test.found, test.answered) if end is not None]
    plots = []
    for base, bars in rows.items():
        if bars:
            title = label(base) if family.name == "H3" else label(f"sat_{base}")
            plots.append(forest(bars, title=title, x_name="difference of the final score", matters=MATTERS, span=ends))
    name: Name = family.name
    caption = (
        "Mean difference over common seeds and its uncorrected 95 % interval. Shaded: differences that do not matter "
        f"(±{MATTERS:g}). Faint with an open mark: interim, seeds are missing; with fewer than {FEW} its interval may "
        "run out of the plot."
    )
    return Plates(f"forest-{name}-{study.number}", f"{name}: {QUESTIONS[name]}", plots, caption) if plots else None
