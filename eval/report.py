"""``report.html``: one page with everything about a run, made of HTML, CSS and SVG alone.

It holds no script and asks for nothing outside itself, and its content security policy forbids both; model text is
escaped by the template engine. Details of a sample open in popovers, which browsers provide without script.
"""

from __future__ import annotations

import functools
import html
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from eval import wording
from eval.charts import histogram
from eval.schema import POLICIES, STATUSES, Benchmark, Policy, ProblemResult, Results, Sample, Status
from eval.storage import REPORT_FILE, write_atomically
from eval.text import visible

RESPONSE_CHARACTERS = 4000
"""Of each response, so much is shown: the beginning and, as the answer stands there, a larger part of the end."""
TEXT_BYTES = 20_000_000
"""Bound on all stored texts of a page together."""
_SHORTEST_RESPONSE = 400
_SETTING_CHARACTERS = 3000
_DETAILS_BYTES = 1500  # what the page needs for one sample beside its texts
_HEAD_SHARE = 0.35


@dataclass(frozen=True)
class Clipped:
    """The beginning and the end of a text, and the number of characters left out between them."""

    head: str
    left_out: int = 0
    tail: str = ""


def clip(text: str, limit: int) -> Clipped:
    """Shorten a text to ``limit`` characters, taken from both ends."""
    if len(text) <= limit:
        return Clipped(text)
    head = int(limit * _HEAD_SHARE)
    tail = limit - head
    return Clipped(text[:head], len(text) - limit, text[-tail:])


@dataclass(frozen=True)
class Cell:
    """One square of the heat map."""

    number: int
    status: Status | None
    tooltip: str
    details: str
    """Id of the element with the details; empty where the page has none."""


@dataclass(frozen=True)
class Row:
    """One problem in the heat map of one policy."""

    index: int
    problem: ProblemResult
    cells: list[Cell]
    average: float | None
    classes: str
    """By these words the page filters the rows."""


@dataclass
class Stored:
    """The samples whose texts fit on the page, and how many do not."""

    texts: dict[tuple[str, int], Clipped] = field(default_factory=dict)
    limit: int = RESPONSE_CHARACTERS
    skipped: int = 0


def _stored(samples: Mapping[tuple[str, int], Sample], order: list[tuple[str, int]]) -> Stored:
    """Shorten the responses so that as many as possible fit; those after the bound is reached are skipped."""
    present = [place for place in order if place in samples]
    each = TEXT_BYTES // max(len(present), 1) - _DETAILS_BYTES
    stored = Stored(limit=min(RESPONSE_CHARACTERS, max(_SHORTEST_RESPONSE, each)))
    room = TEXT_BYTES
    for place in present:
        text = clip(samples[place].response or samples[place].error, stored.limit)
        room -= len(html.escape(text.head + text.tail).encode(errors="replace")) + _DETAILS_BYTES
        if room < 0:
            stored.skipped += 1
        else:
            stored.texts[place] = text
    return stored


def _tooltip(problem: ProblemResult, number: int, policy: Policy, sample: Sample | None) -> str:
    status = problem.statuses[policy][number]
    if status is None:
        return f"{problem.id}, sample {number}: not there yet"
    answer, length = problem.answers[policy][number], problem.lengths[number]
    parts = [f"{problem.id}, sample {number}: {wording.STATUS_WORDS[status]}"]
    parts += [f"answer {clip(answer, 100).head}"] if answer is not None else []
    parts += [f"{wording.tokens(length)} tokens"] if length is not None else []
    if sample is not None:
        parts += ["cut at the limit"] if sample.finish_reason == "length" else []
        parts.append(f"seed {sample.seed}")
    return "; ".join(parts)


def _classes(statuses: list[Status | None]) -> str:
    """Words for the filter: how often the problem was solved, and whether a sample had no usable answer."""
    right, there = statuses.count("correct"), len(statuses) - statuses.count(None)
    outcome = "none" if not there else "never" if not right else "always" if right == there else "mixed"
    return outcome + (" unusable" if set(statuses) - {"correct", "wrong", None} else "")


