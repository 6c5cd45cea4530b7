"""Turn the written form of an answer into something comparable, without sympy and without evaluating anything.

:func:`integer` is the fast path: it reads an integer in any of its usual dresses and refuses everything else.
:func:`fragment` repairs a formula for math-verify. :func:`words` reads answers that are words.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

MAX_CHARS = 10_000

_PLAIN_INTEGER = re.compile(r"[+-]?[0-9]+")

# Characters that stand for an ASCII one. NFKC is no option: it turns 5² into 52.
_CHARACTERS = str.maketrans(
    {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
    | {ord(c): "-" for c in "−–‐‑﹣"}
    | {ord(c): " " for c in "\u00a0\u2002\u2003\u3000\t\n\r"}
    | {ord(c): "\u2009" for c in "\u2007\u2008\u200a\u202f\u205f"}
    | {ord(c): None for c in "\u200b\u200c\u200d\u2060\ufeff\u00ad"}
    | {ord("、"): ",", ord("。"): ".", ord("’"): "'", ord("˚"): "°", ord("º"): "°"}
)
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"), ('"', '"'))
_EDGE = re.compile(r"(?:[\s*_`>]|\$(?!\d)|\\[()\[\]])+")
_EDGE_END = re.compile(r"(?:[\s*_`.。,，;；]|(?<!\\)\$|\\[()\[\],;!: ])+$")

_FONT = re.compile(
    r"\\(?:math(?:bf|rm|it|sf|tt|bb|cal|normal)|bm|boldsymbol|textbf|textit|emph|underline|boxed|fbox)\s*\{([^{}]*)\}"
)
_TEXT = re.compile(r"\\(?:text(?:normal|rm|sf|tt)?|mbox|hbox|mathrm|operatorname)\s*\{([^{}]*)\}")
_LAYOUT = re.compile(r"\\(?:displaystyle|textstyle|limits|left|right|[bB]igg?[lr]?|!|large|Large|quad|qquad)(?![A-Za-z])")
_GROUPED = re.compile(
    r"(?<![\d.])\d{1,3}(?:(?:,|\{,\}|\\[,;: ]|\\thinspace|,\\!|\u2009|'| )(?=\d{3}(?!\d))\d{3})+(?!\d)"
)
_RELATION = re.compile(r"\\approx|≈|\\equiv|≡|(?<![<>!:])=")
_INEQUALITY = re.compile(r"[<>≤≥≠±]|\\(?:leq?|geq?|lt|gt|neq?|ne|pm|mp|in|sim)(?![A-Za-z])")
_MODULUS = re.compile(r"\s*(?:\\p?mod\s*\{?\s*\d+\s*\}?|\(\s*(?:\\?mod)\s*\d+\s*\))\s*$")
_DEGREE = re.compile(r"\s*(?:\^\s*\{?\s*\\circ\s*\}?|\\degree|°)")
_CURRENCY = re.compile(r"\\\$|[$€£¥₹]")
_SHAPE = re.compile(
    r"(?P<before>[^\d+\-.]*?(?:[-–](?=\s)[^\d+\-.]*?)?)\s*(?P<sign>[+-]?)\s*(?P<digits>\d+)(?:\.0*)?(?P<after>(?:[^\d.].*)?)", re.DOTALL
)
_PROSE = re.compile(r"[\s,.:'/()\-]*(?:[^\W\d_]+(?:\s*\^\s*\{?[23]\}?|[²³])?[\s,.:'/()\-]*)*")
_WORD = re.compile(r"[^\W\d_]+")
_SCALE = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12, "万": 4, "亿": 8}
# Words that change the value, or that belong to a formula: with one of them the text is not simply an integer.
_NOT_A_UNIT = frozenset(
    "not no non never minus negative plus times half point over under least most more less fewer than between or and"
    " to mod modulo sin cos tan cot sec csc log ln lg exp sqrt root squared cubed factorial choose percent pct pi"
    " infinity base dozen arcsin arccos arctan binom frac cdot pm undefined million billion trillion thousand hundred"
    " except if when divided multiplied power within 不 非 负 约 半 倍 百 千 万 亿".split()
)
_DECIMAL = re.compile(r"([+-]?)(\d*)\.(\d+)|([+-]?)(\d+)")


def strip_delimiters(text: str) -> str:
    """Remove math delimiters, Markdown marks and closing punctuation around an answer.

    Args:
        text: an answer as it stands in a response.

    Returns:
        The bare answer.
    """
    previous = None
    text = text.strip()
    while text != previous:
        previous = text
        for left, right in _DELIMITERS:
            inner = text[len(left) : len(text) - len(right)]
            if len(text) > len(left) + len(right) and text.startswith(left) and text.endswith(right) and left not in inner:
                text = inner.strip()
    opening = _EDGE.match(text)
    return _EDGE_END.sub("", text[opening.end() :] if opening else text)
