"""AIME 2024 and 2025: the answer key, the canonical order, and the faults of public copies.

Public copies differ in ids, order, spacing and figures. A row is recognised by its statement
(:mod:`eval.benchmarks.fingerprint`), so that a wrong answer shows as a wrong answer, whatever the row is called.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.benchmarks.fingerprint import hashes, likeness, numbers, other_numbers, without_figure, words
from eval.schema import Problem

KEYS: dict[str, dict[str, dict[str, Any]]] = json.loads(Path(__file__).with_name("contests.json").read_text())
"""By contest and problem id: the answer, and of the statement the number of words, the numbers and the fingerprint."""

YEARS = {"aime24": "2024", "aime25": "2025"}

RECOGNISED = 0.5
"""Copies of one statement have a likeness of 0.875 and more, statements of two problems one of 0.25 and less."""
SAME_WORDING = 0.8
EXTRA_WORDS = 8
"""Copies of one statement differ by up to four words."""

CONTAMINATED = (
    "MathArena reports strong signs that models have seen AIME 2024 in training: scores may be too high, and differ "
    "between models for that reason alone"
)

MISLABELLED = {("2024-I-12", "384"): "the known mislabelling of early public copies"}
LEAKING = {"2024-I-5", "2024-I-6", "2024-II-10"}
"""Early copies of Maxwell-Jia's set have text of the solution in these statements."""

_CONTEST_ID = re.compile(r"(?<!\d)(20\d\d)[-_/ ]*(?:AIME[-_/ ]*)?(II|I)(?:[-_/ ]|Problems|Problem)+(\d{1,2})(?!\d)")


@dataclass
class Checked:
    """A contest's problems, and what is wrong with them."""

    problems: list[Problem] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    """What changes scores."""
    notes: list[str] = field(default_factory=list)
    """What a reader of the scores should know."""


def of_year(rows: Sequence[dict[str, Any]], contest: str) -> list[dict[str, Any]]:
    """The rows of the contest's year, where the rows name their year."""
    named = [row for row in rows if str(row.get("year", row.get("Year", YEARS[contest]))) == YEARS[contest]]
    return named or list(rows)


def check(contest: str, problems: Sequence[Problem]) -> Checked:
    """Recognise, order and check a contest's problems.

    Args:
        contest: ``aime24`` or ``aime25``.
        problems: as a source has them.

    Returns:
        The problems with canonical ids and in canonical order, each once, answers without padding; and what is wrong.
    """
    key, found = KEYS[contest], Checked()
    recognised: dict[str, Problem] = {}
    strangers: list[str] = []
    twice: list[str] = []
    for problem in problems:
        name = recognise(contest, problem)
        if name is None:
            strangers.append(problem.id)
        elif name in recognised:
            twice.append(name)
        else:
            recognised[name] = problem
    missing = [name for name in key if name not in recognised]
    for names, what in (
        (missing, "missing"),
        (sorted(set(twice), key=list(key).index), "there more than once"),
        (strangers, "no problem of this contest"),
    ):
        if names:
            found.faults.append(f"{_some(names)}: {what}")
    for name in key:
        if name in recognised:
            found.problems.append(_checked(contest, name, recognised[name], found))
    found.notes += [CONTAMINATED] if contest == "aime24" else []
    return found


def recognise(contest: str, problem: Problem) -> str | None:
    """The canonical id of a problem: by its statement, else by an id such as ``2024-I-4``, else not at all."""
    theirs = hashes(problem.statement)
    by_likeness = {name: likeness(entry["fingerprint"], theirs) for name, entry in KEYS[contest].items()}
    best = max(by_likeness, key=by_likeness.__getitem__)
    if by_likeness[best] >= RECOGNISED:
        return best
    match = _CONTEST_ID.search(problem.id)
    name = f"{match[1]}-{match[2]}-{int(match[3])}" if match else ""
    return name if name in KEYS[contest] else None


def _checked(contest: str, name: str, problem: Problem, found: Checked) -> Problem:
    entry, answer = KEYS[contest][name], _integer(problem.gold)
    if answer is None or answer > 999:
        found.faults.append(f"{name}: its answer {problem.gold!r} is no integer from 0 to 999")
    elif answer != entry["answer"]:
        known = MISLABELLED.get((name, str(answer)))
        found.faults.append(
            f"{name}: its answer is {answer}, correct is {entry['answer']}{f' ({known})' if known else ''}"
        )
    _check_statement(name, entry, problem.statement, found)
    gold = problem.gold if answer is None else str(answer)
    return problem.model_copy(update={"id": name, "gold": gold})


def _check_statement(name: str, entry: dict[str, Any], statement: str, found: Checked) -> None:
    extra = len(words(statement)) - entry["words"]
    alike = likeness(entry["fingerprint"], hashes(statement))
    answered = _gives_away(statement, entry["answer"]) and name != "2025-I-14"  # an angle there has 60 degrees
    if answered or extra > EXTRA_WORDS:
        how = "its statement gives the answer away" if answered else f"its statement has {extra} words too many"
        known = " (known of early public copies, which hold text of the solution)" if name in LEAKING else ""
        found.faults.append(f"{name}: {how}{known}")
    elif alike < RECOGNISED or extra < -EXTRA_WORDS:
        found.faults.append(f"{name}: its statement is not the contest's")
    elif changed := other_numbers(entry["numbers"].split(), numbers(statement)):
        found.faults.append(f"{name}: its statement has other numbers than the contest's ({changed})")
    elif alike < SAME_WORDING:
        found.notes.append(f"{name}: the wording differs from that of the usual copies")
    if name == "2025-I-14" and "ZBA" in statement:
        found.faults.append(f"{name}: its statement names an angle ZBA, where the contest's gives the angles B and E")
    if name == "2025-II-15" and not re.search(r">\s*0|positive real (?:numbers?|x|\$x|values of \$?x)", statement):
        found.notes.append(f"{name}: its statement does not restrict x to positive numbers, as the contest's does")


def _gives_away(statement: str, answer: int) -> bool:
    """No statement of AIME 2024 or 2025 holds its own answer (but for one), so one that does is not clean."""
    text = without_figure(statement)
    return "\\boxed" in text or re.search(rf"(?<![\d.,])0*{answer}(?![\d]|[.,]\d)", text) is not None


def _integer(gold: str | list[str]) -> int | None:
    match = re.fullmatch(r"\$?\s*(\d+)(?:\.0*)?\s*\$?", gold) if isinstance(gold, str) else None
    return int(match[1]) if match else None


def _some(names: Sequence[str], most: int = 6) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest
