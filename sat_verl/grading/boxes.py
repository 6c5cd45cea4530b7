"""Find ``\\boxed{...}`` and ``\\fbox{...}`` by counting braces, in one pass over the text.

A regular expression cannot match nested braces, and searching for the partner of every brace anew is quadratic on
degenerate model output (thousands of unclosed boxes). A stack does both jobs in linear time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_COMMAND = re.compile(r"\\(?:boxed|fbox)(?![A-Za-z])\s*")
# A backslash lost, or turned into a backspace by one JSON decoding too many.
_LOOSE_COMMAND = re.compile(r"(?:\\(?:boxed|fbox)|\x08oxed|(?<![A-Za-z\\])f?box(?:ed)?(?=\{))(?![A-Za-z])\s*")
_BRACELESS = re.compile(r"[-+]?\d+")
_TOKEN = re.compile(r"\\.|[{}]", re.DOTALL)

# What an echoed instruction ("put the answer in \boxed{}") holds in place of an answer. "?" is not among them: a box
# with a question mark takes an answer back, an empty one repeats the prompt.
_PLACEHOLDERS = frozenset({"", "...", "…", "answer", "youranswer", "finalanswer", "youranswerhere", "theanswer"})
_PLACEHOLDER_NOISE = re.compile(r"\\(?:text|mathrm|textbf|mathbf|[,;:! ])|[\s{}\[\]<>_~$]")
_DOTS = re.compile(r"\\(?:l|c|d)?dots")

_BETWEEN_NOISE = re.compile(r"\\[()\[\],; ]|\\q?quad|\\(?:text|mathrm)|[\s${}*]")
_SEPARATORS = frozenset({",", ";", "and", ",and", "or", ",or", "&", "、", "，", "；", "和", "或", "及"})


@dataclass(frozen=True)
class Box:
    """A complete box: ``text[start:end]`` is the whole command, ``content`` what its braces hold."""

    start: int
    end: int
    content: str


@dataclass(frozen=True)
class Boxes:
    """All complete outermost boxes in order, and where the last unfinished one (if any) starts and holds text."""

    complete: tuple[Box, ...]
    broken_start: int | None
    broken_content: str


def scan(text: str, *, loose: bool = False) -> Boxes:
    """Collect the boxes of ``text``.

    Args:
        text: any text.
        loose: also accept a lost backslash (``boxed{5}``) and a box without braces (``\\boxed 5``). Without it a
            braceless box followed by a digit or a command counts as unfinished, and one followed by anything else
            as a mention of the word.

    Returns:
        The complete boxes that lie in no other complete box, and the last unfinished one.
    """
    commands = {m.end(): m.start() for m in (_LOOSE_COMMAND if loose else _COMMAND).finditer(text)}
    complete: list[Box] = []
    broken: tuple[int, int] | None = None  # where the command starts, and where its content
    for end, start in commands.items():
        if text[end : end + 1] == "{":
            continue
        number = _BRACELESS.match(text, end)
        if loose and number:
            complete.append(Box(start, number.end(), number.group()))
        elif number or text[end : end + 1] == "\\":
            broken = (start, end)
    stack: list[tuple[int, int | None]] = []
    for token in _TOKEN.finditer(text):
        if token.group() == "{":
            stack.append((token.start(), commands.get(token.start())))
        elif token.group() == "}" and stack:
            brace, command = stack.pop()
            if command is not None:
                complete.append(Box(command, token.end(), text[brace + 1 : token.start()]))
    for brace, command in stack:
        if command is not None and (broken is None or command > broken[0]):
            broken = (command, brace + 1)
    outermost: list[Box] = []
    for box in sorted(complete, key=lambda box: box.start):
        if not outermost or box.start >= outermost[-1].end:
            outermost.append(box)
    return Boxes(tuple(outermost), broken[0] if broken else None, text[broken[1] :] if broken else "")


def is_placeholder(content: str) -> bool:
    """Whether a box holds no answer but the blank of an instruction (nothing, dots, "your answer")."""
    if len(content) > 60:
        return False
    return _PLACEHOLDER_NOISE.sub("", _DOTS.sub("...", content)).lower() in _PLACEHOLDERS


def last_group(text: str, boxes: tuple[Box, ...]) -> tuple[Box, ...]:
    """The final box together with those joined to it by nothing but list separators.

    ``\\boxed{3}, \\boxed{5} and \\boxed{7}`` is one answer of three parts. Taking only the last box would pay a
    model for enumerating candidates.
    """
    group = list(boxes[-1:])
    for box in reversed(boxes[:-1]):
        between = text[box.end : group[-1].start]
        if len(between) > 40 or _BETWEEN_NOISE.sub("", between).lower() not in _SEPARATORS:
            break
        group.append(box)
    return tuple(reversed(group))
