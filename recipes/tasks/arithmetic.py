"""``arithmetic``: multi-digit sums in plain words, answered in a box."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import ClassVar

from recipes.errors import ConfigError
from recipes.tasks.base import MAX_PROBLEMS, Problem, TaskSpec, check_int, slipped

_BOXED = re.compile(r"\\boxed\{\s*(-?[0-9]+)\s*\}")


@dataclass(frozen=True)
class ArithmeticTask(TaskSpec):
    r"""Add ``terms`` numbers of ``digits`` digits each; the integer in the last ``\boxed{}`` is checked.

    The worked response writes the total of every column with its carry, units first, and then the box: for
    47 plus 85, ``12 13 \boxed{132}``. ``a plus b`` and ``b plus a`` are two problems.
    """

    name: ClassVar[str] = "arithmetic"
    digits: int = 2
    terms: int = 2

    def __post_init__(self) -> None:
        check_int(self.name, "digits", self.digits, 1, 9)
        check_int(self.name, "terms", self.terms, 2, 9)  # more terms and a column total has three digits
        if self.num_problems > MAX_PROBLEMS:
            raise ConfigError(
                "task.difficulty",
                self.difficulty,
                f"that gives more than {MAX_PROBLEMS} problems",
                "lower digits or terms until digits * terms is at most 18",
            )

    @property
    def _numbers_per_term(self) -> int:
        return 9 * 10 ** (self.digits - 1)

    @property
    def num_problems(self) -> int:
        return int(self._numbers_per_term**self.terms)

    @property
    def max_response_chars(self) -> int:
        return 3 * self.digits + len(r"\boxed{}") + self.digits + 1

    @property
    def steps_per_response(self) -> int:
        return self.digits

    def _operands(self, number: int) -> list[int]:
        operands = []
        for _ in range(self.terms):
            number, rest = divmod(number, self._numbers_per_term)
            operands.append(10 ** (self.digits - 1) + rest)
        return operands

    def problem(self, number: int) -> Problem:
        operands = self._operands(number)
        words = " plus ".join(map(str, operands))
        return Problem(number, f"What is {words}? Put the final answer in \\boxed{{}}.", str(sum(operands)))

    def worked_response(self, problem: Problem, rng: random.Random, slip_rate: float) -> str:
        operands, carry, totals = self._operands(problem.number), 0, []
        for column in range(self.digits):
            total = carry + sum(operand // 10**column % 10 for operand in operands)
            if slipped(rng, slip_rate):
                total = total + 1 if total == 0 or rng.random() < 0.5 else total - 1
            totals.append(total)
            carry = total // 10
        answer = str(totals[-1]) + "".join(str(total % 10) for total in reversed(totals[:-1]))
        return " ".join(f"{total:02d}" for total in totals) + f" \\boxed{{{answer}}}"

    def is_correct(self, response: str, ground_truth: str) -> bool:
        boxes = _BOXED.findall(response)
        return bool(boxes) and int(boxes[-1]) == int(ground_truth)
