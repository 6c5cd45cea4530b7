"""Find the answer that a response commits to.

Only the text after the last ``</think>`` counts; a ``<think>`` that never closes means there is no answer. There the
following places are tried in order, and the first one found decides (the name is reported as ``source``):

``box``
    the last complete ``\\boxed{}`` or ``\\fbox{}`` that is not an empty echo of the instruction. If an unfinished box
    follows it, there is no answer: the earlier one was withdrawn. Boxes joined by list separators are one answer. A
    later, clean answer statement (next two) overrides the box.
``answer_tag``
    a closed ``<answer>...</answer>`` or ``<final_answer>...</final_answer>``.
``answer_line``
    a statement such as ``Answer: 204``, ``**Final Answer**`` over ``204``, ``The final answer is $204$.``,
    ``#### 204`` or ``答案：204``, in several languages. The last such statement decides, even if it cannot be read.
``whole``
    the final part is nothing but one delimited formula, such as ``$x = 3$``.

``strict`` wants an answer line that opens its line, is clean (a value, not a sentence) and ends the text. ``lenient``
also accepts a statement anywhere and inside prose (unless it is conditional or taken back), a bare expression as the
whole final part, a lone number in the closing sentence (``prose``), a box whose backslash or last brace is missing, and
a complete box inside unclosed reasoning. Neither credits text that was cut: with ``truncated`` only finished boxes and
tags count, and statements followed by more text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from sat_verl.grading import boxes, normalize
from sat_verl.grading import text as layout

POLICIES = ("strict", "lenient")

_THINK_TAG = re.compile(r"<(/?)think(?:ing)?>", re.IGNORECASE)
_ANSWER_TAG = re.compile(
    r"<(?:final_?)?answer>((?:(?!<(?:final_?)?answer>).){0,2000}?)</(?:final_?)?answer>", re.IGNORECASE | re.DOTALL
)
_LABEL = re.compile(
    r"(?:(?<![A-Za-z])(?:final\s+answer|answer|antwort|endergebnis|réponse|respuesta|risposta|resposta)(?![A-Za-z])"
    r"(?:\s+(?:finale?|definitiva|définitive)(?![A-Za-z]))?"
    r"|ответ|最终答案|答案|答え|解答|(?<![\u4e00-\u9fff])答(?=\s?[:：])|정답|(?<![\uac00-\ud7a3])답)"
    r"(?:[\s*_]{0,20}(?:[:：=]|[–—-]\s|(?:is|are|ist|lautet|est(?:\s+donc)?|es|è|é)\b[\s*_]{0,20}:?|是|为|為|は[、,]?|은)"
    r"|[*_ \t]{0,20}(?=\n|$))"
    r"|^####(?=\s?[-+]?[$\\]*\d[\d,./]*\s*$)",
    re.IGNORECASE | re.MULTILINE,
)
# What may stand before the label on its line in a strict statement, and after its value up to the end of the text.
_OPENING = re.compile(
    r"(?:[\s*_#>`~$\-\[\](){}\\.,:：，、]|text(?:bf|it|rm)?|math(?:bf|rm)|so|thus|hence|therefore|then|and|the|my|our|correct"
    r"|is|final|die|also|daher|endgültige|richtige|la|donc|ainsi|por|lo|tanto|así|o|a|因此|所以|故|最終的な|最终|よって|したがって"
    r"|ゆえに|以上より|따라서|그러므로|최종)*",
    re.IGNORECASE,
)
_CLOSING = re.compile(r"(?:[\s*_#`~$\-.。!]|\\[\])]|</answer>|</?s>|I hope it is correct)*", re.IGNORECASE)
_HOPE = re.compile(r"\s*I hope (?:it|this) is correct.*", re.IGNORECASE | re.DOTALL)
_VALUE_OPENING = re.compile(r"(?:\n\s*>|[\s*_#`~:：}]|\\\[|\\\(|\$\$)*")
_ENDING = re.compile(r"\s*(?:です|である|だ|となります|となる|になります|になる|입니다|이다)[\s。.]*$")
_SENTENCE_END = re.compile(r"(?<=[^\s.])(?:[.!?](?=\s|$)|[。！？])")
_MATH_SEGMENT = re.compile(r"\$\$?([^$]{1,500})\$\$?|\\\(((?:(?!\\\)).){1,500})\\\)|\\\[((?:(?!\\\]).){1,500})\\\]")
_WHOLE = re.compile(
    r"\s*(?:\$\$([^$]+)\$\$|\$([^$]+)\$|\\\[((?:(?!\\\]).)+)\\\]|\\\(((?:(?!\\\)).)+)\\\))[\s.。]*", re.DOTALL
)
_LEADING_NUMBER = re.compile(r"[-+−]?\$?\d[\d,]*(?:\.\d+)?(?:[eE][-+]?\d+)?(?=[\s,;.]|$)")
_NUMBER = re.compile(r"[-−]?(?<![\w.])\d[\d,]*(?:\.\d+)?")
_COPULA_NUMBER = re.compile(
    r"(?:\b(?:is|are|equals|totals?|get|have|gives)\b|[=:])\s*\$?([-−]?\d[\d,]*(?:\.\d+)?)", re.IGNORECASE
)
_HEDGE = re.compile(r"\b(?:not|maybe|might|perhaps|probably|or|could|should|if|but|suppose|check|try)\b", re.IGNORECASE)


# A statement that begins or goes on like this states nothing.
_CONDITION = re.compile(r"\b(?:if|suppose|assuming|unless|whether|wenn|si|se)\b|如果|假设|もし|만약", re.IGNORECASE)
_DOUBT = re.compile(
    r"\b(?:maybe|perhaps|probably|possibly|wait|hmm|actually|less|more|fewer|greater|or|times|no|not|if|unless)\b|\?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Extraction:
    """What :func:`extract` found.

    Attributes:
        answer: the answer as written (delimiters removed), or None.
        source: where it stood: "box", "answer_tag", "answer_line", "whole", "prose" or "none".
        reason: why there is no answer: "think_unclosed", "box_unfinished", "statement_unclear", "cut" or
            "no_statement"; empty if there is one.
    """

    answer: str | None
    source: str
    reason: str = ""


def _none(reason: str) -> Extraction:
    return Extraction(None, "none", reason)


def extract(response: str, *, policy: str = "strict", truncated: bool = False, think_open: bool = False) -> Extraction:
    """Find the answer of ``response`` (see the module's docstring for the rules).

    Args:
        response: the whole response.
        policy: "strict" or "lenient".
        truncated: the response is known to have been cut at the length limit.
        think_open: the prompt already opened ``<think>``, so that a response without ``</think>`` is all reasoning.

    Returns:
        The answer with its place, or the reason why there is none.

    Raises:
        ValueError: for an unknown policy.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy must be one of {POLICIES}, not {policy!r}")
    lenient = policy == "lenient"
    text, unclosed = final_part(response, think_open=think_open)
    if unclosed and not lenient:
        return _none("think_unclosed")
    found = boxes.scan(text, loose=lenient)
    real = tuple(box for box in found.complete if not boxes.is_placeholder(box.content))
    if found.broken_start is not None and (not real or found.broken_start > real[-1].start):
        content = _clean(found.broken_content.split("\n", 1)[0])
        if lenient and not truncated and not unclosed and content:
            return Extraction(content, "box")
        return _none("box_unfinished")
    if real:
        group = boxes.last_group(text, real)
        parts = dict.fromkeys(box.content.strip() for box in group)
        later = _none("") if unclosed else _stated(text, truncated=truncated, lenient=False, start=real[-1].end)
        return later if later.answer is not None else Extraction(", ".join(parts), "box")
    if unclosed:
        return _none("think_unclosed")
    return _without_box(text, truncated=truncated, lenient=lenient)


def final_part(response: str, *, think_open: bool = False) -> tuple[str, bool]:
    """The text after the last ``</think>``, and whether reasoning is still open there.

    Args:
        response: the whole response.
        think_open: the prompt already opened the reasoning.

    Returns:
        ``(text, unclosed)``; with ``unclosed`` the text is the open reasoning itself.
    """
    closed_at, open_at = 0, (0 if think_open else None)
    for tag in _THINK_TAG.finditer(response):
        if tag.group(1):
            closed_at, open_at = tag.end(), None
        elif open_at is None:
            open_at = tag.end()
    if open_at is not None:
        return response[open_at:], True
    return response[closed_at:], False


def _without_box(text: str, *, truncated: bool, lenient: bool) -> Extraction:
    stated = _stated(text, truncated=truncated, lenient=lenient)
    if stated.answer is not None or stated.reason:
        return stated
    whole = _WHOLE.fullmatch(text) if len(text) <= 2000 else None
    if whole:
        return Extraction(_clean(next(g for g in whole.groups() if g is not None)), "whole")
    if lenient and not truncated:
        return _closing_words(text)
    return _none("cut" if truncated else "no_statement")


def _stated(text: str, *, truncated: bool, lenient: bool, start: int = 0) -> Extraction:
    """The last explicit statement after ``start``; no answer and no reason if nothing states one."""
    tag = _last(_ANSWER_TAG, text, start)
    if tag and _clean(tag.group(1)):
        return _value(tag.group(1), "answer_tag", lenient=lenient)
    label = _last_label(text, start)
    if label is None:
        return _none("")
    opening = _VALUE_OPENING.match(text, label.end())
    assert opening is not None
    line = text[opening.end() :].split("\n", 1)[0]
    rest = text[opening.end() + len(line) :]
    if not line.strip():
        return _none("cut" if truncated else "statement_unclear")
    if truncated and not rest.strip():
        return _none("cut")
    if len(line) > 2000:
        return _none("statement_unclear")
    if not lenient and not (_opens_line(text, label.start()) and len(rest) <= 500 and _CLOSING.fullmatch(rest)):
        return _none("statement_unclear")
    if lenient and _CONDITION.search(
        text[max(text.rfind("\n", 0, label.start()) + 1, label.start() - 60) : label.start()]
    ):
        return _none("statement_unclear")
    return _value(line, "answer_line", lenient=lenient)


def _last_label(text: str, start: int) -> re.Match[str] | None:
    found = None
    for match in _LABEL.finditer(text, start):
        # A bare word at the end of its line is a heading only if nothing else stands on that line.
        if (
            match.group()[-1:] in ":：=是为為は、,은-–—#éè"
            or match.group()[-1:].isspace()
            or _opens_line(text, match.start())
        ):
            found = match
    return found


def _opens_line(text: str, position: int) -> bool:
    before = text[text.rfind("\n", 0, position) + 1 : position]
    return len(before) <= 80 and _OPENING.fullmatch(before) is not None


def _value(raw: str, source: str, *, lenient: bool) -> Extraction:
    raw = _ENDING.sub("", _HOPE.sub("", raw))
    value = _clean(raw)
    if value.endswith("}") and value.count("{") < value.count("}"):
        value = _clean(value[:-1])  # of the \\textbf{ that the label stands in
    if value and (_is_clean(value) or source == "answer_tag"):
        return Extraction(value, source)
    if lenient and value:
        sentence = _clean(_SENTENCE_END.split(value, maxsplit=1)[0])
        segments = list(_MATH_SEGMENT.finditer(raw))
        number = _LEADING_NUMBER.match(value)
        if _is_clean(sentence):
            return Extraction(sentence, source)
        if len(segments) == 1:
            return Extraction(_clean(segments[0].group()), source)
        if number and not segments and not _DOUBT.search(sentence[number.end() :]):
            return Extraction(_clean(number.group()), source)
    return _none("statement_unclear")


def _closing_words(text: str) -> Extraction:
    """Lenient last resort: the whole text is one expression, or the last sentence holds one number and states it."""
    stripped = text.strip()
    mathematical = any(c.isdigit() for c in stripped) or "\\" in stripped
    if mathematical and len(stripped) <= 100 and "\n" not in stripped and _is_clean(_clean(stripped)):
        return Extraction(_clean(stripped), "whole")
    line = stripped.rsplit("\n", 1)[-1][-500:]
    sentences = [s for s in _SENTENCE_END.split(line) if s.strip()]
    if sentences and not line.endswith("?") and not _HEDGE.search(sentences[-1]):
        stated = _COPULA_NUMBER.search(sentences[-1])
        if stated and len(_NUMBER.findall(sentences[-1])) == 1:
            return Extraction(stated.group(1).rstrip(","), "prose")
    return _none("no_statement")


def _is_clean(value: str) -> bool:
    """A value rather than a sentence: a number with a unit, a formula without prose, or up to three plain words."""
    if len(value) > 500 or "boxed" in value:
        return False
    words = layout.prose_words(value)
    if not words or normalize.integer(value) is not None:
        return True
    return len(words) <= 3 and not any(c.isdigit() for c in value)


def _clean(value: str) -> str:
    return layout.strip_delimiters(value)


def _last(pattern: re.Pattern[str], text: str, start: int) -> re.Match[str] | None:
    match = None
    for match in pattern.finditer(text, start):  # noqa: B007
        pass
    return match
