"""Repair a formula before math-verify reads it.

math-verify misreads a number of common forms: it drops what it cannot parse after a malformed root, reads a grouped
number in brackets as a pair, takes a trailing letter for a unit. They are rewritten here so that they mean one thing.
"""

from __future__ import annotations

import re

from sat_verl.grading import normalize
from sat_verl.grading import text as layout

_SYMBOLS = str.maketrans(
    {
        "π": r"\pi ", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "÷": r"\div ", "∞": r"\infty ", "≤": r"\le ",
        "≥": r"\ge ", "≠": r"\ne ", "±": r"\pm ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ",
        "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}",
        "¾": r"\frac{3}{4}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}", "²": "^{2}", "³": "^{3}", "⁄": "/",
    }
)  # fmt: skip
_ROOT = re.compile(r"(?:√|(?<![A-Za-z\\])sqrt|\\sqrt)\s*\(([^()]*)\)")
_ROOT_SIGN = re.compile(r"√\s*(\d+|[A-Za-z])")
_REPEATING = re.compile(r"(\d{0,20})\.(\d{0,20})\\overline\s*\{(\d{1,20})\}")
_INTRODUCTION = re.compile(r"\s*\\(?:text|mathrm|mbox)\s*\{([^{}\d]*)\}\s*[:=]?\s*(?=\S)")
_UNIT = re.compile(
    r"(?<=[\w})\]])\s*(?:\\(?:text(?:rm|bf|it)?|mathrm|mbox)\s*\{\s*[^{}\d]*\}"
    r"|(?<![A-Za-z\\])(?:(?:square|cubic)\s+)?(?:units?|degrees?|(?:centi|milli|kilo)?met(?:er|re)s?|cm|mm|km|inch(?:es)?"
    r"|feet|foot|ft|miles?|seconds?|minutes?|hours?|days?|weeks?|years?|dollars?|cents?|grams?|kg|lit(?:er|re)s?))"
    r"(?:\s*\^\s*(?:[23]|\{\s*[23]\s*\}))?\s*$"
)
_WORDS_WITH_MEANING = re.compile(
    r"\b(?:and|or|if|for|where|mod|not|million|billion|thousand|hundred|undefined|infinity|dozen|i|base|percent)\b",
    re.IGNORECASE,
)
_SCALE = re.compile(r"\s*\\?(?:text\s*\{)?\s*\b(hundred|thousand|million|billion|trillion)\b\s*\}?")
_POWERS = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
_DEGREE = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree(?![A-Za-z])|°)\s*$")
_ANGLE = re.compile(r"(\d+)\s?(?:\^\s?\{?\s?\\circ\s?\}?|\\degree(?![A-Za-z])|°)")
_MIXED = re.compile(r"([-+]?\d{1,9}) (\d{1,9}) ?/ ?(\d{1,9})")
_E_NOTATION = re.compile(r"^([-+]?\d{1,20}(?:\.\d{0,20})?|\.\d{1,20})[eE]([-+]?\d{1,3})$")
_LIST_WORD = re.compile(r"\s*[和或及與与]\s*")
_FRENCH_INTERVAL = re.compile(r"([\[\]])([^\[\](){}]+[,;][^\[\](){}]+)([\[\]])")
_FUNCTION = re.compile(r"(?:sin|cos|tan|cot|sec|csc)")
_REWRITES = (
    (re.compile(r"\\lt(?![A-Za-z])"), "<"),
    (re.compile(r"\\gt(?![A-Za-z])"), ">"),
    (re.compile(r"\\leqslant(?![A-Za-z])|<=(?!=)"), r"\\le "),
    (re.compile(r"\\geqslant(?![A-Za-z])|>=(?!=)"), r"\\ge "),
    (re.compile(r"!="), r"\\ne "),
    (re.compile(r"\\varnothing(?![A-Za-z])"), r"\\emptyset "),
    (re.compile(r"\\(begin|end)\{smallmatrix\}"), r"\\\1{pmatrix}"),
    (re.compile(r"\\begin\{array\}\{[^{}]*\}"), r"\\begin{pmatrix}"),
    (re.compile(r"\\end\{array\}"), r"\\end{pmatrix}"),
    (re.compile(r"[\[(]\s*(\\begin\{pmatrix\}[^()\[\]]*\\end\{pmatrix\})\s*[\])]"), r"\1"),
)
_BRACKET = re.compile(r"[(\[]|\\\{")


def fragment(text: str, *, keep_commas: bool = False) -> str:
    """Rewrite an extracted answer (or a gold answer) so that math-verify reads all of it.

    Args:
        text: the formula.
        keep_commas: the other side is a list, so a comma separates here as well.

    Returns:
        A formula of the same meaning: no delimiters, layout, units or thousands separators.
    """
    text = layout.strip_delimiters(layout.characters(text)).translate(_SYMBOLS)
    text = layout.join_groups(text, keep_commas=keep_commas or _BRACKET.search(text) is not None)
    text = re.sub(r"\\\$|[$€£₹]", "", layout.plain_spaces(text))
    text = _ROOT_SIGN.sub(r"\\sqrt{\1}", _ROOT.sub(r"\\sqrt{\1}", text))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _REPEATING.sub(_repeating_decimal, text)
    text = _LIST_WORD.sub(", ", text)
    mixed = _MIXED.fullmatch(text)
    if mixed:
        text = rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    french = _FRENCH_INTERVAL.fullmatch(text)
    if french and (french[1] == "]" or french[3] == "["):
        text = ("(" if french[1] == "]" else "[") + french[2] + (")" if french[3] == "[" else "]")
    text = _both_signs(_E_NOTATION.sub(r"\1 \\times 10^{\2}", text))
    text = _SCALE.sub(lambda m: rf" \times 10^{{{_POWERS[m[1]]}}} ", text)
    introduction = _INTRODUCTION.match(text)
    if introduction and normalize.introduces(introduction.group(1)):
        text = text[introduction.end() :]
    # A degree sign is a unit, except in the argument of a function, which takes radians.
    if _FUNCTION.search(text):
        text = _ANGLE.sub(r"(\\frac{\1\\pi}{180})", text)
    else:
        text = _DEGREE.sub("", text)
    unit = _UNIT.search(text[-200:])
    if unit and not _WORDS_WITH_MEANING.search(unit.group()):
        text = text[: len(text) - len(unit.group())]
    return text.strip(" ,;").rstrip(" .,;")  # ".5" begins with its point


def _both_signs(text: str) -> str:
    """``\\frac{1 \\pm 2}{3}`` as two formulas; math-verify knows the sign only where nothing encloses it."""
    parts = re.split(r"\\pm(?![A-Za-z])", text)
    if len(parts) != 2 or parts[0].count("{") == parts[0].count("}"):
        return text
    return f"{parts[0]}+{parts[1]}, {parts[0]}-{parts[1]}"


def _repeating_decimal(match: re.Match[str]) -> str:
    whole, fixed, cycle = match.groups()
    numerator = int(whole + fixed + cycle) - int((whole + fixed) or "0")
    return rf"\frac{{{numerator}}}{{{(10 ** len(cycle) - 1) * 10 ** len(fixed)}}}"


def is_list(text: str) -> bool:
    """Whether ``text`` is an unbracketed list of several answers.

    Args:
        text: a formula.

    Returns:
        True if a comma, semicolon, "and" or "or" outside all brackets separates parts.
    """
    if re.search(r"\b(?:and|or)\b|;|[和或及與与]", text):
        return True
    joined = layout.join_groups(layout.strip_delimiters(layout.characters(text)))
    depth = 0
    for char in joined:
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            return True
    return False
