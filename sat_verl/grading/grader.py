"""Grade one response against a gold answer."""

from __future__ import annotations

import json
import math
import numbers
import re
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from sat_verl.grading import boxes, latex, normalize, verify
from sat_verl.grading import text as layout
from sat_verl.grading.extract import POLICIES, extract

Status = Literal["correct", "wrong", "no_answer", "truncated", "request_error", "grader_error"]
DOMAINS = ("math", "aime")

_IN_BASE = re.compile(r"[({]?([0-9A-F]+)[)}]?_(?:\{(?:\\text\{)?(\d+)\}*|(\d+))")
_ASSIGNMENT = re.compile(r"\s*\$?\\?[A-Za-z]+(?:_\{?\w+\}?)?\s*=")
_CUT = frozenset({"length", "max_tokens", "max_length", "truncated"})
# Not the answer's fault. Anything else that keeps math-verify from a verdict does not happen to a written-out integer.
_NOT_THE_ANSWER = frozenset({"clock", "worker_died", "gold_unparsed"})
_AIME_DEADLINE_S = 2.0
# Left of a limit by the clock for ending a stuck worker and for whatever else the machine does.
_MARGIN = 0.1


@dataclass(frozen=True)
class Grade:
    """The verdict on one response.

    Attributes:
        status: "correct", "wrong", "no_answer" (finished without committing to one), "truncated" (the same, but cut
            at the length limit), "request_error" (there is no response) or "grader_error" (nobody knows: unusable
            gold, a comparison that could not be carried through). The last two say nothing about the model and must be
            reported, not averaged in.
        answer: the extracted answer as written, or None.
        method: what decided: "integer", "decimal", "words", "text", "math_verify", or "none" without a comparison; the
            reward function adds "digits" for its synthetic tasks.
        source: where the answer stood ("box", "answer_tag", "answer_line", "whole", "prose", "none").
        detail: the reason in one word where there is one (of :class:`~sat_verl.grading.extract.Extraction`,
            :class:`~sat_verl.grading.verify.Verdict`, "unusable_gold", "no_response").
    """

    status: Status
    answer: str | None = None
    method: str = "none"
    source: str = "none"
    detail: str = ""


def is_cut(finish_reason: str | None) -> bool:
    """Whether a finish reason says that the response was cut at the length limit.

    Args:
        finish_reason: of the request; None if unknown, which counts as finished.

    Returns:
        True for "length" and its other names.
    """
    return finish_reason in _CUT


def grade(response: str | None, gold: Any, *, policy: str = "strict", **options: Any) -> Grade:
    """Grade ``response`` against ``gold`` under one policy.

    Args:
        response: the text that the model produced.
        gold: the acceptable answers.
        policy: "strict" or "lenient" (see :mod:`sat_verl.grading.extract`).
        **options: of :func:`grade_policies`.

    Returns:
        The grade.

    Raises:
        ValueError: for an unknown policy or domain.
        MathVerifyMissingError: if a comparison needs math-verify and it is not installed.
    """
    return grade_policies(response, gold, policies=(policy,), **options)[policy]


