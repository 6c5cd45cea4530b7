"""The records that the parts of the harness hand to each other, and what its files hold.

``samples.jsonl`` is one :class:`Sample` a line, ``results.json`` one :class:`Results`. Both are checked when they are
read, so that a file of another version or program is refused with the field that does not fit.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION = 1
Policy = Literal["strict", "lenient"]
POLICIES: tuple[Policy, ...] = ("strict", "lenient")
Status = Literal["correct", "wrong", "no_answer", "truncated", "request_error", "grader_error"]
STATUSES: tuple[Status, ...] = ("correct", "wrong", "no_answer", "truncated", "request_error", "grader_error")
EXCLUDED: tuple[Status, ...] = ("request_error", "grader_error")
"""Nobody knows whether such a sample is right: it is left out of every mean, shown, and bounded."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Problem(_Record):
    """One problem: the statement as the benchmark has it, and the acceptable answer (or answers)."""

    id: str
    statement: str
    gold: str | list[str]
    data_source: str = "math"
    """By it the grader knows the recipes' digit tasks; anything else is graded as mathematics."""


class Benchmark(_Record):
    """A set of problems and where it comes from."""

    name: str
    problems: list[Problem]
    lineage: str
    """Package and version, file name, or hub repository and revision."""
    statements_sha256: str
    """Of the ids and statements, in order."""
    answers_sha256: str
    """Of the ids and gold answers, in order."""
    prompt: str = "{statement}"
    """What the user turn says by default; ``{statement}`` stands for the problem."""
    max_tokens: int = 32768
    """Limit of a response by default: the paper's, or what a recipe trains its task with."""
    domain: Literal["aime", "math"] | None = None
    """"aime": every answer is an integer, so whatever cannot be read as one is wrong."""
    warnings: list[str] = Field(default_factory=list)


class Verdict(_Record):
    """What a policy makes of one response; the fields of :class:`sat_verl.grading.Grade`."""

    status: Status
    answer: str | None = None
    method: str = "none"
    source: str = "none"
    detail: str = ""
    seconds: float = 0.0
    """Time that grading took by the clock."""


class Sample(_Record):
    """One response to one problem: what came back, and the verdict of each policy."""

    problem: str
    sample: int
    """0 .. n-1 within the problem."""
    seed: int
    gold: str | list[str]
    response: str | None
    """None: the request failed for good; ``error`` says why."""
    finish_reason: Literal["stop", "length", "error"]
    error: str = ""
    prompt_tokens: int | None = None
    response_tokens: int | None = None
    seconds: float = 0.0
    """From handing the request to the engine to its last token."""
    verdicts: dict[Policy, Verdict]
    grader: str
    """Digest of what graded it: sources and libraries of the grader, and its settings."""


class Interval(_Record):
    """A 95 % interval, never outside 0 .. 1 where it is of a share."""

    low: float
    high: float
    method: str
    standard_error: float | None = None
    degrees_of_freedom: float | None = None


class Score(_Record):
    """The numbers of one policy."""

    average: float | None
    """avg@n: mean over problems of the share of correct among the samples that count; None if none counts."""
    sampling: Interval | None
    """Noise of drawing the samples, with these very problems."""
    population: Interval | None
    """These problems taken as a draw from a population of such problems: t, clustered by problem."""
    bootstrap: Interval | None
    """The same by resampling problems."""
    bounds: tuple[float, float]
    """The average if all excluded samples were wrong, and if all were correct."""
    pass_at: dict[int, float]
    """k: unbiased pass@k."""
    majority_at: dict[int, float]
    """k: expected score of the majority vote of k samples."""
    counts: dict[Status, int]


class ProblemResult(_Record):
    """One row of the heat map."""

    id: str
    gold: str | list[str]
    statuses: dict[Policy, list[Status | None]]
    """By sample number; None: not there yet."""
    answers: dict[Policy, list[str | None]]
    lengths: list[int | None]
    """Response tokens by sample number."""
    average: dict[Policy, float | None]
    duplicates: int
    """Samples whose text another sample of this problem has too, beyond the first."""


class Lengths(_Record):
    """Response lengths in tokens."""

    mean: float
    median: float
    p90: float
    maximum: int
    mean_correct: float | None
    mean_incorrect: float | None


class Results(_Record):
    """``results.json``."""

    schema_version: int = SCHEMA_VERSION
    benchmark: str
    model: str
    n: int
    expected: int
    """Problems times n."""
    received: int
    complete: bool
    """Whether every sample is there and the scores can be compared with others'."""
    key: dict[str, Any]
    """What the samples depend on: weights, tokenizer, template, data, prompt, sampling, seed, engine. Runs with
    another key are never mixed."""
    grader: dict[str, Any]
    """Version and settings of the grader."""
    scores: dict[Policy, Score]
    problems: list[ProblemResult]
    lengths: Lengths | None
    truncated_rate: float
    """Share of responses that were cut at the limit, graded right or not."""
    duplicates: int
    errors: dict[str, int]
    """Reasons of request and grader errors, with their counts."""
    warnings: list[str]
    timing: dict[str, float]
    """Of the last sitting: seconds by the clock (``load``, ``generate``; ``grade`` summed over samples), its number of
    samples, and tokens per second."""
    provenance: dict[str, Any]
    """Command, versions, hardware, commit, time."""