def _rows(results: Results, policy: Policy, samples: Mapping[tuple[str, int], Sample], stored: Stored) -> Iterator[Row]:
    for index, problem in enumerate(results.problems):
        cells = [
            Cell(
                number,
                status,
                _tooltip(problem, number, policy, samples.get((problem.id, number))),
                f"r{index}-{number}" if (problem.id, number) in stored.texts else "",
            )
            for number, status in enumerate(problem.statuses[policy])
        ]
        yield Row(index, problem, cells, problem.average[policy], _classes(problem.statuses[policy]))


def _chunks(rows: list[Row]) -> list[list[Row]]:
    """Blocks that stand side by side where the window is wide."""
    size = 15 if len(rows) <= 60 else 25
    return [rows[start : start + size] for start in range(0, len(rows), size)]


def _is_cut(problem: ProblemResult, number: int, samples: Mapping[tuple[str, int], Sample]) -> bool:
    """Whether the length limit ended a response; without the sample, only cut ones without an answer are known."""
    sample = samples.get((problem.id, number))
    return problem.statuses["strict"][number] == "truncated" if sample is None else sample.finish_reason == "length"


@functools.cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).with_name("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _settings(results: Results) -> dict[str, list[tuple[str, Clipped]]]:
    provenance = {name: value for name, value in results.provenance.items() if name != "command"}
    groups = {
        "What the samples depend on": wording.flat(results.key),
        "Grader": wording.flat(results.grader),
        "Versions and origin": wording.flat(provenance),
        "Time": list(wording.timings(results.timing).items()),
    }
    return {
        title: [(name, clip(text, _SETTING_CHARACTERS)) for name, text in rows]
        for title, rows in groups.items()
        if rows
    }


def _command(results: Results) -> str:
    command = results.provenance.get("command", "")
    return shlex.join(map(str, command)) if isinstance(command, list) else str(command)


def render(
    results: Results, samples: Mapping[tuple[str, int], Sample] | None = None, benchmark: Benchmark | None = None
) -> str:
    """The page as text; see :func:`write_html`."""
    samples = samples or {}
    order = [(problem.id, number) for problem in results.problems for number in range(results.n)]
    stored = _stored(samples, order)
    lengths = [
        (length, _is_cut(problem, number, samples))
        for problem in results.problems
        for number, length in enumerate(problem.lengths)
        if length is not None
    ]
    rows = {policy: list(_rows(results, policy, samples, stored)) for policy in POLICIES}
    solved = {
        policy: histogram([(row.problem.statuses[policy].count("correct"), False) for row in rows[policy]], results.n)
        for policy in POLICIES
    }
    statements = (
        {problem.id: clip(problem.statement, RESPONSE_CHARACTERS) for problem in benchmark.problems}
        if (benchmark)
        else {}
    )
    page = (
        _environment()
        .get_template("report.html.j2")
        .render(
            results=results,
            words=wording,
            policies=POLICIES,
            statuses=STATUSES,
            samples=samples,
            stored=stored,
            chunks={policy: _chunks(rows[policy]) for policy in POLICIES},
            name_px=min(200, max(84, 7 * max((len(problem.id) for problem in results.problems), default=0))),
            solved=solved,
            lengths=histogram(lengths),
            statements=statements,
            lineage=benchmark.lineage if benchmark else "",
            settings=_settings(results),
            command=_command(results),
            agree=all(problem.statuses["strict"] == problem.statuses["lenient"] for problem in results.problems),
        )
    )
    return visible(page)


def write_html(
    results: Results,
    folder: Path,
    samples: Mapping[tuple[str, int], Sample] | None = None,
    benchmark: Benchmark | None = None,
) -> Path:
    """Write the report of a run.

    Args:
        results: what it shows.
        folder: where it goes, under the name ``report.html``.
        samples: by problem and number; with them a click on a square shows the response. Long responses are shortened,
            and texts beyond 20 MB in all are left out with a note.
        benchmark: with it a click on a problem shows its statement.

    Returns:
        The path of the page.
    """
    path = folder / REPORT_FILE
    write_atomically(path, render(results, samples, benchmark))
    return path