def grade_policies(
    response: str | None,
    gold: Any,
    *,
    policies: Sequence[str] = POLICIES,
    finish_reason: str | None = None,
    deadline_s: float = verify.DEFAULT_DEADLINE_S,
    limit_s: float | None = None,
    think_open: bool = False,
    domain: str | None = None,
) -> dict[str, Grade]:
    """Grade ``response`` against ``gold`` under several policies; an answer that they share is compared once.

    Plain integers, decimals, words and identical formulas are compared here; anything else goes to math-verify in
    a worker process (see :mod:`sat_verl.grading.verify`).

    Args:
        response: the text that the model produced; None: the request failed.
        gold: a string (bare, in ``$...$``, or with a ``\\boxed{}``), an int, a float, or a list, tuple or array of
            alternatives of which any may match. A JSON list of strings counts as such a list.
        policies: "strict", "lenient" or both (see :mod:`sat_verl.grading.extract`).
        finish_reason: of the request, if known; "length" marks a cut response.
        deadline_s: seconds of CPU time that math-verify may take for one comparison.
        limit_s: seconds by the clock for everything, the start of the worker included; a comparison that is not done
            by then is a grader error. None: no limit beyond that of the comparisons.
        think_open: the prompt already opened ``<think>``.
        domain: "aime" if the problem asks for an integer: an answer that math-verify cannot settle (too large, too
            long, out of CPU time) is then wrong, since the right one can be written as an integer. All else is as for
            "math", which None stands for.

    Returns:
        The grade of each policy.

    Raises:
        ValueError: for an unknown policy or domain.
        MathVerifyMissingError: if a comparison needs math-verify and it is not installed.
    """
    end = None
    if limit_s is not None:
        end = time.monotonic() + limit_s * (1 - _MARGIN)
        deadline_s = min(deadline_s, limit_s / 2)
    if domain not in (None, *DOMAINS):
        raise ValueError(f"domain must be one of {DOMAINS}, not {domain!r}")
    golds = gold_forms(gold)
    integers = domain == "aime" and all(normalize.integer(form) is not None for form in golds)
    if integers:
        deadline_s = min(deadline_s, _AIME_DEADLINE_S)
    grades: dict[str, Grade] = {}
    known: dict[str, tuple[Status, str, str]] = {}
    for policy in policies:
        if response is None:
            grades[policy] = Grade("request_error", detail="no_response")
            continue
        found = extract(response, policy=policy, truncated=is_cut(finish_reason), think_open=think_open)
        if not golds:
            grades[policy] = Grade("grader_error", found.answer, source=found.source, detail="unusable_gold")
        elif found.answer is None:
            grades[policy] = Grade("truncated" if is_cut(finish_reason) else "no_answer", detail=found.reason)
        else:
            if found.answer not in known:
                known[found.answer] = _compare_any(golds, found.answer, deadline_s, end, integers)
            status, method, detail = known[found.answer]
            grades[policy] = Grade(status, found.answer, method, found.source, detail)
    return grades


def _compare_any(
    golds: Sequence[str], answer: str, deadline_s: float, end: float | None, integers: bool
) -> tuple[Status, str, str]:
    """Any gold may match; an error is only forgotten for a match."""
    result: tuple[Status, str, str] = ("wrong", "none", "")
    for gold in golds:
        found = compare(gold, answer, deadline_s, end)
        if integers and found[0] == "grader_error" and found[2] not in _NOT_THE_ANSWER:
            found = ("wrong", *found[1:])
        if found[0] == "correct":
            return found
        if result[0] == "wrong":
            result = found
    return result


def gold_forms(gold: Any) -> list[str]:
    """The acceptable answers that ``gold`` names.

    Args:
        gold: see :func:`grade`.

    Returns:
        The bare forms; empty if the gold cannot be used (None, empty, nan, infinite, a bool, another type).
    """
    if isinstance(gold, bool) or gold is None:
        return []
    if isinstance(gold, numbers.Integral):
        return [str(int(gold))]
    if isinstance(gold, numbers.Real):
        value = float(gold)
        return [] if not math.isfinite(value) else [str(int(value)) if value.is_integer() else repr(value)]
    if hasattr(gold, "tolist"):
        gold = gold.tolist()
        return gold_forms(gold)
    if isinstance(gold, str):
        return _gold_text(gold)
    if isinstance(gold, Iterable) and not isinstance(gold, bytes | dict):
        forms = [gold_forms(item) for item in gold]
        return [form for each in forms for form in each] if all(forms) else []
    return []


def _gold_text(gold: str) -> list[str]:
    text = gold.strip()
    if text.startswith('["') or text.startswith("['"):
        try:
            items = json.loads(text)
        except ValueError:
            items = None
        if isinstance(items, list) and all(isinstance(item, str) for item in items):
            return gold_forms(items)
    found = boxes.scan(text).complete
    if found:
        text = ", ".join(box.content for box in boxes.last_group(text, found))
    text = layout.strip_delimiters(text)
    return [] if text.lower() in ("", "nan", "inf", "-inf", "infinity", "none", "null") else [text]


