"""Draw what is missing, grade it, write it down; then the numbers and the report."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from rich.console import Console

from eval import grading
from eval.engines.base import Engine, Reply
from eval.prepare import Prepared
from eval.progress import SampleProgress
from eval.prompts import Request
from eval.report import write_html
from eval.schema import EXCLUDED, Problem, Results, Sample
from eval.storage import RESULTS_FILE, Plan, SampleWriter, read_samples, write_atomically
from eval.summary import summarize
from recipes import provenance


class _Sitting:
    """Grades and stores replies, on any thread, each as soon as it is there."""

    def __init__(self, plan: Plan, writer: SampleWriter, progress: SampleProgress) -> None:
        self._plan, self._writer, self._progress = plan, writer, progress
        self._problems = {problem.id: problem for problem in plan.benchmark.problems}
        self._grader = grading.grader_digest(plan)
        self._lock = threading.Lock()
        self.tokens, self.grading_s = 0, 0.0

    def store(self, reply: Reply) -> None:
        sample = to_sample(reply, self._problems[reply.request.problem], self._plan, self._grader)
        self._writer.write(sample)
        verdict = sample.verdicts["strict"]
        with self._lock:
            self.tokens += sample.response_tokens or 0
            self.grading_s += sum(one.seconds for one in sample.verdicts.values())
            right = None if verdict.status in EXCLUDED else verdict.status == "correct"
            self._progress.add(sample.response_tokens or 0, right)


def draw(
    prepared: Prepared, engine: Engine, folder: Path, todo: list[Request], threads: int, console: Console
) -> dict[str, float]:
    """Draw, grade and store samples; returns ``Results.timing``.

    Replies are graded on threads beside the engine's loop.
    """
    begin, total = time.monotonic(), len(prepared.requests)
    with (
        SampleWriter(folder) as writer,
        SampleProgress(console, total, total - len(todo)) as progress,
        ThreadPoolExecutor(max_workers=threads) as pool,
    ):
        sitting = _Sitting(prepared.plan, writer, progress)
        _hand_over(engine.generate(todo), pool, sitting)
    seconds = time.monotonic() - begin
    return {
        "generate": seconds,
        "grade": sitting.grading_s,
        "tokens_per_second": sitting.tokens / max(seconds, 1e-9),
        "samples": len(todo),
    }


def _hand_over(replies: Iterable[Reply], pool: ThreadPoolExecutor, sitting: _Sitting) -> None:
    """Store all replies; what fails there (a full disk, say) ends the loop at the next reply."""
    running: deque[Future[None]] = deque()
    for reply in replies:
        running.append(pool.submit(sitting.store, reply))
        while running and running[0].done():
            running.popleft().result()
    for future in running:
        future.result()


def to_sample(reply: Reply, problem: Problem, plan: Plan, grader: str) -> Sample:
    """Grade a reply under every policy."""
    # A server may hand over half of a surrogate pair, which no UTF-8 file can hold.
    text = None if reply.response is None else reply.response.encode("utf-8", "replace").decode("utf-8")
    return Sample(
        problem=problem.id,
        sample=reply.request.sample,
        seed=reply.request.seed,
        gold=problem.gold,
        response=text,
        finish_reason=reply.finish_reason,
        error=reply.error.encode("utf-8", "replace").decode("utf-8"),
        prompt_tokens=reply.prompt_tokens,
        response_tokens=reply.response_tokens,
        seconds=round(reply.seconds, 3),
        verdicts=grading.verdicts_under(plan, problem, text, reply.finish_reason),
        grader=grader,
    )


def conclude(folder: Path, plan: Plan, timing: dict[str, float], warnings: list[str], command: list[str]) -> Results:
    """Read all samples back, and write ``results.json`` and ``report.html``."""
    wanted = {(problem.id, number) for problem in plan.benchmark.problems for number in range(plan.n)}
    samples = {place: sample for place, sample in read_samples(folder).items() if place in wanted}
    results = summarize(
        plan,
        samples,
        grader=grading.grader_of(plan),
        timing=timing,
        provenance=provenance.collect(command),
        warnings=warnings,
    )
    write_atomically(folder / RESULTS_FILE, results.model_dump_json(indent=2) + "\n")
    write_html(results, folder, samples, plan.benchmark)
    return results
