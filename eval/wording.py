"""Words and number formats that the report and the terminal table share."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from eval.schema import Interval, Policy, Results, Score, Status, Verdict

STATUS_WORDS: dict[Status, str] = {
    "correct": "correct",
    "wrong": "wrong",
    "no_answer": "no answer",
    "truncated": "cut before an answer",
    "request_error": "request failed",
    "grader_error": "could not be graded",
}
STATUS_GLYPHS: dict[Status, str] = {
    "correct": "✓",
    "wrong": "✗",
    "no_answer": "∅",
    "truncated": "T",
    "request_error": "!",
    "grader_error": "?",
}
POLICY_WORDS: dict[Policy, str] = {
    "strict": "credits a box, an answer tag or a clean closing answer line",
    "lenient": "also reads answers from prose, damaged boxes and unfinished reasoning",
}


@dataclass(frozen=True)
class IntervalWords:
    """What an interval covers, in few and in more words, and why there may be none."""

    title: str
    meaning: str
    absent: str


INTERVALS: dict[str, IntervalWords] = {
    "sampling": IntervalWords(
        "Noise of sampling, on these very problems",
        "how far the score would move if the same model answered the same {problems} with other seeds",
        "this noise shows only where a problem has two samples",
    ),
    "population": IntervalWords(
        "A population of such problems",
        "the score to be expected on all problems of this kind, if these {problems} are a random draw of them",
        "it takes two problems to see how they differ",
    ),
    "bootstrap": IntervalWords(
        "The same population, by resampling problems",
        "as above, without assuming a normal distribution",
        "all problems have the same score, or there are none: resampling them shows nothing",
    ),
}
"""By field of :class:`~eval.schema.Score`."""


def percent(share: float | None) -> str:
    """A share as a percentage with one decimal; a dash where there is none."""
    return "–" if share is None else f"{100 * share:.1f}%"


def span(low: float, high: float) -> str:
    """Two shares as a range of percentages."""
    return f"{100 * low:.1f} to {100 * high:.1f}%"


def method(interval: Interval) -> str:
    """How an interval was made, with its standard error and degrees of freedom where it has them."""
    parts = [interval.method]
    if interval.standard_error is not None:
        parts.append(f"standard error {percent(interval.standard_error)}")
    if interval.degrees_of_freedom is not None:
        parts.append(f"{interval.degrees_of_freedom:g} degrees of freedom")
    return ", ".join(parts)


def how(verdict: Verdict) -> str:
    """Where the grader found an answer, what compared it, and the reason it gives."""
    parts = [f"found in {verdict.source}"] if verdict.source != "none" else []
    parts += [f"compared by {verdict.method}"] if verdict.method != "none" else []
    parts += [verdict.detail] if verdict.detail else []
    return ", ".join(parts).replace("_", " ")


def tokens(number: float | None) -> str:
    """A token count with thousands separators; a dash where there is none."""
    return "–" if number is None else f"{number:,.0f}"


def counted(number: int, noun: str) -> str:
    """``1 problem``, ``30 problems``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def duration(seconds: float) -> str:
    """Seconds in the units that a person would choose."""
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


_COUNTS = ("samples", "tokens_per_second")  # of the timing; all else are seconds


def timings(values: Mapping[str, float]) -> dict[str, str]:
    """The ``timing`` of the results, ready to print."""
    return {
        name.replace("_", " "): f"{value:,.0f}" if name in _COUNTS else duration(value)
        for name, value in values.items()
    }


def excluded(score: Score) -> int:
    """Samples that no mean counts, because nobody knows whether they are right."""
    return score.counts.get("request_error", 0) + score.counts.get("grader_error", 0)


def shown_ks(results: Results) -> list[int]:
    """The k of pass@k and maj@k worth a row: all of a few, else powers of two and the largest."""
    ks = sorted({k for score in results.scores.values() for k in (*score.pass_at, *score.majority_at)})
    return ks if len(ks) <= 8 else [k for k in ks if k & (k - 1) == 0 or k == ks[-1]]


def gold_text(gold: str | Iterable[str]) -> str:
    """The acceptable answers in one line."""
    return gold if isinstance(gold, str) else " or ".join(gold)


def flat(settings: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    """Nested settings as rows of a dotted name and a text."""
    rows: list[tuple[str, str]] = []
    for name, value in settings.items():
        if isinstance(value, Mapping) and value:
            rows += flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            rows.append((f"{prefix}{name}", ", ".join(map(str, value)) or "none"))
        else:
            rows.append((f"{prefix}{name}", "none" if value is None or value == {} else str(value)))
    return rows
