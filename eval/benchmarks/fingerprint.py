"""Recognising a statement without keeping it: hashes of a few of its word sequences.

The likeness of two texts is the share of word sequences that they have in common, and can be estimated from those with
the smallest hashes alone (Broder 1997, "On the resemblance and containment of documents"). It does not depend on the
spacing, the punctuation or the figure code, in which public copies of the same problem differ.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Set

_FIGURE = re.compile(r"\[asy\].*?\[/asy\]", re.DOTALL)
_TAG = re.compile(r"<\w+\s*/?>|\\(?:begin|end)\{\w+\*?\}")
_WORD = re.compile(r"[a-z]+|[0-9]+")
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
