"""The results as a table on the terminal, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from eval import wording
from eval.schema import POLICIES, STATUSES, Results

_TERMINAL_INTERVALS = {
    "sampling": "  noise of sampling, on these problems",
    "population": "  a population of such problems",
    "bootstrap": "  the same, by resampling problems",
}


def _score_rows(results: Results) -> Iterator[tuple[str, ...]]:
    scores = [results.scores[policy] for policy in POLICIES]
    yield (f"avg@{results.n}", *(wording.percent(score.average) for score in scores))
    for name, label in _TERMINAL_INTERVALS.items():
        found = [getattr(score, name) for score in scores]
        yield (label, *("–" if one is None else wording.span(one.low, one.high) for one in found))
    if any(map(wording.excluded, scores)):
        yield ("  excluded samples all wrong, all correct", *(wording.span(*score.bounds) for score in scores))


def _subset_rows(results: Results) -> Iterator[tuple[str, ...]]:
    """pass@1 and maj@1 are the average again."""
    scores = [results.scores[policy] for policy in POLICIES]
    sizes = [k for k in wording.shown_ks(results) if k > 1]
    for k in sizes:
        yield (f"pass@{k}", *(wording.percent(score.pass_at.get(k)) for score in scores))
    for k in sizes:
        yield (f"maj@{k}", *(wording.percent(score.majority_at.get(k)) for score in scores))


def _status_rows(results: Results) -> Iterator[tuple[str, ...]]:
    """Statuses that occur, as shares of the samples received."""
    for status in STATUSES:
        counts = [results.scores[policy].counts.get(status, 0) for policy in POLICIES]
        if any(counts):
            shares = (f"{count:,} ({wording.percent(count / results.received)})" for count in counts)
            yield (wording.STATUS_WORDS[status], *shares)


def _facts(results: Results) -> Iterator[str]:
    lengths = results.lengths
    if lengths:
        yield (
            f"response tokens: mean {wording.tokens(lengths.mean)}, median {wording.tokens(lengths.median)}, "
            f"90% up to {wording.tokens(lengths.p90)}, longest {wording.tokens(lengths.maximum)}"
        )
    cut = f"{wording.percent(results.truncated_rate)} of the responses cut at the limit"
    yield f"{cut}; {wording.counted(results.duplicates, 'repeated text')}"
    for reason, count in results.errors.items():
        yield f"{wording.counted(count, 'sample')}: {reason}"
    if results.timing:
        yield ", ".join(f"{name} {value}" for name, value in wording.timings(results.timing).items())


def print_table(results: Results, console: Console) -> None:
    """Print the scores of both policies with their intervals, rates, lengths and warnings.

    Args:
        results: what to print.
        console: where to; the table fits 80 columns.
    """
    console.print()
    console.print(Text(f"{results.benchmark}: {results.model}", style="bold", overflow="fold"))
    there = f"{results.received:,} of {results.expected:,} samples"
    if results.complete:
        console.print(f"{wording.counted(len(results.problems), 'problem')} x {results.n}, {there}", highlight=False)
    else:
        console.print(Text(f" INCOMPLETE: {there}; these scores cannot be compared ", style="bold white on red"))
    for warning in results.warnings:
        console.print(f"[yellow]warning:[/] {escape(warning)}", highlight=False)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), title_justify="left")
    table.add_column("")
    for policy in POLICIES:
        table.add_column(policy, justify="right", no_wrap=True)
    for rows in (_score_rows(results), _subset_rows(results), _status_rows(results)):
        for row in rows:
            table.add_row(*row, style="bold" if row[0].startswith("avg@") else "")
        table.add_section()
    console.print(table)
    for fact in _facts(results):
        console.print(Text(fact), highlight=False)
    bounded = any(map(wording.excluded, results.scores.values()))
    note = "Ranges are 95% intervals" + (", those of the excluded samples bounds." if bounded else ".")
    console.print(Text(note, style="dim"))
