"""From the samples of a run to its results: scores of each policy, rows of the heat map, rates, warnings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from eval import statistics
from eval.schema import (
    EXCLUDED,
    POLICIES,
    STATUSES,
    Lengths,
    Policy,
    ProblemResult,
    Results,
    Sample,
    Score,
    Status,
    Verdict,
)
from eval.statistics import Votes
from eval.storage import Plan
from recipes.errors import ConfigError
from sat_verl.grading import canonical

MANY_TRUNCATED = 0.05
"""From this share of truncated responses on, the results carry a warning."""

_REASON_CHARS = 200

Row = list[Sample | None]
"""The samples of one problem by number; None: not there yet. Numbers never move up, whatever is missing or empty."""


def rows_of(plan: Plan, samples: Mapping[tuple[str, int], Sample]) -> list[Row]:
    """The samples by problem, in the order of the plan; those from n on are left out.

    Raises:
        ConfigError: a sample of a problem that the plan does not have, or without the verdict of a policy.
    """
    known = {problem.id for problem in plan.benchmark.problems}
    for (problem, number), sample in samples.items():
        if problem not in known:
            raise ConfigError(
                "run",
                problem,
                f"there are samples of this problem, which {plan.benchmark.name} does not have",
                "use a new folder for another benchmark",
            )
        for policy in POLICIES:
            if policy not in sample.verdicts:
                where = f"sample {number} of {problem} has no verdict of policy={policy}"
                raise ConfigError("run", problem, where, "grade the samples again with python -m eval.regrade")
    return [[samples.get((problem.id, k)) for k in range(plan.n)] for problem in plan.benchmark.problems]


def votes_of(row: Row, policy: Policy) -> Votes:
    """What the samples of a problem vote for.

    All correct samples are one class, in whatever way they write the answer. Other answers are told apart by
    :func:`sat_verl.grading.canonical`. Samples without an answer do not vote.
    """
    correct, abstained = 0, 0
    others: Counter[str] = Counter()
    for verdict in _verdicts(row, policy):
        if verdict.status == "correct":
            correct += 1
        elif verdict.status == "wrong" and verdict.answer is not None:
            others[canonical(verdict.answer, verdict.method).strip()] += 1
        elif verdict.status not in EXCLUDED:
            abstained += 1
    return Votes(correct, tuple(sorted(others.values())), abstained)


def _verdicts(row: Row, policy: Policy) -> Iterator[Verdict]:
    return (sample.verdicts[policy] for sample in row if sample is not None)


def _statuses(row: Row, policy: Policy) -> Counter[Status]:
    return Counter(verdict.status for verdict in _verdicts(row, policy))


def _counting(statuses: Counter[Status]) -> int:
    return sum(statuses.values()) - sum(statuses[status] for status in EXCLUDED)


def subset_sizes(fewest: int) -> list[int]:
    """The k of pass@k and maj@k: powers of two, and n itself."""
    return sorted({2**power for power in range(fewest.bit_length())} | {fewest}) if fewest > 0 else []


def score(rows: Sequence[Row], policy: Policy) -> Score:
    """The numbers of one policy; samples that are missing or excluded count neither as right nor as wrong.

    ``pass_at`` and ``majority_at`` go up to the fewest samples that count of any problem that has some.
    """
    statuses = [_statuses(row, policy) for row in rows]
    correct = [of_problem["correct"] for of_problem in statuses]
    counting = [_counting(of_problem) for of_problem in statuses]
    excluded = [sum(of_problem[status] for status in EXCLUDED) for of_problem in statuses]
    votes = [votes_of(row, policy) for row in rows]
    sizes = subset_sizes(min((n for n in counting if n), default=0))
    return Score(
        average=statistics.average(correct, counting),
        sampling=statistics.sampling_interval(correct, counting),
        population=statistics.population_interval(correct, counting),
        bootstrap=statistics.bootstrap_interval(correct, counting),
        bounds=statistics.bounds(correct, counting, excluded),
        pass_at={k: statistics.pass_at_k(correct, counting, k) for k in sizes},
        majority_at={k: statistics.majority_at_k(votes, k) for k in sizes},
        counts={status: sum(of_problem[status] for of_problem in statuses) for status in STATUSES},
    )


def _duplicates(row: Row) -> int:
    texts = [sample.response for sample in row if sample is not None and sample.response is not None]
    return len(texts) - len(set(texts))


def _problem_result(plan: Plan, index: int, row: Row) -> ProblemResult:
    problem = plan.benchmark.problems[index]
    averages: dict[Policy, float | None] = {}
    for policy in POLICIES:
        statuses = _statuses(row, policy)
        averages[policy] = statistics.average([statuses["correct"]], [_counting(statuses)])
    return ProblemResult(
        id=problem.id,
        gold=problem.gold,
        statuses={policy: [None if s is None else s.verdicts[policy].status for s in row] for policy in POLICIES},
        answers={policy: [None if s is None else s.verdicts[policy].answer for s in row] for policy in POLICIES},
        lengths=[None if s is None else s.response_tokens for s in row],
        average=averages,
        duplicates=_duplicates(row),
    )


def _lengths(samples: Sequence[Sample]) -> Lengths | None:
    """Correct and incorrect are those of the strict policy; excluded samples are neither."""
    by_kind: dict[str, list[int]] = {"all": [], "correct": [], "incorrect": []}
    for sample in samples:
        if sample.response_tokens is None:
            continue
        status = sample.verdicts["strict"].status
        by_kind["all"].append(sample.response_tokens)
        if status not in EXCLUDED:
            by_kind["correct" if status == "correct" else "incorrect"].append(sample.response_tokens)
    tokens = by_kind["all"]
    if not tokens:
        return None
    means = {kind: float(np.mean(values)) if values else None for kind, values in by_kind.items()}
    return Lengths(
        mean=float(np.mean(tokens)),
        median=float(np.median(tokens)),
        p90=float(np.percentile(tokens, 90)),
        maximum=max(tokens),
        mean_correct=means["correct"],
        mean_incorrect=means["incorrect"],
    )


def _errors(samples: Sequence[Sample]) -> dict[str, int]:
    """Reasons with their counts; a sample whose grading failed under both policies for one reason counts once."""
    found: Counter[str] = Counter()
    for sample in samples:
        reasons = set()
        for policy in POLICIES:
            verdict = sample.verdicts[policy]
            if verdict.status in EXCLUDED:
                of_request = sample.error if verdict.status == "request_error" else ""
                text = " ".join((of_request or verdict.detail or "no reason given").split())
                reasons.add(f"{verdict.status}: {text[:_REASON_CHARS]}")
        found.update(reasons)
    return dict(found.most_common())


def _warnings(plan: Plan, rows: Sequence[Row], truncated: float) -> Iterator[str]:
    samples = [sample for row in rows for sample in row if sample is not None]
    expected = len(rows) * plan.n
    if len(samples) < expected:
        yield f"incomplete: {len(samples)} of {expected} samples; the scores are of those, and cannot be compared"
    for policy in POLICIES:
        counts = [_statuses(row, policy) for row in rows]
        excluded = sum(of_problem[status] for of_problem in counts for status in EXCLUDED)
        if excluded:
            emptied = sum(_counting(of_problem) == 0 < sum(of_problem.values()) for of_problem in counts)
            problems = f", and with them {emptied} problem(s)" if emptied else ""
            yield (
                f"{policy}: {excluded} of {len(samples)} samples left out{problems}, because a request or the grading "
                "failed; see the bounds of the average"
            )
    if truncated >= MANY_TRUNCATED:
        yield f"{truncated:.1%} of the responses were cut at the token limit: the score depends on that limit"
    temperature = plan.key.get("sampling", {}).get("temperature")
    several = [row for row in rows if sum(s is not None and s.response is not None for s in row) > 1]
    if several and temperature != 0 and all(_distinct(row) == 1 for row in several):
        yield f"all samples of every problem are identical although temperature={temperature}: no sampling took place"
    for index, row in enumerate(rows):
        seeds = Counter(sample.seed for sample in row if sample is not None)
        shared = [seed for seed, times in seeds.items() if times > 1]
        if shared:
            problem = plan.benchmark.problems[index].id
            yield f"samples share a seed (problem {problem}, seed {shared[0]}): they are not independent"
            return


def _distinct(row: Row) -> int:
    return len({sample.response for sample in row if sample is not None and sample.response is not None})


def summarize(
    plan: Plan,
    samples: Mapping[tuple[str, int], Sample],
    *,
    grader: dict[str, Any],
    timing: dict[str, float],
    provenance: dict[str, Any],
    warnings: Sequence[str],
) -> Results:
    """Results of a run, also of one that is still going on.

    A missing sample is never counted as wrong: the averages are over what is there, and ``complete`` is False.

    Args:
        plan: what was to be sampled.
        samples: what is there, by problem and sample number.
        grader: version and settings of the grader.
        timing: seconds by the clock, tokens per second.
        provenance: command, versions, hardware, commit, time.
        warnings: of the parts that ran before; those of the benchmark and of the samples are added.

    Raises:
        ConfigError: samples that do not belong to the plan, or that lack a verdict.
    """
    rows = rows_of(plan, samples)
    there = [sample for row in rows for sample in row if sample is not None]
    responses = [sample for sample in there if sample.response is not None]
    truncated = sum(sample.finish_reason == "length" for sample in responses) / len(responses) if responses else 0.0
    problems = [_problem_result(plan, index, row) for index, row in enumerate(rows)]
    expected = len(rows) * plan.n
    return Results(
        benchmark=plan.benchmark.name,
        model=plan.model,
        n=plan.n,
        expected=expected,
        received=len(there),
        complete=len(there) == expected,
        key=plan.key,
        grader=grader,
        scores={policy: score(rows, policy) for policy in POLICIES},
        problems=problems,
        lengths=_lengths(there),
        truncated_rate=truncated,
        duplicates=sum(problem.duplicates for problem in problems),
        errors=_errors(there),
        warnings=list(dict.fromkeys([*plan.benchmark.warnings, *warnings, *_warnings(plan, rows, truncated)])),
        timing=timing,
        provenance=provenance,
    )
