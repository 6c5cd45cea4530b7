"""math-verify as it comes, in the killable worker: what others' harnesses would make of the same responses."""

from __future__ import annotations

import time

from eval.schema import Status, Verdict
from sat_verl.grading import verify

_STATUS: dict[str, Status] = {"equal": "correct", "different": "wrong", "answer_unparsed": "no_answer"}


def math_verify_verdict(response: str | None, gold: str | list[str], cut: bool, deadline_s: float) -> Verdict:
    """``verify(parse(gold), parse(response))`` with math-verify's own extraction and defaults.

    Args:
        response: the whole response; None: the request failed.
        gold: the gold answer, or several of which any may match; put between dollar signs unless it is delimited.
        cut: whether the response was cut at the length limit.
        deadline_s: seconds of CPU time per gold.

    Returns:
        The verdict, with method "math_verify_default".

    Raises:
        sat_verl.grading.MathVerifyMissingError: if math-verify is not installed.
    """
    if response is None:
        return Verdict(status="request_error", detail="no_response")
    started, result = time.monotonic(), Verdict(status="wrong")
    for form in [gold] if isinstance(gold, str) else gold:
        delimited = any(mark in form for mark in ("$", "\\(", "\\[", "\\boxed"))
        reply = verify.whole(form if delimited else f"${form}$", response, deadline_s)
        status = _STATUS.get(str(reply["verdict"]), "grader_error")
        if status == "no_answer" and cut:
            status = "truncated"
        result = Verdict(
            status=status,
            answer=str(reply.get("answer") or "") or None,
            method="math_verify_default",
            detail=str(reply["detail"]) or ("" if status != "grader_error" else str(reply["verdict"])),
        )
        if status == "correct":
            break
    return result.model_copy(update={"seconds": round(time.monotonic() - started, 6)})
