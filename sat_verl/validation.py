"""What a validation says of each problem; verl's metrics are averages over all of them, and hide their spread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

EXCLUDED = frozenset({"request_error", "grader_error", ""})
"""Verdicts that say nothing about the model."""


def tally(problems: Iterable[str], samples: Sequence[str], verdicts: Sequence[str | None]) -> dict[str, list[int]]:
    """Count the verdicts of each problem.

    Args:
        problems: names of the problems, in their order.
        samples: the problem that each sample is of.
        verdicts: of each sample, as the reward function words it (the status comes first); None: it has none.

    Returns:
        One number per problem: ``correct`` samples, those that are ``counting`` (right or wrong), and those that are
        ``excluded`` because nobody knows. Samples that were never drawn are in none of them.
    """
    counts = {name: [0, 0, 0] for name in problems}
    for name, verdict in zip(samples, verdicts, strict=True):
        status = (verdict or "").partition(" ")[0]
        count = counts.setdefault(name, [0, 0, 0])
        count[0] += status == "correct"
        count[1] += status not in EXCLUDED
        count[2] += status in EXCLUDED
    columns = list(zip(*counts.values(), strict=True)) or [(), (), ()]
    return {name: list(column) for name, column in zip(("correct", "counting", "excluded"), columns, strict=True)}
