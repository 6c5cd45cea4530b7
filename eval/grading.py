"""The grader as the harness uses it: :mod:`sat_verl.grading`, the code of the reward function, with time and name."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from eval.schema import POLICIES, Policy, Problem, Verdict
from eval.storage import Plan
from sat_verl import grading

LIBRARIES = ("math-verify", "latex2sympy2_extended", "sympy")


def grade_response(
    response: str | None,
    gold: Any,
    *,
    policy: Policy = "strict",
    domain: str | None = None,
    finish_reason: str | None = None,
    limit_s: float | None = None,
    deadline_s: float = grading.DEFAULT_DEADLINE_S,
    think_open: bool = False,
    data_source: str = "math",
) -> Verdict:
    """Grade one response.

    Args:
        response: the text that the model produced; None: the request failed.
        gold: the acceptable answer: a string (bare, in ``$...$`` or in a ``\\boxed{}``), a number, or a list of which
            any may match.
        policy: "strict" or "lenient".
        domain: "aime" if the problem asks for an integer, so that an answer nobody can settle is wrong and no grader
            error; "math" or None for anything.
        finish_reason: "length" marks a response that was cut; None: unknown, graded as finished.
        limit_s: seconds by the clock within which there is a verdict, the start of the worker included.
        deadline_s: seconds of CPU time for one comparison by math-verify; a busy machine does not use them up.
        think_open: the prompt already opened ``<think>``.
        data_source: ``sat_verl/chain`` and ``sat_verl/sort`` for the recipes' digit tasks, anything else for
            mathematics.

    Returns:
        The verdict; its status is exactly one of :data:`eval.schema.STATUSES`.

    Raises:
        ValueError: for an unknown policy, domain or ``sat_verl/`` data source.
        sat_verl.grading.MathVerifyMissingError: if a comparison needs math-verify and it is not installed.
    """
    return verdicts(
        response,
        gold,
        policies=(policy,),
        domain=domain,
        finish_reason=finish_reason,
        limit_s=limit_s,
        deadline_s=deadline_s,
        think_open=think_open,
        data_source=data_source,
    )[policy]


def verdicts(
    response: str | None,
    gold: Any,
    *,
    policies: Sequence[Policy] = POLICIES,  # type: ignore[assignment]
    domain: str | None = None,
    finish_reason: str | None = None,
    limit_s: float | None = None,
    deadline_s: float = grading.DEFAULT_DEADLINE_S,
    think_open: bool = False,
    data_source: str = "math",
) -> dict[Policy, Verdict]:
    """Grade one response under several policies; an answer that they share is compared once.

    Args:
        response: as in :func:`grade_response`, like everything else.
        gold: the acceptable answer or answers.
        policies: "strict", "lenient" or both.
        domain: "aime", "math" or None.
        finish_reason: "length" marks a response that was cut.
        limit_s: seconds by the clock for all policies together.
        deadline_s: seconds of CPU time for one comparison by math-verify.
        think_open: the prompt already opened ``<think>``.
        data_source: by which the recipes' digit tasks are known.

    Returns:
        The verdict of each policy. ``seconds`` is the time for all of them, shared out equally.

    Raises:
        ValueError: for an unknown policy, domain or ``sat_verl/`` data source.
        sat_verl.grading.MathVerifyMissingError: if a comparison needs math-verify and it is not installed.
    """
    started = time.monotonic()
    grades = grading.grade_sample(
        data_source,
        response,
        gold,
        policies=policies,
        domain=domain,
        finish_reason=finish_reason,
        limit_s=limit_s,
        deadline_s=deadline_s,
        think_open=think_open,
    )
    seconds = round((time.monotonic() - started) / max(len(policies), 1), 6)
    return {policy: _verdict(grades[policy], seconds) for policy in policies}


def verdicts_under(plan: Plan, problem: Problem, response: str | None, finish_reason: str) -> dict[Policy, Verdict]:
    """Grade a sample of a run as its plan says: what ``python -m eval`` and ``eval.regrade`` both call.

    Raises:
        sat_verl.grading.MathVerifyMissingError: as :func:`verdicts`.
    """
    return verdicts(
        response,
        problem.gold,
        domain=plan.benchmark.domain,
        finish_reason=finish_reason,
        deadline_s=plan.deadline_s,
        think_open=plan.think_open,
        data_source=problem.data_source,
    )


def grader_of(plan: Plan) -> dict[str, Any]:
    """:func:`grader_identity` with the settings that decide verdicts: what ``results.json`` names as the grader."""
    return grader_identity() | {"deadline_s": plan.deadline_s, "domain": plan.benchmark.domain}


def grader_digest(plan: Plan) -> str:
    """A short name of :func:`grader_of`, which every sample carries."""
    return hashlib.sha256(json.dumps(grader_of(plan), sort_keys=True).encode()).hexdigest()[:16]


def _verdict(grade: grading.Grade, seconds: float) -> Verdict:
    answer = grade.answer
    if answer is not None:
        # A response may end in half of a surrogate pair, which no UTF-8 file can hold.
        answer = answer.encode("utf-8", "replace").decode("utf-8")
    return Verdict(
        status=grade.status,
        answer=answer,
        method=grade.method,
        source=grade.source,
        detail=grade.detail,
        seconds=seconds,
    )


def grader_identity() -> dict[str, Any]:
    """What decides the verdicts: two runs with equal identities were graded alike.

    Returns:
        ``name``, ``version``, ``sources_sha256`` (of the grading package) and ``libraries`` with their versions.
    """
    folder = Path(grading.__file__).parent
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    libraries = {}
    for name in LIBRARIES:
        try:
            libraries[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            libraries[name] = "not installed"
    return {
        "name": "sat_verl.grading",
        "version": metadata.version("sat-verl"),
        "sources_sha256": digest.hexdigest(),
        "libraries": libraries,
    }
