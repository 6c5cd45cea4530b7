r"""Problem, answer and id out of rows, whatever their columns are called.

Known without being told:

=====================================  =========================================================================
columns                                where they are used
=====================================  =========================================================================
``problem``, ``answer``                HuggingFaceH4's sets, MATH-500, MathArena, the AMC and AIME files of papers
``problem``, ``expected_answer``       NeMo-Skills, sgl-eval
``problem``, ``solution``              math-ai's AIME sets: the answer is what the solution boxes, ``\boxed{204}``
``Problem``, ``Answer``, ``ID``        Maxwell-Jia's sets
``question``, ``answer``               math-ai's AMC set; GSM8K, whose answer follows ``####``
``prompt``, ``reward_model``           verl: a list of messages, and ``reward_model.ground_truth``
=====================================  =========================================================================
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from eval.benchmarks.rows import Row
from eval.schema import Problem
from recipes.errors import ConfigError
from sat_verl.grading import boxes
from sat_verl.grading.grader import gold_forms

PROBLEMS = ("problem", "Problem", "question", "Question")
ANSWERS = ("expected_answer", "answer", "Answer", "solution", "Solution")
IDS = ("id", "ID", "unique_id", "problem_idx", "problem_id")
SOLUTIONS = ("solution", "Solution")
FINAL_ANSWER = "####"
OURS = "sat_verl/"


@dataclass(frozen=True)
class Columns:
    """Which columns hold what; ``None``: found by their names."""

    problem: str | None = None
    answer: str | None = None
    id: str | None = None


def is_verl(row: Row) -> bool:
    """Whether a row is one of verl's, whose prompt is complete."""
    return isinstance(row.get("prompt"), list) and isinstance(row.get("reward_model"), dict)


def problems(rows: Sequence[Row], columns: Columns, origin: str, data_source: str = "math") -> list[Problem]:
    """The problems that rows hold, in their order.

    Args:
        rows: what a file or a data set holds.
        columns: what the user says of the columns.
        origin: where the rows are from, for messages.
        data_source: of rows that name none.

    Returns:
        The problems. A row without an id is called by its place, from 0.

    Raises:
        ConfigError: a column that is not there, or a row without a statement or without a usable answer.
    """
    if is_verl(rows[0]) and columns.problem is None and columns.answer is None:
        return [_from_verl(row, place, columns.id, origin) for place, row in enumerate(rows)]
    # All rows decide: a row whose answer is empty is refused, and takes none from another column.
    filled = {str(name): None for row in rows for name, value in row.items() if value not in (None, "")}
    there = filled | {str(name): None for row in rows for name in row}
    asked = {"problem_column": columns.problem, "answer_column": columns.answer, "id_column": columns.id}
    for setting, name in asked.items():
        if name is not None and name not in there:
            raise ConfigError(setting, name, f"{origin} has no such column", f"name one of {', '.join(there)}")
    problem = columns.problem or _known("problem_column", PROBLEMS, filled, there, origin)
    answer = columns.answer or _known(
        "answer_column", tuple(name for name in ANSWERS if name != problem), filled, there, origin
    )
    key = columns.id or next((name for name in IDS if name in filled), None)
    if problem == answer:
        raise ConfigError("answer_column", answer, "it is the problem_column too", "name the column of the answers")
    found = []
    for place, row in enumerate(rows):
        where = f"row {place} of {origin}"
        source = row.get("data_source") or data_source
        found.append(
            _problem(_id(row, key, place), row.get(problem), gold_answer(row.get(answer), answer, where), source, where)
        )
    return found


def _known(setting: str, known: Sequence[str], filled: Iterable[str], there: Iterable[str], origin: str) -> str:
    """The first of the known names under which any row has a value."""
    for name in known:
        if name in filled:
            return name
    problem = f"{origin} has none of the columns {', '.join(known)}"
    raise ConfigError(setting, "", problem, f"name one of {', '.join(there)}")


def _id(row: Row, key: str | None, place: int) -> str:
    value = row.get(key) if key else None
    return str(place if value in (None, "") else value)


def _problem(key: str, statement: Any, gold: str | list[str], source: Any, where: str) -> Problem:
    if not isinstance(statement, str) or not statement.strip():
        raise ConfigError("benchmark", key, f"{where} has no statement", "name the right problem_column")
    if not isinstance(source, str):
        raise ConfigError("data_source", source, f"{where} has no text there", "write a name, or leave it out")
    for text in (key, statement, source, *([gold] if isinstance(gold, str) else gold)):
        if not _is_unicode(text):
            shown = text.encode("utf-8", "backslashreplace").decode()[:60]
            raise ConfigError("benchmark", shown, f"{where} has half of a surrogate pair", "mend that character")
    # What verl is given of these names is graded by the task's own rule, and an unknown one cannot be graded.
    known = ("chain", "sort", "arithmetic")
    if source.startswith(OURS) and source.removeprefix(OURS) not in known:
        raise ConfigError("data_source", source, f"{where} is of an unknown task", f"known are {', '.join(known)}")
    return Problem(id=key, statement=statement, gold=gold, data_source=source)


def gold_answer(value: Any, column: str, where: str) -> str | list[str]:
    """The answer as the grader takes it: text, or several texts of which any is right.

    Args:
        value: as the row has it.
        column: where; of a solution the last box counts.
        where: which row of what, for the message.

    Raises:
        ConfigError: it is no usable answer.
    """
    if isinstance(value, str):
        if FINAL_ANSWER in value:
            value = value.rpartition(FINAL_ANSWER)[2].strip()
        elif column in SOLUTIONS:
            complete = boxes.scan(value).complete
            value = complete[-1].content if complete else None
    forms = gold_forms(value)
    if not forms:
        shown = "nothing" if value is None else repr(value)[:60]
        raise ConfigError("answer_column", column, f"{where} has {shown} for an answer", "name the right answer_column")
    return value.strip() if isinstance(value, str) else forms[0] if len(forms) == 1 else forms


def _from_verl(row: Row, place: int, key: str | None, origin: str) -> Problem:
    where = f"row {place} of {origin}"
    messages = row.get("prompt")
    turn = messages[0] if isinstance(messages, list) and len(messages) == 1 else None
    if not isinstance(turn, dict) or turn.get("role") != "user":
        raise ConfigError(
            "benchmark", origin, f"{where} is not a single user turn", "put what the system turn says into the user's"
        )
    extra = row.get("extra_info") or {}
    fallback = extra.get("index") if isinstance(extra, dict) else None
    name = _id(row, key, place if fallback is None else fallback)
    answer = row.get("reward_model")
    truth = answer.get("ground_truth") if isinstance(answer, dict) else None
    gold = gold_answer(truth, "reward_model.ground_truth", where)
    return _problem(name, turn.get("content"), gold, row.get("data_source") or "math", where)


def _is_unicode(text: str) -> bool:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def ground_truth(gold: str | list[str]) -> str:
    """A gold answer as one text, which the grader reads as the same answers."""
    return gold if isinstance(gold, str) else json.dumps(gold)
