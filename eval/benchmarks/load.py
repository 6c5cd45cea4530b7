"""From the name of a benchmark to its problems."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.benchmarks import columns, contests, sources, tasks
from eval.benchmarks.columns import Columns
from eval.benchmarks.rows import SUFFIXES, is_file_name
from eval.schema import Benchmark, Problem
from recipes.errors import ConfigError

BOXED = "Solve this problem. Think it through step by step, and write the final answer inside \\boxed{} at the end."
MATH_PROMPT = BOXED + "\n\n{statement}"
AIME_PROMPT = BOXED + " The answer is an integer between 0 and 999.\n\n{statement}"
AS_IT_IS = "{statement}"
"""For problems that say themselves how to answer."""


@dataclass(frozen=True)
class Named:
    """A benchmark that is known by name: its copy on the hub, and what it must have."""

    hub: str
    split: str
    count: int
    prompt: str = MATH_PROMPT


NAMED = {
    "aime24": Named("math-ai/aime24", "test", 30, AIME_PROMPT),
    "aime25": Named("math-ai/aime25", "test", 30, AIME_PROMPT),
    "math500": Named("HuggingFaceH4/MATH-500", "test", 500),
    "amc23": Named("math-ai/amc23", "test", 40),
}
NAMES = (*NAMED, *tasks.NAMES)
_HUB = re.compile(r"[\w.-]+/[\w.-]+(?::.+)?")


def load(
    name_or_path: str,
    *,
    source: str | None = None,
    revision: str | None = None,
    split: str | None = None,
    limit: int | None = None,
    problem_column: str | None = None,
    answer_column: str | None = None,
    id_column: str | None = None,
    size: int | None = None,
    seed: int | None = None,
    difficulty: Mapping[str, Any] | None = None,
    allow_faults: bool = False,
) -> Benchmark:
    """A benchmark by its name, a file of problems, or a data set of the hub.

    Args:
        name_or_path: one of :data:`NAMES`; or a file that ends in .jsonl, .parquet, .json or .txt; or ``OWNER/NAME``.
        source: for a benchmark with a name: the file, or the ``OWNER/NAME`` on the hub, to take it from. Without one
            the sgl-eval package is taken where it has the benchmark and is installed, else the usual copy on the hub.
        revision: of the data set on the hub. The commit that was read is in the lineage.
        split: of the data set on the hub.
        limit: take the first so many problems only.
        problem_column: where a file has the statement; None: found by its name, here and below.
        answer_column: where it has the answer.
        id_column: where it has the id.
        size: number of problems, for the recipes' tasks.
        seed: that chooses them.
        difficulty: settings of the task.
        allow_faults: go on with faulty data, and warn.

    Returns:
        The benchmark.

    Raises:
        ConfigError: no such benchmark, nothing that can be reached, or data with a fault.
    """
    where = Columns(problem_column, answer_column, id_column)
    if name_or_path in tasks.NAMES:
        _refuse(name_or_path, "a task of the recipes", source=source, revision=revision, split=split,
                problem_column=problem_column, answer_column=answer_column, id_column=id_column)  # fmt: skip
        found, lineage, max_tokens = tasks.problems(name_or_path, size, seed, difficulty)
        made = _benchmark(name_or_path, found, lineage, AS_IT_IS, limit, [])
        return made.model_copy(update={"max_tokens": max_tokens})
    _refuse(name_or_path, "no task of the recipes", size=size, seed=seed, difficulty=difficulty or None)
    if name_or_path in NAMED:
        return _named(name_or_path, source, revision, split, limit, where, allow_faults)
    origin = _origin(name_or_path, revision, split or "test", source)
    found = columns.problems(origin.rows, where, name_or_path)
    found, faults = _distinct(found)
    prompt = AS_IT_IS if columns.is_verl(origin.rows[0]) and problem_column is None else MATH_PROMPT
    name = Path(name_or_path).stem if is_file_name(name_or_path) else name_or_path
    warnings = [*origin.warnings, *_tolerated(name_or_path, faults, allow_faults)]
    return _benchmark(name, found, origin.lineage, prompt, limit, warnings)


def _refuse(name: str, what: str, **settings: Any) -> None:
    for setting, value in settings.items():
        if value is not None:
            raise ConfigError(setting, value, f"{name} is {what}, it has no such setting", "leave it out")


def check_name(name: str) -> None:
    """A benchmark's name, a file's that is there, or one that the hub may have.

    Raises:
        ConfigError: none of these.
    """
    if name not in NAMES and _names_a_file(name) and not Path(name).expanduser().is_file():
        fix = f"choose one of {', '.join(NAMES)}, or a file"
        raise ConfigError("benchmark", name, "there is no such file", fix)


def _names_a_file(name: str) -> bool:
    """Whether what is no benchmark's name is a file's, here or not; else it is a data set's of the hub.

    Raises:
        ConfigError: it can be neither.
    """
    if is_file_name(name) and not _is_hub_file(name):
        return True
    if _HUB.fullmatch(name) and not Path(name).exists():
        return False
    fix = f"choose one of {', '.join(NAMES)}, a file ({', '.join(SUFFIXES)}), or OWNER/NAME of the hub"
    raise ConfigError("benchmark", name, "there is no such benchmark", fix)


def _origin(name: str, revision: str | None, split: str, source: str | None) -> sources.Source:
    """Of a benchmark without a name of its own."""
    if source is not None:
        raise ConfigError("source", source, f"{name} names its source already", "leave it out")
    if not _names_a_file(name):
        return sources.from_hub(name, split, revision)
    if revision is not None:
        raise ConfigError("revision", revision, "a file has none", "leave it out")
    return sources.from_file(Path(name).expanduser())


def _is_hub_file(name: str) -> bool:
    return ":" in name and _HUB.fullmatch(name) is not None and not Path(name).exists()


def _named(
    name: str, source: str | None, revision: str | None, split: str | None, limit: int | None, where: Columns, lax: bool
) -> Benchmark:
    known = NAMED[name]
    origin = _find(name, source, revision, split)
    rows = contests.of_year(origin.rows, name) if name in contests.KEYS else origin.rows
    found = columns.problems(rows, where, origin.lineage, name)
    notes: list[str] = []
    if name in contests.KEYS:
        checked = contests.check(name, found)
        found, faults, notes = checked.problems, checked.faults, checked.notes
    else:
        found, faults = _distinct(found)
        if len(found) != known.count:
            faults.append(f"{len(found)} problems, where it has {known.count}")
    found = [one.model_copy(update={"data_source": name}) for one in found]
    warnings = [*origin.warnings, *notes, *_tolerated(name, faults, lax, origin.lineage)]
    made = _benchmark(name, found, origin.lineage, known.prompt, limit, warnings)
    return made.model_copy(update={"domain": "aime"}) if known.prompt == AIME_PROMPT else made


def _find(name: str, source: str | None, revision: str | None, split: str | None) -> sources.Source:
    """The rows of a benchmark with a name: what the user names, the package, or the hub."""
    known = NAMED[name]
    if source is not None:
        return _origin(source, revision, split or known.split, None)
    if revision is None and split is None:
        packaged = sources.from_package(name)
        if packaged is not None:
            return packaged
    try:
        return sources.from_hub(known.hub, split or known.split, revision)
    except ConfigError as error:
        ways = f"give a file with source=FILE; or go online (once: the hub's cache serves later runs) for {known.hub}"
        if name in contests.KEYS:
            ways = f"pip install --no-deps {sources.PACKAGE}; or {ways}"
        raise ConfigError(
            "benchmark", name, f"its problems are not on this machine, and {error.problem}", ways
        ) from None


def _distinct(problems: Sequence[Problem]) -> tuple[list[Problem], list[str]]:
    """Each problem once, and what was there more often; ids that do not tell problems apart are refused."""
    first: dict[str, Problem] = {}
    repeated: dict[str, list[Problem]] = {}
    for problem in problems:
        text = " ".join(problem.statement.split())
        if text in first:
            repeated.setdefault(text, [first[text]]).append(problem)
        else:
            first[text] = problem
    kept = list(first.values())
    ids = [problem.id for problem in kept]
    same = sorted({name for name in ids if ids.count(name) > 1}) if len(set(ids)) < len(ids) else []
    if same:
        raise ConfigError("id_column", "", f"several problems have the id {same[0]}", "name a column of distinct ids")
    faults = []
    for group in list(repeated.values())[:5]:
        answers = {json.dumps(problem.gold) for problem in group}
        conflict = f", with different answers: {', '.join(sorted(answers))}" if len(answers) > 1 else ""
        faults.append(f"{', '.join(problem.id for problem in group[:6])}: the same statement{conflict}")
    if len(repeated) > 5:
        faults.append(f"{len(repeated) - 5} more statements are repeated")
    return kept, faults


def _tolerated(name: str, faults: Sequence[str], allowed: bool, origin: str = "") -> list[str]:
    """The faults as warnings, if the user allows them."""
    if faults and not allowed:
        copy = f" ({origin})" if origin else ""
        raise ConfigError(
            "benchmark", name, f"this copy{copy} has faults: {'; '.join(faults)}",
            "take another copy, or set allow_faults=true to go on with this one (each problem counts once)",
        )  # fmt: skip
    return [f"fault in the data: {fault}" for fault in faults]


def _benchmark(
    name: str, problems: list[Problem], lineage: str, prompt: str, limit: int | None, warnings: list[str]
) -> Benchmark:
    if limit is not None:
        if limit < 1:
            raise ConfigError("limit", limit, "it leaves no problem", "set 1 or more")
        if limit < len(problems):
            warnings = [*warnings, f"only the first {limit} of {len(problems)} problems: the score is not comparable"]
            problems = problems[:limit]
    return Benchmark(
        name=name,
        problems=problems,
        lineage=lineage,
        statements_sha256=_digest([problem.id, problem.statement] for problem in problems),
        answers_sha256=_digest([problem.id, problem.gold] for problem in problems),
        prompt=prompt,
        warnings=warnings,
    )


def _digest(pairs: Any) -> str:
    return hashlib.sha256(json.dumps(list(pairs), ensure_ascii=False).encode()).hexdigest()
