"""Going on with a run folder: what is in it must be what this run would have drawn, and graded as it would grade."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from eval import grading
from eval.prepare import check_same
from eval.prompts import Request, sample_seed
from eval.schema import Sample
from eval.storage import PLAN_FILE, SAMPLES_FILE, Plan, read_plan, read_samples, write_plan, write_samples
from recipes.errors import ConfigError

Samples = dict[tuple[str, int], Sample]


def open_folder(folder: Path, plan: Plan, console: Console) -> Samples:
    """Begin a run folder or go on with it.

    Args:
        folder: the run folder.
        plan: of the run that is to begin or to go on.
        console: told if stored samples are graded again, since the grader is another one now.

    Returns:
        The samples that are already there.

    Raises:
        ConfigError: it holds samples that were drawn otherwise, or nothing says how.
    """
    if (folder / PLAN_FILE).is_file():
        check_same(folder, read_plan(folder), plan)
    elif (folder / SAMPLES_FILE).is_file():
        raise ConfigError(
            "out", folder, f"it holds samples but no {PLAN_FILE}, which would say of what", "choose another folder"
        )
    have = read_samples(folder)
    check_samples(folder, plan, have)
    write_plan(folder, plan)
    stale = {place: sample for place, sample in have.items() if sample.grader != grading.grader_digest(plan)}
    if stale:
        console.print(f"{len(stale)} samples were graded by another grader and are graded again", highlight=False)
        have |= graded_again(plan, stale)
        write_samples(folder, have.values())
    return have


def check_samples(folder: Path, plan: Plan, samples: Mapping[tuple[str, int], Sample]) -> None:
    """Refuse samples that this plan cannot have led to.

    Raises:
        ConfigError: a problem, seed or gold answer that is not the plan's.
    """
    golds = {problem.id: problem.gold for problem in plan.benchmark.problems}
    for (problem, number), sample in samples.items():
        if problem not in golds:
            what = "it has no such problem"
        elif sample.gold != golds[problem]:
            what = f"its answer is {golds[problem]!r} and not {sample.gold!r}"
        elif sample.seed != sample_seed(plan.key["seed"], problem, number):
            what = f"with seed={plan.key['seed']} it has another seed than {sample.seed}"
        else:
            continue
        raise ConfigError(
            "out", folder / SAMPLES_FILE, f"sample {number} of {problem!r} is not of this run: {what}",
            "choose another folder",
        )  # fmt: skip


def graded_again(plan: Plan, samples: Mapping[tuple[str, int], Sample]) -> Samples:
    """The samples with the present grader's verdicts."""
    problems = {problem.id: problem for problem in plan.benchmark.problems}
    digest = grading.grader_digest(plan)
    return {
        place: sample.model_copy(
            update={
                "verdicts": grading.verdicts_under(
                    plan, problems[sample.problem], sample.response, sample.finish_reason
                ),
                "grader": digest,
            }
        )
        for place, sample in samples.items()
    }


def missing(requests: list[Request], have: Mapping[tuple[str, int], Sample]) -> list[Request]:
    """The requests without a sample, and those that failed before."""
    return [
        request
        for request in requests
        if (found := have.get((request.problem, request.sample))) is None or found.response is None
    ]
