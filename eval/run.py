"""Draw what is missing, grade it, write it down; then the numbers and the report."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path

from rich.console import Console

from eval import grading
from eval.engines.base import Engine, Reply
from eval.prepare import Prepared, check_same
from eval.progress import SampleProgress
from eval.prompts import Request
from eval.report import write_html
from eval.schema import POLICIES, Policy, Results, Sample, Verdict
from eval.storage import (
    PLAN_FILE,
    RESULTS_FILE,
    Plan,
    SampleWriter,
    read_plan,
    read_samples,
    write_atomically,
    write_plan,
)
from eval.summary import summarize
from recipes import provenance


def open_folder(folder: Path, plan: Plan) -> dict[tuple[str, int], Sample]:
    """Begin a run folder or go on with it; returns the samples that are already there.

    Raises:
        ConfigError: it holds samples that were drawn otherwise.
    """
    if (folder / PLAN_FILE).is_file():
        check_same(folder, read_plan(folder), plan)
    write_plan(folder, plan)
    return read_samples(folder)


def missing(requests: list[Request], have: dict[tuple[str, int], Sample]) -> list[Request]:
    """The requests without a sample, and those that failed before."""
    return [
        request
        for request in requests
        if (found := have.get((request.problem, request.sample))) is None or found.response is None
    ]


def draw(
    prepared: Prepared, engine: Engine, folder: Path, todo: list[Request], threads: int, console: Console
) -> dict[str, float]:
    """Draw, grade and store samples; returns the seconds that it took.

    Replies are graded on threads beside the engine's loop, and stored as soon as they are graded.
    """
    plan, begin = prepared.plan, time.monotonic()
    golds = {problem.id: (problem.gold, problem.data_source) for problem in plan.benchmark.problems}
    total, tokens, graded_s = len(prepared.requests), 0, 0.0

    def finish(reply: Reply) -> Sample:
        gold, source = golds[reply.request.problem]
        return to_sample(reply, gold, source, plan)

    with (
        SampleWriter(folder) as writer,
        SampleProgress(console, total, total - len(todo)) as progress,
        ThreadPoolExecutor(max_workers=threads) as pool,
    ):
        for sample in _graded(engine.generate(todo), pool, finish):
            writer.write(sample)
            tokens += sample.response_tokens or 0
            graded_s += sum(verdict.seconds for verdict in sample.verdicts.values())
            verdict = sample.verdicts["strict"]
            known = verdict.status not in ("request_error", "grader_error")
            progress.add(sample.response_tokens or 0, verdict.status == "correct" if known else None)
    seconds = time.monotonic() - begin
    return {
        "generate": seconds,
        "grade": graded_s,
        "tokens_per_second": tokens / max(seconds, 1e-9),
        "samples": len(todo),
    }


def _graded(replies: Iterator[Reply], pool: ThreadPoolExecutor, finish: Callable[[Reply], Sample]) -> Iterator[Sample]:
    """Graded samples in the order in which their grading ends, without holding up the engine."""
    running: set[Future[Sample]] = set()
    for reply in replies:
        running.add(pool.submit(finish, reply))
        done = {future for future in running if future.done()}
        running -= done
        for future in done:
            yield future.result()
    while running:
        done, running = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            yield future.result()


def to_sample(reply: Reply, gold: str | list[str], data_source: str, plan: Plan) -> Sample:
    """Grade a reply under every policy."""
    request = reply.request
    verdicts: dict[Policy, Verdict]
    if reply.response is None:
        verdicts = {policy: Verdict(status="request_error", detail="no_response") for policy in POLICIES}
    else:
        verdicts = grading.verdicts(
            reply.response, gold, data_source=data_source, finish_reason=reply.finish_reason,
            think_open=plan.think_open, deadline_s=plan.deadline_s,
        )  # fmt: skip
    text = reply.response
    return Sample(
        problem=request.problem, sample=request.sample, seed=request.seed, gold=gold,
        # A server may hand over half of a surrogate pair, which no UTF-8 file can hold.
        response=None if text is None else text.encode("utf-8", "replace").decode("utf-8"),
        finish_reason=reply.finish_reason, error=reply.error, prompt_tokens=reply.prompt_tokens,
        response_tokens=reply.response_tokens, seconds=round(reply.seconds, 3), verdicts=verdicts,
    )  # fmt: skip


def conclude(folder: Path, plan: Plan, timing: dict[str, float], warnings: list[str], command: list[str]) -> Results:
    """Read all samples back, and write ``results.json`` and ``report.html``."""
    wanted = {(problem.id, number) for problem in plan.benchmark.problems for number in range(plan.n)}
    samples = {place: sample for place, sample in read_samples(folder).items() if place in wanted}
    results = summarize(
        plan, samples, grader=grading.grader_identity(), timing=timing,
        provenance=provenance.collect(command), warnings=warnings,
    )  # fmt: skip
    write_atomically(folder / RESULTS_FILE, results.model_dump_json(indent=2) + "\n")
    write_html(results, folder, samples, plan.benchmark)
    return results
