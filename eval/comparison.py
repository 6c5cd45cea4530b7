"""Which runs may be compared, and what comes of it.

Every run after the first is compared with the first. What must agree, field by field of the runs' ``key``:

* ``benchmark``, ``prompt``, ``sampling`` and n, the grader, and any part of the key that is not named here: else the
  runs are refused, because the difference would be one of these and not of the models.
* ``engine``, ``seed`` and ``sampling.context`` may differ, with a warning: the same model scores the same with
  another seed or version but for noise, though an engine's numerics can shift a score (Hochlehnert et al. 2025,
  arXiv:2504.07086); the context is the model's own and matters only where it cuts responses.
* ``model`` is what is compared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict

from eval import statistics
from eval.paired import Difference, Resample, Tally, difference, holm
from eval.schema import EXCLUDED, Policy, ProblemResult, Results
from eval.wording import flat
from recipes.errors import ConfigError

MODEL = "model"
ONLY_WARNED = ("engine", "seed", "sampling.context")


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ProblemDifference(_Record):
    """One problem in both runs."""

    id: str
    first: float | None
    other: float | None
    difference: float | None
    """None: a run has no sample that counts."""


class Comparison(_Record):
    """One run against the first."""

    name: str
    model: str
    first: float
    """Average of the first run over the problems that both have."""
    other: float
    difference: Difference
    p_holm: float
    """p adjusted for the number of comparisons."""
    bounds: tuple[float, float]
    """The difference over all problems if all excluded samples spoke for the first run, and if all for this one."""
    excluded: int
    """Samples of the two runs that do not count."""
    problems: list[ProblemDifference]


class Comparisons(_Record):
    """What ``out=FILE.json`` gets."""

    schema_version: int = 1
    benchmark: str
    n: int
    policy: Policy
    first: str
    first_model: str
    folders: dict[str, str]
    """Of each run, by name, as the user gave it; empty if the runs are from nowhere."""
    comparisons: list[Comparison]
    warnings: list[str]


def _differing(first: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Dotted fields in which two nested mappings differ, with both values."""
    one, two = dict(flat(first)), dict(flat(other))
    fields = {name: (one.get(name, "absent"), two.get(name, "absent")) for name in {**one, **two}}
    return {name: values for name, values in fields.items() if values[0] != values[1]}


def _belongs(field: str, groups: Sequence[str]) -> bool:
    return any(field == group or field.startswith(group + ".") for group in groups)


def require_complete(name: str, results: Results) -> None:
    """Refuse a run that is not at its end.

    Raises:
        ConfigError: samples are missing.
    """
    if not results.complete:
        raise ConfigError(
            name,
            results.model,
            f"the run is incomplete: {results.received} of {results.expected} samples are there",
            "start the same python -m eval command again, which goes on with it",
        )


def require_comparable(names: tuple[str, str], first: Results, other: Results) -> list[str]:
    """Refuse runs whose difference would not be one of the models.

    Returns:
        Warnings about what differs and need not matter.

    Raises:
        ConfigError: data, prompt, sampling, n or grader differ; the message has every such field with both values.
    """
    differing = {
        **_differing({"n": first.n}, {"n": other.n}),
        **_differing(first.key, other.key),
        **_differing({"grader": first.grader}, {"grader": other.grader}),
    }
    one, two = ({problem.id for problem in run.problems} for run in (first, other))
    if odd := sorted(one ^ two):
        differing["problems"] = tuple(odd[0] if odd[0] in ids else f"no {odd[0]}" for ids in (one, two))
    refused = {field: values for field, values in differing.items() if not _belongs(field, (MODEL, *ONLY_WARNED))}
    text = {field: f"{field}: {a} in {names[0]}, {b} in {names[1]}" for field, (a, b) in differing.items()}
    if refused:
        only_grader = all(_belongs(field, ("grader",)) for field in refused)
        fix = "python -m eval.regrade run=..." if only_grader else "evaluate both models with the same settings"
        problem = f"it cannot be compared with {names[0]} ({'; '.join(text[field] for field in refused)})"
        raise ConfigError(names[1], other.model, problem, fix)
    warned = [field for field in differing if field not in refused and not _belongs(field, (MODEL,))]
    return [f"{text[field]}: part of the difference may come from this" for field in warned]


def _counts(problem: ProblemResult, policy: Policy) -> tuple[int, int, int]:
    """Correct, counting and excluded samples of a problem."""
    statuses = [status for status in problem.statuses[policy] if status is not None]
    excluded = sum(status in EXCLUDED for status in statuses)
    return statuses.count("correct"), len(statuses) - excluded, excluded


