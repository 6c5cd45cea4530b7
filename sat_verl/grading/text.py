"""Layout-level reading of an answer: characters, delimiters, wrappers, separators, words. Knows no arithmetic."""

from __future__ import annotations

import re

MAX_CHARS = 10_000

# Characters that stand for an ASCII one. NFKC is no option: it turns 5² into 52.
_CHARACTERS = str.maketrans(
    {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
    | dict.fromkeys("−–‐‑﹣", "-")
    | dict.fromkeys("\u00a0\u2002\u2003\u3000", " ")
    | dict.fromkeys("\u2007\u2008\u200a\u202f\u205f", "\u2009")
    | dict.fromkeys("\u200b\u200c\u200d\u2060\ufeff\u00ad", "")
    | {"、": ",", "。": ".", "’": "'", "˚": "°", "º": "°", "≈": r"\approx ", "≡": r"\equiv "}
)
_DELIMITERS = (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]"), ("**", "**"), ("`", "`"), ('"', '"'))
_OPENING = re.compile(r"(?:[\s*_`]|\$(?!\d)|\\[()\[\],;:! ])+")
# Matched against the reversed text: a search for a run that ends the text is quadratic.
_CLOSING_REVERSED = re.compile(r"(?:[()\[\],;!: ]\\(?!\\)|[\s*_`.。,，;；]|\$(?!\\))+")

_STYLE = re.compile(
    r"\\(?:color|textcolor)\s*\{[^{}]*\}|\\(?:tiny|small|normalsize|large|Large|LARGE|huge|Huge|bf|rm|it|sf|tt|bfseries)"
    r"(?![A-Za-z])\s*"
)
_FONT = re.compile(
    r"\\(?:math(?:bf|rm|it|sf|tt|bb|cal|normal)|bm|boldsymbol|text(?:bf|it|sf|tt)|emph|underline|boxed|fbox)"
    r"\s*\{([^{}]*)\}"
)
_TEXT = re.compile(r"\\(?:text(?:normal|rm)?|mbox|hbox|operatorname)\s*\{([^{}]*)\}")
# A preceding backslash makes the next one half of a line break: "\\\\ 2" in a matrix is no "\\ ".
_LAYOUT = re.compile(
    r"(?<!\\)\\(?:(?:left|right)\s*\.|(?:displaystyle|textstyle|limits|left|right|[bB]igg?[lr]?)(?![A-Za-z])|!)"
)
_SPACE = re.compile(r"(?<!\\)\\(?:[,;: ]|q?quad(?![A-Za-z])|thinspace(?![A-Za-z]))|[~\u2009]")
_FRACTION = re.compile(r"\\[dtc]frac(?![A-Za-z])")
_GROUPED = re.compile(r"(?<![\d.,])\d{1,3}(?:(?:,|,\\!\s?|\{,\}|\\[,;: ]|\u2009|'| )\d{3}(?!\d))+(?![\d,])")
_PADDED_GROUP = re.compile(r"\D0\d\d")
_PERCENT = re.compile(
    r"(?:\s|\\[,;: ])*(?:\\?%|\\(?:text|mathrm|mbox)\s*\{\s*(?:percent|pct|\\?%)\s*\}|(?<![A-Za-z])(?:percent|pct))$"
)

_WORD = re.compile(r"[^\W\d_]+")
_ONLY_WORDS = re.compile(r"[A-Za-zÀ-ɏ\u4e00-\u9fff][A-Za-zÀ-ɏ\u4e00-\u9fff '-]*")
_FUNCTION = re.compile(r"sin|cos|tan|cot|sec|csc|log|exp|sqrt|mod|gcd|lcm|max|min|det|and|pmod|bmod")
_SHORT_PROSE = re.compile(r"is|of|in|to|we|it|an|as|at|be|by|if|on|so|no")


def strip_delimiters(text: str) -> str:
    """Remove math delimiters, Markdown marks and closing punctuation around an answer.

    Args:
        text: an answer as it stands in a response.

    Returns:
        The bare answer.
    """
    text, previous = text.strip(), None
    while text != previous:
        previous = text
        for left, right in _DELIMITERS:
            inner = text[len(left) : len(text) - len(right)]
            if inner and text.startswith(left) and text.endswith(right) and left not in inner:
                text = inner.strip()
    opening = _OPENING.match(text)
    text = text[opening.end() :] if opening else text
    if text.endswith("\\") and not text.endswith("\\\\"):
        text = text[:-1]  # of a LaTeX space whose blank is stripped
    closing = _CLOSING_REVERSED.match(text[::-1])
    return text[: len(text) - closing.end()] if closing else text


def split_percent(text: str) -> tuple[str, bool]:
    """Split a trailing percent sign off.

    Args:
        text: an answer.

    Returns:
        The answer without the sign, and whether there was one.
    """
    bare = strip_delimiters(text)
    match = _PERCENT.search(bare[-60:])
    return (bare[: len(bare) - len(match.group())], True) if match else (text, False)


def join_groups(text: str, *, keep_commas: bool = False) -> str:
    """Remove thousands separators: ``8,000``, ``9{,}500``, ``9\\,500``, ``9 500``.

    Args:
        text: an answer.
        keep_commas: leave a plain comma alone (it may separate the parts of a list) unless the group after it is
            zero-padded, as no number on its own is.

    Returns:
        The text with every well-formed group joined.
    """

    def join(match: re.Match[str]) -> str:
        group = match.group()
        if keep_commas and "," in group.replace("{,}", "") and not _PADDED_GROUP.search(group):
            return group
        return re.sub(r"\D", "", group)

    return _GROUPED.sub(join, text)


def characters(text: str) -> str:
    """Replace full-width and typographic characters by their ASCII equals, drop colours, collapse white space.

    Args:
        text: any text.

    Returns:
        The text with the same meaning in plainer characters.
    """
    return re.sub(r"[ \t\r\n\f\v]+", " ", _STYLE.sub("", text.translate(_CHARACTERS))).strip()


def plain_spaces(text: str) -> str:
    """Remove layout commands, and turn LaTeX spaces into one blank each.

    Args:
        text: a formula.

    Returns:
        The same formula with ``\\dfrac`` written ``\\frac`` and without ``\\left`` and the like.
    """
    return _SPACE.sub(" ", _LAYOUT.sub("", _FRACTION.sub(r"\\frac", text)))


def has_padded_group(text: str) -> bool:
    """Whether a group of three digits starts with a zero, as in ``1,024``; no number on its own is written so.

    Args:
        text: digits and separators.

    Returns:
        True if there is one.
    """
    return _PADDED_GROUP.search(text) is not None


def words(text: str) -> str | None:
    """Read ``text`` as plain words ("Yes", ``\\text{Monday}``, ``(B)``).

    Args:
        text: an extracted answer or a gold answer.

    Returns:
        The words in lower case without wrappers and brackets, or None if there is anything else in the text. A single
        letter keeps its case.
    """
    if len(text) > 500:
        return None
    bare = unwrap(strip_delimiters(characters(text))).strip(" .()[]{}")
    if not _ONLY_WORDS.fullmatch(bare):
        return None
    return bare if len(bare) == 1 else " ".join(bare.lower().split())


def same_text(left: str, right: str) -> bool:
    """Whether two formulas are the same up to layout (spaces, ``\\dfrac``, ``\\left``, delimiters).

    Args:
        left: an answer.
        right: another one.

    Returns:
        True only for texts that mean the same.
    """
    return _bare(left) == _bare(right) != ""


def prose_words(text: str) -> list[str]:
    """The words of ``text`` that belong to a sentence rather than to a formula.

    Args:
        text: an answer candidate.

    Returns:
        All runs of three or more letters that are no LaTeX command or function name, and common short words.
    """
    found = _WORD.findall(re.sub(r"\\[A-Za-z]+", " ", text))
    return [
        w for w in found if (len(w) > 2 and not _FUNCTION.fullmatch(w)) or _SHORT_PROSE.fullmatch(w) or not w.isascii()
    ]


def _bare(text: str) -> str:
    text = re.sub(r" +", " ", plain_spaces(strip_delimiters(characters(text))))
    return re.sub(r"(?<!\d) | (?!\d)", "", text)


def unwrap(text: str) -> str:
    """Drop font commands and outer braces; make ``\\text{...}`` plain words."""
    previous = None
    for _ in range(20):
        if text == previous:
            break
        previous = text
        text = _TEXT.sub(r" \1 ", _FONT.sub(r"\1", text)).strip()
        while len(text) > 1 and text[0] == "{" and text[-1] == "}" and not set("{}") & set(text[1:-1].strip("{}")):
            text = text[1:-1].strip()
    return text
