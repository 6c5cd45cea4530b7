"""Read plain answers (integers, decimals, words) in any of their usual dresses, without sympy and without ``eval``.

:func:`integer` is the fast path of the grader. It must never read an integer into something that is not one, so it
refuses whatever it does not fully understand; math-verify gets those. Digits stay text: ``int`` refuses long ones.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

from sat_verl.grading import text as layout

_PLAIN_INTEGER = re.compile(r"[+-]?[0-9]+")
_UPRIGHT_UNIT = re.compile(r"(?<=[\d}])(?:[\s~]|\\[,;: ])*\\(?:text|mathrm|mbox)\s*\{\s*[A-Za-z]\s*\}")
_CURRENCY = re.compile(r"\\?\$|[€£¥₹]")
_DEGREE = re.compile(r"\s?(?:\^ ?\{? ?\\circ ?\}?|\\degree(?![A-Za-z])|°)")

_RELATION = re.compile(r"\\approx(?![a-z])|\\equiv(?![a-z])|(?<![<>!:])=")
_INEQUALITY = re.compile(r"[<>≤≥≠±]|\\(?:leq?|geq?|lt|gt|neq?|pm|mp|in|sim)(?![A-Za-z])|!=")
_LIST = re.compile(r"[,;]|\b(?:and|or)\b|[和或]")
_MODULUS = re.compile(r" ?(?:\\[pb]?mod ?\{? ?(\d+) ?\}?|\( ?\\?(?:mod|bmod) ?(\d+) ?\))$")
_REMAINDER = re.compile(r"(\d{1,15}) ?(?:\\pmod ?\{? ?(\d{1,15}) ?\}?|\( ?\\?(?:mod|bmod) ?(\d{1,15}) ?\))")
_ORDINAL = re.compile(r"(?<=\d) ?\^ ?\{? ?(?:\\(?:text|mathrm|textrm|mbox) ?\{ ?)?(?:st|nd|rd|th)\b ?\}*$")
_BRACED_DIGITS = re.compile(r"[\d{} ]+")

_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_UNIT_POWER = re.compile(r"(?<=[^\W\d_]) ?(?:\^ ?(?:[23]|\{ ?[23] ?\})|[²³])")
_PROSE = re.compile(r"(?:[^\W\d_]|[\s,.:;'/()!-])*")
_WORD = re.compile(r"[^\W\d_]+")
_SCALE = {"hundred": 2, "thousand": 3, "million": 6, "billion": 9, "trillion": 12}
# Words that change the value or belong to a formula: with one of them the text is not simply an integer.
_NOT_A_UNIT = re.compile(
    r"not|no|non|never|minus|negative|plus|times|half|point|over|under|least|most|more|less|fewer|than|between|or|and|to"
    r"|mod|modulo|a?(?:sin|cos|tan)h?|cot|sec|csc|arc\w+|log|ln|lg|exp|sqrt|root|squared|cubed|factorial|choose|percent"
    r"|pct|pi|infinity|base|dozen|binom|frac|undefined|hundred|thousand|million|billion|trillion|except|if|when|divided"
    r"|multiplied|power|within|apart|perhaps|maybe|probably|possibly|might|could|should|[万亿百千半]|.*[不非没無未].*|.*(?:ない|ません|아니|않).*",
    re.IGNORECASE,
)
# One of these after a number starts a clause, which no unit does: "204 because ...".
_CLAUSE = re.compile(
    r"because|since|which|that|so|as|is|are|was|but|this|it|we|by|from|for|though|while|then|also", re.IGNORECASE
)
_MAX_UNIT_WORDS = 5
# Prose in front of a number must end in one of these (or a colon): "AB 204" is a product, "there are 204" is not.
_INTRODUCES = re.compile(
    r"is|are|equals?|be|was|gives?|gets?|has|have|of|answer|exactly|precisely|approximately|about|total|there|yields"
    r"|obtain|find|value|.*[为為是有共]",
    re.IGNORECASE,
)
_DECIMAL = re.compile(
    r"([+-]?)(\d*)(?:\.(\d*))?(?:(?: ?(?:\\times|\\cdot|×|\*) ?10 ?\^ ?\{? ?|[eE])([+-]?\d{1,3}) ?\}?)?"
)


def integer(text: str) -> str | None:
    """Read ``text`` as one integer.

    Understands signs, zero padding, ``204.`` and ``204.0``, thousands separators, full-width and other decimal
    digits, font commands, units, degrees, currency, ``x = 12 + 192 = 204``, ``\\equiv 204 \\pmod{1000}`` and short
    prose around the number.

    Args:
        text: an extracted answer or a gold answer.

    Returns:
        The canonical digits ("-7", "0", "204"), or None if the text is not certainly one integer.
    """
    text = text.strip()
    if _PLAIN_INTEGER.fullmatch(text):
        return _canonical(text[:1], text.lstrip("+-"))
    if len(text) > layout.MAX_CHARS or not any(c.isdecimal() for c in text):
        return None
    side = _value_side(text)
    return None if side is None else _integer_in_prose(side)


def decimal(text: str) -> Fraction | None:
    """Read ``text`` as one decimal number, also in scientific notation.

    Args:
        text: an extracted answer or a gold answer.

    Returns:
        The exact value, or None.
    """
    whole = integer(text) if len(text) <= 1000 else None
    if whole is not None:
        return Fraction(whole) if len(whole) <= 1000 else None
    side = _value_side(text) if len(text) <= 1000 else None
    match = _DECIMAL.fullmatch(side) if side else None
    if match is None or not (match[2] or match[3]):
        return None
    try:
        value = Fraction(f"{match[1]}{match[2] or '0'}.{match[3] or '0'}")
    except ValueError:
        return None
    return value * Fraction(10) ** int(match[4] or 0)


def _value_side(text: str) -> str | None:
    """The plain text of an answer, or its part after the last relation sign; None if that is ambiguous."""
    text = _ORDINAL.sub("", _DEGREE.sub("", layout.strip_delimiters(layout.characters(text))))
    text = layout.unwrap(layout.join_groups(_UPRIGHT_UNIT.sub(" units", text), keep_commas="(" in text))
    text = layout.plain_spaces(text).strip()
    inner = text.strip("() ")
    if text[:1] == "(" and text[-1:] == ")" and not set("()") & set(inner):
        depth = len(text) - len(text.lstrip("( "))
        if depth != len(text) - len(text.rstrip(") ")) or ("," in inner and not layout.has_padded_group(inner)):
            return None
        text = inner
    text = re.sub(r" +", " ", _CURRENCY.sub("", layout.join_groups(text))).strip()
    if "{" in text and _BRACED_DIGITS.fullmatch(text) and text.count("{") == text.count("}"):
        text = text.replace("{", "").replace("}", "")
    remainder = _REMAINDER.fullmatch(text)
    if remainder and int(remainder[1]) < int(remainder[2] or remainder[3]):
        return remainder[1]
    if _INEQUALITY.search(text):
        return None
    sides = _RELATION.split(text)
    if len(sides) > 1:
        if _LIST.search(text):
            return None
        last = sides[-1].strip()
        return _MODULUS.sub("", last) if r"\equiv" in text else last
    return text


def _integer_in_prose(text: str) -> str | None:
    text = _UNIT_POWER.sub("", text)
    number = _NUMBER.search(text)
    if number is None or not all(c.isascii() or c.isalpha() or c.isdecimal() for c in text):
        return None
    digits, _, fraction = number.group().partition(".")
    before, after = text[: number.start()], text[number.end() :]
    sign = ""
    if before.rstrip()[-1:] in ("+", "-"):
        before = before.rstrip()
        sign, before = before[-1], before[:-1]
    if fraction.strip("0") or (before and before[-1].isascii() and before[-1] not in " :"):
        return None
    zeros = _zeros_of_scale(after)
    if zeros:
        after = after.split(maxsplit=1)[1] if len(after.split()) > 1 else ""
    if not introduces(before) or not _is_unit(after):
        return None
    return None if fraction and zeros else _canonical(sign, digits + "0" * zeros)


def _zeros_of_scale(after: str) -> int:
    following = after.split(maxsplit=1)
    return _SCALE.get(following[0].lower(), 0) if following else 0


def introduces(before: str) -> bool:
    """Whether the text in front of a value merely leads up to it, as "The answer is" does and "more than" does not.

    Args:
        before: plain text that precedes the value; may be empty.

    Returns:
        True if the value means the same without that text.
    """
    found = _WORD.findall(before)
    if not found:
        return not before.strip()
    if "(" in before or not _PROSE.fullmatch(before) or any(_NOT_A_UNIT.fullmatch(word) for word in found):
        return False
    return before.rstrip().endswith(":") or _INTRODUCES.fullmatch(found[-1]) is not None


def _is_unit(after: str) -> bool:
    found = _WORD.findall(after)
    if ";" in after or not _PROSE.fullmatch(after) or any(_NOT_A_UNIT.fullmatch(word) for word in found):
        return False
    if not found:
        return not after.strip(" .")
    if len(found) > _MAX_UNIT_WORDS or any(_CLAUSE.fullmatch(word) for word in found):
        return False
    return all(len(word) > 1 or not word.isascii() for word in found)


def _canonical(sign: str, digits: str) -> str:
    if not digits.isascii():
        digits = "".join(str(unicodedata.decimal(c)) for c in digits)
    digits = digits.lstrip("0") or "0"
    return "-" + digits if sign == "-" and digits != "0" else digits
