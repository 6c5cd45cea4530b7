"""Grade by data source: the recipes' tasks that answer in bare digits, and mathematics.

The one way from a response to its verdict, for the reward function and for the evaluation.

**Cut responses**, in both policies. Mathematics: a box or an ``<answer>`` tag that was closed before the cut counts,
and so does a statement that more text follows; whatever the cut may have shortened does not (``truncated``). Digits:
nothing marks the answer but that the response ends there, and a cut response has no end, so it is ``truncated``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from sat_verl.grading import normalize
from sat_verl.grading.extract import POLICIES
from sat_verl.grading.grader import Grade, grade_policies, is_cut

CHAIN, SORT, ARITHMETIC = "sat_verl/chain", "sat_verl/sort", "sat_verl/arithmetic"

_LAST_DIGIT = re.compile(r"([0-9])\s*\Z")


def grade_sample(
    data_source: str,
    response: str | None,
    gold: Any,
    *,
    policies: Sequence[str] = POLICIES,
    finish_reason: str | None = None,
    **options: Any,
) -> dict[str, Grade]:
    """Grade one response by the rules of its data source.

    Args:
        data_source: ``sat_verl/chain`` (the last digit counts), ``sat_verl/sort`` (the whole response counts), or
            anything else, ``sat_verl/arithmetic`` included, for mathematics.
        response: the decoded response; None: the request failed.
        gold: the gold answer, or several of which any may match.
        policies: extraction policies for mathematics; the digits have one rule, which is the verdict of each.
        finish_reason: of the request, if known; "length" marks a cut response.
        **options: of :func:`~sat_verl.grading.grader.grade_policies`, for mathematics.

    Returns:
        The grade of each policy.

    Raises:
        ValueError: for an unknown policy, domain or ``sat_verl/`` data source.
        MathVerifyMissingError: if the comparison needs math-verify and it is not installed.
    """
    if data_source in (CHAIN, SORT):
        unknown = set(policies) - set(POLICIES)
        if unknown:
            raise ValueError(f"policy must be one of {POLICIES}, not {unknown.pop()!r}")
        return dict.fromkeys(policies, _grade_digits(data_source, response, gold, finish_reason))
    if data_source.startswith("sat_verl/") and data_source != ARITHMETIC:
        raise ValueError(f"unknown data source {data_source!r}; known are {CHAIN}, {SORT} and {ARITHMETIC}")
    return grade_policies(response, gold, policies=policies, finish_reason=finish_reason, **options)


def _grade_digits(data_source: str, response: str | None, gold: Any, finish_reason: str | None) -> Grade:
    expected = str(gold).strip()
    if response is None:
        return Grade("request_error", detail="no_response")
    if not expected.isdecimal() or (data_source == CHAIN and len(expected) != 1):
        return Grade("grader_error", detail="unusable_gold")
    if is_cut(finish_reason):
        return Grade("truncated", detail="cut")
    if data_source == CHAIN:
        last = _LAST_DIGIT.search(response[-100:])
        answer = last.group(1) if last else ""
    else:
        answer = response.strip()
    if not answer:
        return Grade("no_answer", detail="no_statement")
    return Grade("correct" if answer == expected else "wrong", answer, "digits", "whole")


def canonical(answer: str | None, method: str = "") -> str:
    """The answer in the form that makes equal answers equal votes.

    Args:
        answer: of a :class:`Grade`.
        method: of the same; digits are left as they are.

    Returns:
        The canonical integer if it is one, else the answer as written; empty for None.
    """
    answer = answer or ""
    return (normalize.integer(answer) if method != "digits" else None) or answer
