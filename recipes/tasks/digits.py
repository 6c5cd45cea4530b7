"""``chain`` and ``sort``: two tasks on a string of digits."""

from __future__ import annotations

import random
from bisect import bisect_right
from dataclasses import dataclass
from typing import ClassVar

from recipes.tasks.base import Problem, TaskSpec, check_int, slipped

# 10**18 problems are the most that stay below MAX_PROBLEMS.
MAX_DIGITS = 18


def wrong_digit(digit: int, rng: random.Random) -> int:
    """Return a digit other than ``digit``, uniformly.

    Args:
        digit: the right one.
        rng: the source.

    Returns:
        One of the nine others.
    """
    return (digit + rng.randrange(1, 10)) % 10


class _DigitsTask(TaskSpec):
    """A problem is a string of ``digits`` digits, and so is the longest response."""

    digits: int

    @property
    def num_problems(self) -> int:
        return 10**self.digits

    @property
    def max_response_chars(self) -> int:
        return self.digits


@dataclass(frozen=True)
class ChainTask(_DigitsTask):
    """Add up ``digits`` digits modulo 10; only the last character of the response is checked.

    The tokens before it are free. The worked response writes the running sum after every digit.
    """

    name: ClassVar[str] = "chain"
    digits: int = 6

    def __post_init__(self) -> None:
        check_int(self.name, "digits", self.digits, 1, MAX_DIGITS)

    @property
    def steps_per_response(self) -> int:
        return self.digits

    def problem(self, number: int) -> Problem:
        text = f"{number:0{self.digits}d}"
        return Problem(number, text, str(sum(map(int, text)) % 10))

    def worked_response(self, problem: Problem, rng: random.Random, slip_rate: float) -> str:
        total, written = 0, []
        for digit in problem.prompt:
            total = (total + int(digit)) % 10
            if slipped(rng, slip_rate):
                total = wrong_digit(total, rng)
            written.append(str(total))
        return "".join(written)

    def is_correct(self, response: str, ground_truth: str) -> bool:
        return response.rstrip()[-1:] == ground_truth


@dataclass(frozen=True)
class SortTask(_DigitsTask):
    """Sort ``digits`` digits in ascending order; the whole response is checked."""

    name: ClassVar[str] = "sort"
    digits: int = 8

    def __post_init__(self) -> None:
        check_int(self.name, "digits", self.digits, 2, MAX_DIGITS)

    @property
    def steps_per_response(self) -> int:
        return self.digits - 1  # nothing is left to confuse the last digit with

    def problem(self, number: int) -> Problem:
        text = f"{number:0{self.digits}d}"
        return Problem(number, text, "".join(sorted(text)))

    def worked_response(self, problem: Problem, rng: random.Random, slip_rate: float) -> str:
        # A slip takes one of the larger digits that are left instead of the smallest; what remains is sorted on.
        left, written = sorted(problem.prompt), []
        while left:
            larger = bisect_right(left, left[0])
            at = rng.randrange(larger, len(left)) if larger < len(left) and slipped(rng, slip_rate) else 0
            written.append(left.pop(at))
        return "".join(written)

    def is_correct(self, response: str, ground_truth: str) -> bool:
        return response.strip() == ground_truth
