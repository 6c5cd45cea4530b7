"""Comparisons on the terminal."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from eval.comparison import Comparison, Comparisons
from eval.schema import Interval

SHOWN_PROBLEMS = 15
SIGNIFICANT = 0.05


def _points(value: float | None) -> str:
    """A difference of shares in percentage points; no minus in front of a zero."""
    return "–" if value is None else f"{round(100 * value, 1) + 0.0:+.1f}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}%"


def _span(interval: Interval | None) -> str:
    return "–" if interval is None else f"{_points(interval.low)} to {_points(interval.high)}"


def _p(value: float, equals: str = "") -> str:
    return "< 0.0001" if value < 1e-4 else equals + (f"{value:.4f}" if value < 0.01 else f"{value:.3f}")


def conclusion(found: Comparison, first: str) -> str:
    """What a comparison shows, in one sentence."""
    mean, seen = found.difference.mean, found.difference.detectable
    if found.p_holm < SIGNIFICANT:
        than = f"{'better' if mean > 0 else 'worse'} than {first}"
        return f"{found.name} is {than}: {_points(mean)} points, p {_p(found.p_holm, '= ')}"
    start = f"{found.name} against {first}: no difference shown"
    if seen is None:
        return f"{start}; all problems agree in it: their spread does not tell how small a difference would have shown"
    problems = found.difference.problems
    return (
        f"{start}; a true one under {100 * seen:.1f} points had less than an 80% chance with these {problems} problems"
    )


def _rows(found: Comparison, first: str, several: int) -> list[tuple[str, str]]:
    one = found.difference
    equal = one.problems - one.better - one.worse
    rows = [
        (f"average of {first}", _share(found.first)),
        (f"average of {found.name}", _share(found.other)),
        ("difference, in points", _points(one.mean)),
        ("  noise of sampling, on these problems", _span(one.sampling)),
        ("  a population of such problems (t)", _span(one.population)),
        ("  the same, by resampling problems", _span(one.bootstrap)),
        (f"p of no difference (sign flips, {one.p_method})", _p(one.p)),
    ]
    if several > 1:
        rows.append((f"p adjusted for {several} comparisons (Holm)", _p(found.p_holm)))
    rows += [
        ("detectable with 80% power, in points", "–" if one.detectable is None else f"{100 * one.detectable:.1f}"),
        ("problems better, equal, worse", f"{one.better}, {equal}, {one.worse}"),
    ]
    if found.excluded:
        low, high = map(_points, found.bounds)
        rows.append((f"whatever the {found.excluded} excluded samples are", f"{low} to {high}"))
    return rows


def _print_problems(found: Comparison, first: str, console: Console) -> None:
    """The problems that differ most."""
    differing = [problem for problem in found.problems if problem.difference]
    differing.sort(key=lambda problem: -abs(problem.difference or 0.0))
    shown = differing[:SHOWN_PROBLEMS]
    if not shown:
        return
    count = f"the {len(shown)} largest of {len(differing)}" if len(shown) < len(differing) else f"all {len(shown)}"
    console.print(f"problems that differ ({count}):", highlight=False)
    table = Table(box=box.SIMPLE_HEAD)
    for column in ("problem", first, found.name, "points"):
        table.add_column(escape(column), justify="left" if column == "problem" else "right")
    for problem in shown:
        numbers = (_share(problem.first), _share(problem.other), _points(problem.difference))
        table.add_row(escape(problem.id), *numbers)
    console.print(table)


def _title(found: Comparisons, name: str, model: str) -> str:
    folder = found.folders.get(name)
    return f"{name} = {model}" if folder is None else f"{name} = {folder} (model {model})"


def print_comparisons(found: Comparisons, console: Console) -> None:
    """Print every comparison with its intervals, the problems that differ most, and the warnings.

    Args:
        found: what to print.
        console: where to; it fits 80 columns.
    """
    for one in found.comparisons:
        console.print(Text(_title(found, one.name, one.model), style="bold", overflow="fold"))
        console.print(Text(f"against {_title(found, found.first, found.first_model)}", overflow="fold"))
        console.print(f"{found.benchmark}, {len(one.problems)} problems x {found.n}, {found.policy}", highlight=False)
        table = Table(box=box.SIMPLE, show_header=False)
        table.add_column()
        table.add_column(justify="right")
        for label, value in _rows(one, found.first, len(found.comparisons)):
            table.add_row(escape(label), value)
        console.print(table)
        _print_problems(one, found.first, console)
        console.print(Text(conclusion(one, found.first), style="bold"))
        console.print()
    for warning in found.warnings:
        console.print(Text(f"warning: {warning}", style="yellow"))
