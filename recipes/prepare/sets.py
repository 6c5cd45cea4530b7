"""The training sets that are known by name: where they are, what they must have, and what they wrap a problem in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eval.benchmarks.columns import Columns, is_verl

Row = dict[str, Any]


@dataclass(frozen=True)
class Wrapper:
    """What a set writes around each problem, to be replaced by the evaluation's prompt."""

    before: str
    after: str

    def strip(self, text: str) -> tuple[str, bool]:
        """The text without the wrapper, and whether it had both ends of it."""
        if text.startswith(self.before) and text.endswith(self.after):
            return text[len(self.before) : len(text) - len(self.after)].strip(), True
        return text.strip(), False


@dataclass(frozen=True)
class Known:
    """A training set.

    Attributes:
        name: it is the rows' ``data_source``, too.
        hub: ``OWNER/NAME`` on the hub, or empty.
        revision: commit that is read unless another is asked for; None: the newest, which the manifest then pins.
        split: whose files are read.
        file: of the split, where the set has several.
        columns: where statement and answer are; None: found by their names.
        wrapper: around the problems.
        rows: number of rows at ``revision``.
        distinct: number of different texts among them.
        sha256: digest of each file at ``revision``, by name.
    """

    name: str
    hub: str = ""
    revision: str | None = None
    split: str = "train"
    file: str = ""
    columns: Columns = field(default_factory=Columns)
    wrapper: Wrapper | None = None
    rows: int | None = None
    distinct: int | None = None
    sha256: Mapping[str, str] = field(default_factory=dict)

    def text(self, row: Row, columns: Columns) -> str | None:
        """What a row asks, as it stands there; None if there is no text."""
        if columns.problem is None and is_verl(row):
            turn = row["prompt"][0] if row["prompt"] else None
            value = turn.get("content") if isinstance(turn, dict) else None
        else:
            value = row.get(columns.problem or "")
        return value if isinstance(value, str) and value.strip() else None


DAPO_WRAPPER = Wrapper(
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n",
    '\n\nRemember to put your answer on its own line after "Answer:".',
)

SETS = {
    known.name: known
    for known in (
        # 17,917 rows, a hundred times over; 17,398 texts, as some stand under two indices.
        Known(
            "dapo_math_17k",
            "BytedTsinghua-SIA/DAPO-Math-17k",
            "65877096c24ffa7abc4e4fa5edb95cf3413a5674",
            wrapper=DAPO_WRAPPER,
            rows=1_791_700,
            distinct=17_398,
            sha256={"dapo-math-17k.parquet": "534375d6bb8630d22ab46a56e11f2ffec1d288d8f7d04099bc82d68948705941"},
        ),
        # Rows as the SAT paper counts them (arXiv 2607.18722).
        Known(
            "dolci_math",
            "allenai/Dolci-RL-Zero-Math-7B",
            columns=Columns("prompt", "ground_truth"),
            rows=13_314,
        ),
        Known(
            "gsm8k",
            "openai/gsm8k",
            "cc7b047b6e5bb11b4f1af84efc572db110a51b3c",
            file="main/train-00000-of-00001.parquet",
            columns=Columns("question", "answer"),
            rows=7_473,
        ),
    )
}  # fmt: skip

MIXTURES: dict[tuple[str, ...], int] = {("dapo_math_17k", "dolci_math"): 30_712}
"""Rows of a mixture as it was published (arXiv 2607.18722): for the report, as it is not decontaminated."""