def compare(gold: str, answer: str, deadline_s: float, end: float | None = None) -> tuple[Status, str, str]:
    """Compare an extracted answer with one gold answer.

    Args:
        gold: bare gold answer.
        answer: bare extracted answer.
        deadline_s: seconds of CPU time that math-verify may take.
        end: value of ``time.monotonic()`` at which it must be done.

    Returns:
        status, method and detail, as in :class:`Grade`.

    Raises:
        MathVerifyMissingError: if math-verify is needed and not installed.
    """
    gold, gold_percent = layout.split_percent(gold)
    answer, answer_percent = layout.split_percent(answer)
    percent = gold_percent != answer_percent
    quick = _compare_plain(gold, answer)
    if quick is not None and (quick[0] == "correct" or not percent):
        return quick
    status, method, detail = quick if quick is not None else _compare_formulas(gold, answer, deadline_s, end)
    if status == "correct" or not percent:
        return status, method, detail
    # A percent sign on one side only: "25%" may also mean 0.25. The bare reading has just failed.
    scaled_gold, scaled_answer = _over_100(gold, gold_percent), _over_100(answer, answer_percent)
    second = _compare_formulas(scaled_gold, scaled_answer, deadline_s, end)
    return second if status == "wrong" else (status, method, detail)


def _over_100(text: str, percent: bool) -> str:
    return rf"\frac{{{text}}}{{100}}" if percent else text


def _compare_plain(gold: str, answer: str) -> tuple[Status, str, str] | None:
    """Compare without sympy; None if that takes more than plain values."""
    expected, found = normalize.integer(gold), normalize.integer(answer)
    # In a gold answer "x = 5" names a value, but "x + y = 5" is an equation, and so may "x = 5" be for "y = 5".
    named = "=" not in gold or ("=" not in answer and _ASSIGNMENT.match(gold) is not None)
    if expected is not None and found is not None and named:
        return ("correct" if expected == found else "wrong"), "integer", ""
    if layout.same_text(gold, answer):
        return "correct", "text", ""
    based = [_IN_BASE.fullmatch(layout.strip_delimiters(text)) for text in (gold, answer)]
    if any(based):
        return _compare_in_base(gold, answer)
    value, other = normalize.decimal(gold), normalize.decimal(answer)
    if value is not None and other is not None and named:
        if value == other:
            return "correct", "decimal", ""
        if expected is not None:
            return "wrong", "decimal", ""
    return _compare_words(gold, answer)


def _digits_and_base(text: str) -> tuple[str, str]:
    match = _IN_BASE.fullmatch(layout.strip_delimiters(text))
    if match is None:
        return normalize.integer(text) or "", ""
    return match[1].lstrip("0"), match[2] or match[3]


def _compare_in_base(gold: str, answer: str) -> tuple[Status, str, str]:
    """Compare the digits, and the bases if both name one: the problem has asked for a base, math-verify drops it."""
    (digits, base), (other, other_base) = _digits_and_base(gold), _digits_and_base(answer)
    same = digits == other and (not base or not other_base or base == other_base)
    return ("correct" if same else "wrong"), "text", ""


def _compare_words(gold: str, answer: str) -> tuple[Status, str, str] | None:
    expected, found = layout.words(gold), layout.words(answer)
    if expected is None:
        return None
    if expected == found:
        return "correct", "words", ""
    # "xy" may be a product; three letters and more, anything in \text{}, and two single letters are names.
    if "\\text" in gold or (found is not None and len(expected) != 2) or len(expected) > 3:
        return "wrong", "words", ""
    return None


def _compare_formulas(gold: str, answer: str, deadline_s: float, end: float | None) -> tuple[Status, str, str]:
    keep_commas = latex.is_list(gold) or latex.is_list(answer)
    verdict = verify.compare(
        latex.fragment(gold, keep_commas=keep_commas), latex.fragment(answer, keep_commas=keep_commas), deadline_s, end
    )
    status: Status = {"equal": "correct", "different": "wrong"}.get(verdict.kind, "grader_error")  # type: ignore[assignment]
    return status, "math_verify", verdict.detail