def _table_of(results: Results, policy: Policy, ids: Sequence[str]) -> NDArray[np.float64]:
    """Correct, counting, excluded (columns) by problem (rows)."""
    by_id = {problem.id: problem for problem in results.problems}
    return np.array([_counts(by_id[name], policy) for name in ids], dtype=float)


def compare_two(
    name: str, first: Results, other: Results, policy: Policy, *, resample: Resample = "problems", seed: int = 0
) -> Comparison:
    """Compare one run with the first; ``p_holm`` is still the plain p.

    Raises:
        ConfigError: there is no problem for which both runs have samples that count.
    """
    ids = [problem.id for problem in first.problems]
    a, b = (_table_of(results, policy, ids) for results in (first, other))
    both = (a[:, 1] > 0) & (b[:, 1] > 0)
    if not both.any():
        raise ConfigError(name, other.model, "no problem has samples that count in both runs", "see its errors")
    one, two = (Tally(run[both, 0], run[both, 1]) for run in (a, b))
    found = difference(one, two, resample=resample, seed=seed)
    low, high = (statistics.bounds(run[:, 0], run[:, 1], run[:, 2]) for run in (a, b))
    averages = [[c / n if n else None for c, n, _ in run] for run in (a, b)]
    return Comparison(
        name=name,
        model=other.model,
        first=float(one.means.mean()),
        other=float(two.means.mean()),
        difference=found,
        p_holm=found.p,
        bounds=(high[0] - low[1], high[1] - low[0]),
        excluded=int(a[:, 2].sum() + b[:, 2].sum()),
        problems=[
            ProblemDifference(id=i, first=x, other=y, difference=None if x is None or y is None else y - x)
            for i, x, y in zip(ids, *averages, strict=True)
        ],
    )


def _same_samples(first: Results, other: Results) -> bool:
    return all(
        (one.statuses, one.answers, one.lengths) == (two.statuses, two.answers, two.lengths)
        for one, two in zip(first.problems, other.problems, strict=True)
    )


def _notes(names: tuple[str, str], first: Results, other: Results, found: Comparison) -> list[str]:
    pair = f"{names[0]} and {names[1]}"
    notes = []
    if first.key.get(MODEL) == other.key.get(MODEL):
        notes.append(f"{pair} are runs of the same model: any difference is noise or the engine's")
    if _same_samples(first, other):
        notes.append(f"{pair} agree in every answer and length: they are probably copies, and no evidence of anything")
    if found.excluded:
        dropped = len(found.problems) - found.difference.problems
        notes.append(
            f"{pair}: {found.excluded} samples do not count because a request or the grading failed, and with them "
            f"{dropped} problem(s); whatever they are, the difference is from {found.bounds[0]:+.3f} to "
            f"{found.bounds[1]:+.3f}"
        )
    return notes


def _own_warnings(runs: Mapping[str, Results]) -> list[str]:
    """What the runs' own results warn of, once where all of them do."""
    found: dict[str, list[str]] = {}
    for name, results in runs.items():
        for warning in results.warnings:
            found.setdefault(warning, []).append(name)
    return [
        f"{'all runs' if len(names) == len(runs) else ', '.join(names)}: {warning}" for warning, names in found.items()
    ]


def compare(
    runs: Mapping[str, Results],
    policy: Policy = "strict",
    *,
    resample: Resample = "problems",
    seed: int = 0,
    folders: Mapping[str, str] | None = None,
) -> Comparisons:
    """Compare every run with the first.

    Args:
        runs: at least two, by name.
        policy: whose verdicts count.
        resample: what the bootstrap draws anew: problems, or samples within them too.
        seed: of the bootstrap and of random signs.
        folders: where the runs are from, by name.

    Raises:
        ConfigError: runs that are incomplete or cannot be compared.
    """
    for name, results in runs.items():
        require_complete(name, results)
    (base, first), *others = runs.items()
    warnings: list[str] = []
    found: list[Comparison] = []
    for name, other in others:
        warnings += require_comparable((base, name), first, other)
        found.append(compare_two(name, first, other, policy, resample=resample, seed=seed))
        warnings += _notes((base, name), first, other, found[-1])
    adjusted = holm([one.difference.p for one in found])
    return Comparisons(
        benchmark=first.benchmark,
        n=first.n,
        policy=policy,
        first=base,
        first_model=first.model,
        folders=dict(folders or {}),
        comparisons=[one.model_copy(update={"p_holm": p}) for one, p in zip(found, adjusted, strict=True)],
        warnings=warnings + _own_warnings(runs),
    )
