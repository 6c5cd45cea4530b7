"""The reward function: one for the synthetic tasks and for real mathematics data.

verl loads it by ``reward.custom_reward_function.path=pkg://sat_verl.reward`` and
``reward.custom_reward_function.name=compute_score``, and calls it in threads of its reward loop workers. Options go
into ``reward.custom_reward_function.reward_kwargs``.

**How a response ended.** verl decodes the response with ``skip_special_tokens=True`` and tells the reward function
neither lengths nor why generation stopped (its vLLM server reports "stop" and "length" alike as "completed"). The
recipes' agent loop worker (:mod:`sat_verl.rollout`) therefore adds ``finish_reason`` to ``extra_info``, so that a
response that was cut at the length limit counts here for what it counts for in the evaluation (see
:mod:`sat_verl.grading.sources`). Where nothing says how a response ended, it is graded as a finished one: a complete
box or a complete last line counts, and for the chain task the last digit.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

from sat_verl.grading import DEFAULT_DEADLINE_S, Grade, canonical, grade_sample

logger = logging.getLogger(__name__)

MAX_PRED_CHARS = 200

_VERL_KWARGS = frozenset({"reward_router_address", "reward_model_tokenizer"})

_errors = 0
_errors_lock = threading.Lock()


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
    *,
    policy: str = "strict",
    deadline_s: float = DEFAULT_DEADLINE_S,
    think_open: bool = False,
    correct_score: float = 1.0,
    wrong_score: float = 0.0,
    **kwargs: Any,
) -> dict[str, float | str]:
    """Score one response, in the form that verl expects.

    Args:
        data_source: ``sat_verl/chain`` (the last digit counts), ``sat_verl/sort`` (the whole response counts), or
            anything else, ``sat_verl/arithmetic`` included, for mathematics.
        solution_str: the decoded response.
        ground_truth: the gold answer: string, number, or list of alternatives.
        extra_info: of the sample; a ``finish_reason`` in it is used, the rest ignored.
        policy: "strict" or "lenient" extraction.
        deadline_s: seconds of CPU time that math-verify may take for one answer.
        think_open: the prompt template already opens ``<think>``.
        correct_score: score of a correct response.
        wrong_score: score of any other.
        **kwargs: what verl's reward managers add; unused.

    Returns:
        The same keys for every call and every data source, as verl demands. Floats, which verl averages in
        validation: ``score``, ``acc`` (1 if correct), ``no_answer`` (1 if none was found, cut or not) and
        ``grader_error`` (1 if nobody knows whether the response is right; it then scores like a wrong one). Strings,
        which verl writes to the rollout dump: ``pred`` (the answer, by which verl takes its majority vote; empty
        without one) and ``verdict`` (status, method and detail).

    Raises:
        ValueError: for an unknown policy or an unknown ``sat_verl/`` data source.
        TypeError: for an unknown keyword, most likely a misspelt reward option.
        MathVerifyMissingError: if the comparison needs math-verify and it is not installed.
    """
    unknown = set(kwargs) - _VERL_KWARGS
    if unknown:
        raise TypeError(f"compute_score got unknown options {sorted(unknown)}")
    reason = extra_info.get("finish_reason") if isinstance(extra_info, Mapping) else None
    result = grade_sample(
        data_source,
        solution_str,
        ground_truth,
        policies=(policy,),
        finish_reason=reason if isinstance(reason, str) else None,
        deadline_s=deadline_s,
        think_open=think_open,
    )[policy]
    if result.status == "grader_error":
        _report(data_source, ground_truth, result)
    correct = result.status == "correct"
    return {
        "score": float(correct_score if correct else wrong_score),
        "acc": float(correct),
        "no_answer": float(result.status in ("no_answer", "truncated")),
        "grader_error": float(result.status == "grader_error"),
        "pred": canonical(result.answer, result.method)[:MAX_PRED_CHARS],
        "verdict": " ".join(part for part in (result.status, result.method, result.detail) if part),
    }


def _report(data_source: str, ground_truth: Any, result: Grade) -> None:
    """Log the 1st, 2nd, 4th, 8th ... grader error, without the response: a bad data set must not flood the log."""
    global _errors
    with _errors_lock:
        _errors += 1
        count = _errors
    if count & (count - 1) == 0:
        logger.warning(
            "grader error number %d in this process: %s (data source %s, gold %.80r)",
            count,
            result.detail,
            data_source,
            ground_truth,
        )
