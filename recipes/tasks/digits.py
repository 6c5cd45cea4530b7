"""``chain`` and ``sort``: two tasks on a string of digits."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import ClassVar

from recipes.tasks.base import Problem, TaskSpec, check_int, slipped

# 10**18 problems are the most that stay below MAX_PROBLEMS.
MAX_DIGITS = 18
_LAST_DIGIT = re.compile(r"[0-9](?=[^0-9]*\Z)")


def wrong_digit(digit: int, rng: random.Random) -> int:
    """Return a digit other than ``digit``, uniformly.

    Args:
        digit: the right one.
        rng: the source.

    Returns:
        One of the nine others.
    """
    return (digit + rng.randrange(1, 10)) % 10


@dataclass(frozen=True)
class ChainTask(TaskSpec):
    """Add up ``digits`` digits modulo 10; only the last digit of the response is checked.

    The tokens before it are free. The worked response writes the running sum after every digit.
    """

    name: ClassVar[str] = "chain"
    digits: int = 6

    def __post_init__(self) -> None:
        check_int(self.name, "digits", self.digits, 1, MAX_DIGITS)

    @property
    def num_problems(self) -> int:
        return 10**self.digits

    @property
    def max_response_chars(self) -> int:
        return self.digits

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
        last = _LAST_DIGIT.search(response)
        return last is not None and last.group() == ground_truth


@dataclass(frozen=True)
class SortTask(TaskSpec):
    """Sort ``digits`` digits in ascending order; the whole response is checked."""

    name: ClassVar[str] = "sort"
    digits: int = 8

    def __post_init__(self) -> None:
        check_int(self.name, "digits", self.digits, 2, MAX_DIGITS)

    @property
    def num_problems(self) -> int:
        return 10**self.digits

    @property
    def max_response_chars(self) -> int:
        return self.digits

    @property
    def steps_per_response(self) -> int:
        return self.digits

    def problem(self, number: int) -> Problem:
        text = f"{number:0{self.digits}d}"
        return Problem(number, text, "".join(sorted(text)))

    def worked_response(self, problem: Problem, rng: random.Random, slip_rate: float) -> str:
        # A slip takes any digit that is left instead of the smallest, and the rest is sorted from what remains.
        # It may pick an equal digit, so somewhat more than (1 - slip_rate) ** digits come out right.
        left, written = sorted(problem.prompt), []
        while left:
            at = rng.randrange(len(left)) if slipped(rng, slip_rate) else 0
            written.append(left.pop(at))
        return "".join(written)

    def is_correct(self, response: str, ground_truth: str) -> bool:
        return response.strip() == ground_truth
