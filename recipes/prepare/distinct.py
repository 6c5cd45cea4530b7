"""Each problem once: first by its text as it stands, row by row, then by its normalised statement over all sets."""

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

_SPACE = re.compile(r"\s+")
_LOOSE = re.compile(r" ?([^\w ]) ?")


def normalise(statement: str) -> str:
    """A statement without what copies of it differ in: spacing, letter case and the composition of characters.

    No sign is dropped, and no digit folded (``10²`` is not ``102``): what is equal afterwards asks the same.
    """
    text = _SPACE.sub(" ", unicodedata.normalize("NFC", statement).casefold()).strip()
    return _LOOSE.sub(r"\1", text)


@dataclass
class Distinct:
    """The different texts of a set.

    Attributes:
        problems: one per text, in the order of their first rows; without the set's wrapper.
        rows: rows that were read.
        wrapped: texts that had the wrapper.
        contradicted: ids of problems whose rows have different answers.
    """

    problems: list[Problem] = field(default_factory=list)
    rows: int = 0
    wrapped: int = 0
    contradicted: list[str] = field(default_factory=list)


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
    answers: dict[str, set[str]] = {}
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
            found.rows += 1
            first.setdefault(text, row)
            answers.setdefault(text, set()).add(_answer(row, where))
        progress(found.rows, len(first))
    if not first:
        raise ConfigError("source", known.name, "it holds no rows", "give a copy with one row a problem")
    whole = columns.problems(list(first.values()), where, known.name, known.name)
    for problem, variants in zip(whole, answers.values(), strict=True):
        statement, wrapped = (
            known.wrapper.strip(problem.statement) if known.wrapper else (problem.statement.strip(), False)
        )
        found.wrapped += wrapped
        if len(variants) > 1:
            found.contradicted.append(problem.id)
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


def _answer(row: Row, where: Columns) -> str:
    """The answer as it stands, for comparison alone."""
    if where.answer is not None:
        value: Any = row.get(where.answer)
    elif isinstance(row.get("reward_model"), dict):
        value = row["reward_model"].get("ground_truth")
    else:
        value = next((row[name] for name in columns.ANSWERS if row.get(name) not in (None, "")), None)
    return json.dumps(value, sort_keys=True, default=str)


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


def merge(sets: Iterable[tuple[Known, Distinct]], keep_contradicted: bool) -> Merged:
    """Each normalised statement once, over all sets.

    Args:
        sets: in order of preference.
        keep_contradicted: keep the first of problems with the same statement and different answers; else drop them all.
    """
    groups: dict[str, list[Problem]] = {}
    doubtful: set[str] = set()
    for known, found in sets:
        for problem in found.problems:
            groups.setdefault(normalise(problem.statement), []).append(problem)
        doubtful |= {f"{known.name}:{name}" for name in found.contradicted}
    merged = Merged()
    for group in groups.values():
        golds = {columns.ground_truth(problem.gold) for problem in group}
        if len(golds) > 1 or any(name_of(problem) in doubtful for problem in group):
            merged.contradicted += [name_of(problem) for problem in group]
            if not keep_contradicted:
                continue
        merged.problems.append(group[0])
        merged.repeated += [(name_of(problem), name_of(group[0])) for problem in group[1:]]
    return merged


def name_of(problem: Problem) -> str:
    """``SET:ID``, by which reports call a problem."""
    return f"{problem.data_source}:{problem.id}"


def to_lines(problems: Iterable[Problem]) -> Iterator[str]:
    """One JSON object a line."""
    return (problem.model_dump_json() + "\n" for problem in problems)
