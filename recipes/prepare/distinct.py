"""Each problem once: first by its text as it stands, row by row, then by its statement over all sets."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from eval.benchmarks import columns
from eval.benchmarks.columns import Columns
from eval.schema import Problem
from recipes.errors import ConfigError
from recipes.prepare.sets import Known, Row
from sat_verl.grading.grader import compare, gold_forms
from sat_verl.grading.verify import MathVerifyMissingError

_SPACE = re.compile(r"\s+")
_LOOSE = re.compile(r" ?([^\w ]) ?")
# Spaces around signs, but none after a full stop, and none before one that begins a decimal.
_STRICT = re.compile(r"(?:(?<!\.) )?([^\w .]) ?| (?=\.(?!\d))")
_DEADLINE_S = 2.0


def normalise(statement: str) -> str:
    """A statement without what copies of it differ in: spacing, letter case and the composition of characters.

    No sign is dropped, and no digit folded (``10²`` is not ``102``): what is equal afterwards asks the same.
    """
    text = _SPACE.sub(" ", unicodedata.normalize("NFC", statement).casefold()).strip()
    return _LOOSE.sub(r"\1", text)


def canonical(statement: str) -> str:
    """A statement without the spacing and the composition of characters that copies of it differ in.

    Unlike :func:`normalise` it keeps letter case (``N`` and ``n`` may both be there) and the space after a full stop
    (``1. 5`` is not ``1.5``): a wrong match would drop a good problem here.
    """
    text = _SPACE.sub(" ", unicodedata.normalize("NFC", statement)).strip()
    return _STRICT.sub(r"\1", text)


def same_answer(first: str | list[str], other: str | list[str]) -> bool:
    """Whether two gold answers are the same to the grader, form by form; what it cannot compare is not the same.

    Raises:
        ConfigError: it takes math-verify to say, and that is not installed.
    """
    if first == other:
        return True
    forms, others = gold_forms(first), gold_forms(other)
    try:
        equal = [[one == two or compare(one, two, _DEADLINE_S)[0] == "correct" for two in others] for one in forms]
    except MathVerifyMissingError as error:
        raise ConfigError("answer_column", repr([first, other])[:60], str(error), "pip install math-verify") from None
    return all(any(row) for row in equal) and all(any(column) for column in zip(*equal, strict=True))


@dataclass
class Distinct:
    """The different texts of a set.

    Attributes:
        problems: one per text, in the order of their first rows; without the set's wrapper.
        rows: rows that were read.
        wrapped: texts that had the wrapper.
        contradicted: places in ``problems`` of those whose rows have different answers.
    """

    problems: list[Problem] = field(default_factory=list)
    rows: int = 0
    wrapped: int = 0
    contradicted: list[int] = field(default_factory=list)


def collect(
    known: Known, batches: Iterable[list[Row]], where: Columns, progress: Callable[[int, int], None]
) -> Distinct:
    """Read rows, and keep each text once.

    Args:
        known: the set.
        batches: its rows.
        where: which columns hold what.
        progress: told rows read and different texts so far.

    Raises:
        ConfigError: no rows, a row without a statement or a usable answer, or no such column.
    """
    first: dict[str, Row] = {}
    answers: dict[str, dict[str, tuple[int, str, Any]]] = {}
    found = Distinct()
    for batch in batches:
        if not found.rows and batch:
            where = _located(known, batch, where)
        for row in batch:
            text = known.text(row, where)
            if text is None:
                raise ConfigError(
                    "problem_column", where.problem or "prompt", f"row {found.rows} of {known.name} has no statement",
                    "name the right column",
                )  # fmt: skip
            first.setdefault(text, row)
            column, value = _answer(row, where)
            as_text = json.dumps(value, sort_keys=True, default=str)
            answers.setdefault(text, {}).setdefault(as_text, (found.rows, column, value))
            found.rows += 1
        progress(found.rows, len(first))
    if not first:
        raise ConfigError("source", known.name, "it holds no rows", "give a copy with one row a problem")
    whole = columns.problems(list(first.values()), where, known.name, known.name)
    for place, (problem, variants) in enumerate(zip(whole, answers.values(), strict=True)):
        statement, wrapped = (
            known.wrapper.strip(problem.statement) if known.wrapper else (problem.statement.strip(), False)
        )
        found.wrapped += wrapped
        golds = (
            columns.gold_answer(value, column, f"row {row} of {known.name}")
            for row, column, value in list(variants.values())[1:]
        )
        if not all(same_answer(problem.gold, gold) for gold in golds):
            found.contradicted.append(place)
        found.problems.append(problem.model_copy(update={"statement": statement, "data_source": known.name}))
    return found


def _located(known: Known, batch: list[Row], where: Columns) -> Columns:
    """The columns by name, before the first row is taken."""
    if where.problem is None and columns.is_verl(batch[0]):
        return where
    problem = where.problem or next((name for name in columns.PROBLEMS if batch[0].get(name) not in (None, "")), None)
    if problem is None or problem not in batch[0]:
        raise ConfigError(
            "problem_column",
            where.problem or "",
            f"{known.name} has no such column",
            f"name one of {', '.join(batch[0])}",
        )
    return Columns(problem, where.answer, where.id)


def _answer(row: Row, where: Columns) -> tuple[str, Any]:
    """The answer as it stands, for comparison alone, and its column."""
    if where.answer is not None:
        return where.answer, row.get(where.answer)
    if isinstance(row.get("reward_model"), dict):
        return "reward_model.ground_truth", row["reward_model"].get("ground_truth")
    names = (name for name in columns.ANSWERS if name != where.problem and row.get(name) not in (None, ""))
    name = next(names, columns.ANSWERS[0])
    return name, row.get(name)


@dataclass
class Merged:
    """Problems of one set or more, each statement once.

    Attributes:
        problems: in order; of equal statements the first.
        repeated: pairs of ids, the one left out and the one kept.
        contradicted: ids of problems left out because copies of them have different answers.
    """

    problems: list[Problem] = field(default_factory=list)
    repeated: list[tuple[str, str]] = field(default_factory=list)
    contradicted: list[str] = field(default_factory=list)


def merge(sets: Iterable[Distinct], keep_contradicted: bool) -> Merged:
    """Each statement once, by its :func:`canonical` form, over all sets.

    Args:
        sets: in order of preference.
        keep_contradicted: keep the first of problems with the same statement and different answers; else drop them all.
    """
    groups: dict[str, list[Problem]] = {}
    doubtful: set[str] = set()  # by statement: ids need not be unique
    for found in sets:
        texts = [canonical(problem.statement) for problem in found.problems]
        for text, problem in zip(texts, found.problems, strict=True):
            groups.setdefault(text, []).append(problem)
        doubtful |= {texts[place] for place in found.contradicted}
    merged = Merged()
    for text, group in groups.items():
        if text in doubtful or not all(same_answer(group[0].gold, problem.gold) for problem in group[1:]):
            merged.contradicted += [name_of(problem) for problem in group]
            if not keep_contradicted:
                continue
        merged.problems.append(group[0])
        merged.repeated += [(name_of(problem), name_of(group[0])) for problem in group[1:]]
    return merged


def name_of(problem: Problem) -> str:
    """``SET:ID``, by which reports call a problem; a set may use an id twice."""
    return f"{problem.data_source}:{problem.id}"


def to_lines(problems: Iterable[Problem]) -> Iterator[str]:
    """One JSON object a line."""
    return (problem.model_dump_json() + "\n" for problem in problems)
