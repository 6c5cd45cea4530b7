"""Recognising a statement without keeping it: hashes of a few of its word sequences.

The likeness of two texts is the share of word sequences that they have in common, and can be estimated from those with
the smallest hashes alone (Broder 1997, "On the resemblance and containment of documents"). It does not depend on the
spacing, the punctuation or the figure code, in which public copies of the same problem differ. It hardly notices a
single changed number, so the numbers of a statement are kept too.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence, Set
from difflib import SequenceMatcher

_FIGURE = re.compile(
    r"\[asy\].*?\[/asy\]|\\begin\{(asy|tikzpicture)\}.*?\\end\{\1\}|!\[[^\]]*\]\([^)]*\)|<img[^>]*>"
    r"|\\includegraphics(?:\[[^\]]*\])?\{[^}]*\}",
    re.DOTALL,
)
_TAG = re.compile(r"<\w+\s*/?>|\\(?:begin|end)\{\w+\*?\}")
_WORD = re.compile(r"[a-z]+|[0-9]+")
_SPELT = {word: str(value) for value, word in enumerate(
    ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"), start=2
)}  # fmt: skip
"""Not "one", which is seldom a number."""
LENGTH = 4
"""Words in a sequence."""
KEPT = 16
"""Hashes kept of a statement."""
_DIGITS = 6


def without_figure(statement: str) -> str:
    """A statement without its figure code and markup."""
    return _TAG.sub(" ", _FIGURE.sub(" ", statement))


def words(statement: str) -> list[str]:
    """The words and numbers of a statement, figures left out."""
    return _WORD.findall(without_figure(statement).lower())


def numbers(statement: str) -> list[str]:
    """The numbers of a statement in their order, figures left out; small ones may be spelt out."""
    plain = unicodedata.normalize("NFKC", without_figure(statement)).lower()
    return [_SPELT.get(word, word) for word in _WORD.findall(plain) if word.isdecimal() or word in _SPELT]


def other_numbers(kept: Sequence[str], theirs: Sequence[str]) -> str:
    """Where the numbers of a statement are not those that are kept, in words; empty if they agree.

    Copies differ in how they set numbers (``1,000``, ``1000``; ``\\frac12``, ``\\frac{1}{2}``): what must agree is the
    row of all digits.
    """
    if "".join(kept) == "".join(theirs):
        return ""
    if len(kept) == len(theirs):
        return ", ".join(f"{theirs} for {kept}" for kept, theirs in zip(kept, theirs, strict=True) if kept != theirs)
    pieces = SequenceMatcher(None, kept, theirs, autojunk=False).get_opcodes()
    return ", ".join(
        f"{' '.join(theirs[c:d]) or 'nothing'} for {' '.join(kept[a:b]) or 'nothing'}"
        for kind, a, b, c, d in pieces
        if kind != "equal"
    )


def hashes(statement: str) -> frozenset[str]:
    """Hashes of the word sequences of a statement."""
    found = words(statement)
    sequences = {" ".join(found[start : start + LENGTH]) for start in range(max(1, len(found) - LENGTH + 1))}
    return frozenset(hashlib.sha256(sequence.encode()).hexdigest()[:_DIGITS] for sequence in sequences)


def fingerprint(statement: str) -> str:
    """What is kept of a statement: the smallest hashes of its word sequences."""
    return " ".join(sorted(hashes(statement))[:KEPT])


def likeness(kept: str, theirs: Set[str]) -> float:
    """How much of the statement behind a fingerprint another one holds, from 0 to 1.

    Args:
        kept: the fingerprint.
        theirs: :func:`hashes` of the other statement.
    """
    mine = kept.split()
    return sum(item in theirs for item in mine) / len(mine)
