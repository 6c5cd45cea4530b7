"""Which problems are for training and which for testing, and in which order a seed draws them.

The split belongs to the problem and not to the seed: a fixed permutation of the problem numbers puts one in eight
into the test split. Whatever is drawn from the train split, with any seed and for any purpose (the warm start, RL),
therefore never meets a test problem.
"""

from __future__ import annotations

import hashlib
from typing import Literal

import numpy as np

from recipes.errors import ConfigError
from recipes.tasks.base import Problem, TaskSpec

Split = Literal["train", "test"]
TEST_SHARE = 8  # one problem in this many is a test problem


def capacity(task: TaskSpec, split: Split) -> int:
    """Return how many distinct problems a split has.

    Args:
        task: the task at its difficulty.
        split: ``"train"`` or ``"test"``.

    Returns:
        Their number, at least one for each task.
    """
    test = task.num_problems // TEST_SHARE or 1
    return test if split == "test" else task.num_problems - test


def check_size(task: TaskSpec, split: Split, size: int) -> None:
    """Refuse a set that is larger than the split.

    Args:
        task: the task at its difficulty.
        split: ``"train"`` or ``"test"``.
        size: how many distinct problems are wanted.

    Raises:
        ConfigError: if ``size`` is not from 1 to the capacity of the split.
    """
    most = capacity(task, split)
    if not isinstance(size, int) or not 1 <= size <= most:
        raise ConfigError(
            f"task.{split}_size",
            size,
            f"the {task.name} task at {task.difficulty} has {most} distinct {split} problems",
            f"set it from 1 to {most}, or raise the difficulty",
        )


def draw(task: TaskSpec, split: Split, size: int, seed: int, start: int = 0) -> list[Problem]:
    """Draw distinct problems of a split in the order of a seed.

    A larger ``size`` continues a smaller one, and the result depends on nothing but the arguments.

    Args:
        task: the task at its difficulty.
        split: ``"train"`` or ``"test"``.
        size: how many problems.
        seed: chooses the order, hence the sample.
        start: how many problems of that order to leave out first.

    Returns:
        The problems.

    Raises:
        ConfigError: if the split has fewer than ``start + size`` problems.
    """
    check_size(task, split, start + size)
    order = np.arange(start, start + size, dtype=np.uint64)
    order = permute(order, capacity(task, split), f"{task.data_source}/{split}/{seed}")
    if split == "train":
        order = order + np.uint64(capacity(task, "test"))
    numbers = permute(order, task.num_problems, task.data_source)
    return [task.problem(int(number)) for number in numbers]


def permute(values: np.ndarray, size: int, key: str, rounds: int = 6) -> np.ndarray:
    """Apply a keyed permutation of ``range(size)`` without building it.

    A Feistel network permutes the next even power of two; values that land outside go through again until they are
    inside, which keeps it a permutation of the range.

    Args:
        values: unsigned integers below ``size``, any number of them.
        size: size of the range.
        key: chooses the permutation.
        rounds: rounds of the network.

    Returns:
        The image of every value.
    """
    half = np.uint64(max(1, (max(size - 1, 1).bit_length() + 1) // 2))
    mask = np.uint64(2 ** int(half) - 1)
    keys = [np.uint64(int.from_bytes(_digest(f"{key}/{number}"), "big")) for number in range(rounds)]
    values = values.astype(np.uint64)
    pending = np.ones(values.shape, dtype=bool)
    while pending.any():
        left, right = values[pending] >> half, values[pending] & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right + round_key) & mask)
        values[pending] = (left << half) | right
        pending = values >= np.uint64(size)
    return values


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _mix(values: np.ndarray) -> np.ndarray:
    """Scramble 64-bit integers (the finaliser of splitmix64); the arithmetic wraps around on purpose."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
