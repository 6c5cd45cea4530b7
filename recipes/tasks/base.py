"""What every synthetic task provides: numbered problems, an exact check and worked responses to imitate."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

from recipes.errors import ConfigError

# Problem numbers stay below this, so that they fit a signed 64-bit column and numpy's index arithmetic.
MAX_PROBLEMS = 2**60


def check_int(task: str, setting: str, value: object, low: int, high: int) -> None:
    """Refuse a difficulty setting that is no integer from ``low`` to ``high``.

    Args:
        task: name of the task, for the message.
        setting: name of the setting.
        value: what was given.
        low: smallest value allowed.
        high: largest value allowed.

    Raises:
        ConfigError: if ``value`` is out of range or of another type (``True`` is not the number 1 here).
    """
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(
            f"task.difficulty.{setting}",
            repr(value),
            f"the {task} task takes an integer from {low} to {high}",
            "choose one in that range",
        )


@dataclass(frozen=True)
class Problem:
    """One problem: its number within the task, the user message and the answer that is checked."""

    number: int
    prompt: str
    ground_truth: str


@dataclass(frozen=True)
class TaskSpec(ABC):
    """A family of problems with a verifiable answer; the dataclass fields of a subclass are its difficulty.

    Problems are numbered from 0 to ``num_problems - 1`` and a number fixes the problem completely, so a set of
    problems is a set of integers: distinct numbers are distinct problems, and nothing depends on a seed here.
    """

    name: ClassVar[str]
    ability: ClassVar[str] = "math"

    @property
    def data_source(self) -> str:
        """The ``data_source`` of verl's rows, by which the reward function knows the task."""
        return f"sat_verl/{self.name}"

    @property
    def difficulty(self) -> dict[str, Any]:
        """The difficulty settings by name."""
        return asdict(self)

    @property
    @abstractmethod
    def num_problems(self) -> int:
        """How many distinct problems there are at this difficulty."""

    @property
    @abstractmethod
    def max_response_chars(self) -> int:
        """Length of the longest worked response; one more token ends the turn."""

    @property
    @abstractmethod
    def steps_per_response(self) -> int:
        """How many steps of a worked response can go wrong."""

    @abstractmethod
    def problem(self, number: int) -> Problem:
        """Return the problem with this number.

        Args:
            number: from 0 to ``num_problems - 1``.

        Returns:
            The problem; the same one for the same number, always.
        """

    @abstractmethod
    def worked_response(self, problem: Problem, rng: random.Random, slip_rate: float) -> str:
        """Write out one response the way the base model is taught to.

        Every step goes wrong with probability ``slip_rate`` and the later steps carry on from the wrong value, so
        a model that imitates these responses knows the procedure but executes it unreliably: about
        ``(1 - slip_rate) ** steps_per_response`` of its samples are right, and RL has something to sharpen (see
        :meth:`slip_rate_for`).

        Args:
            problem: the problem to answer.
            rng: source of the slips; untouched results need ``slip_rate=0``.
            slip_rate: from 0 (always right) to 1.

        Returns:
            The response without the end-of-turn token.
        """

    def slip_rate_for(self, success: float) -> float:
        """Return the slip rate at which a perfect imitator succeeds about this often.

        Args:
            success: above 0, at most 1. Slips that cancel each other come on top.

        Returns:
            The slip rate.
        """
        return float(1.0 - success ** (1.0 / self.steps_per_response))

    @abstractmethod
    def is_correct(self, response: str, ground_truth: str) -> bool:
        """Check a response.

        Args:
            response: the decoded response without special tokens.
            ground_truth: :attr:`Problem.ground_truth`.

        Returns:
            Whether it counts as right.
        """


def slipped(rng: random.Random, slip_rate: float) -> bool:
    """Draw whether one step goes wrong.

    Args:
        rng: the source.
        slip_rate: the probability.

    Returns:
        True with that probability.
    """
    return rng.random() < slip_rate
