"""The families of tests, and the rule that makes a verdict of each: benchmarks/lag_sweep/PROTOCOL.md as code.

With few seeds on the real stack the same comparisons are described, without a test: PROTOCOL_VERL.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from benchmarks.arms import ARMS
from benchmarks.lag_sweep.matched import SUFFIX, base_of, matched_to
from benchmarks.lag_sweep.settings import LEARNING_RATES
from benchmarks.lag_sweep.store import Place
from benchmarks.report.estimates import Difference, difference, holm
from benchmarks.report.studies import Block, Study

ALPHA = 0.05
MATTERS = 0.02
"""An interval within plus and minus this is "no difference that matters"."""

TASKS, BASES, SEEDS = ("chain", "sort"), ("grpo", "gspo"), range(10)
LAGS = {"H1": (1, 8, 32), "H2": (1, 4, 8, 16, 32), "H3": (32,)}
SETTING = {
    "engine": "lab", "schedule": "broadcast", "model": "tiny", "steps": 128, "prompts_per_step": 16,
    "responses_per_prompt": 8, "micro_batches": 1, "eval_every": 8, "eval_problems": 256, "noise": 0.0,
    "dual_clip": None, "quantile_scope": None, "overrides": [],
}  # fmt: skip
"""The setting that the protocol was written for."""

TESTED_FROM = 5
"""Seeds that a comparison on the real stack must ask for to be tested: with three, a paired t test has two degrees of
freedom and finds, four times in five, what is 3.3 times the differences' own standard deviation; as the first of four
in Holm's order, 6.5 times."""

Verdict = Literal["better", "worse", "no difference that matters", "undecided", "not answered", "described"]
Name = Literal["H1", "H2", "H3"]
QUESTIONS: dict[Name, str] = {
    "H1": "SAT minus the same loss at SAT's mean radius, fixed",
    "H2": "SAT minus its base loss",
    "H3": "the longest lag minus lag 0, base losses",
}


@dataclass(frozen=True)
class Test:
    """One comparison of two sides, each an arm at a lag, over common seeds.

    Attributes:
        block, base: where, and the base loss that it is about.
        first, second: (arm, lag); the difference is the first's final score minus the second's.
        missing: seeds with a side that is neither done nor failed; they may come yet.
        failed: seeds with a side that failed, left out.
        found: None without a common seed.
        adjusted: Holm's p within its family; None where not answered, or outside a family.
        answered: no seed is missing, or the sweep is closed; and at least two are there.
        tested: whether it has a verdict; else its interval is all there is.
    """

    block: Block
    base: str
    first: tuple[str, int]
    second: tuple[str, int]
    missing: int
    failed: int
    found: Difference | None
    adjusted: float | None = None
    answered: bool = False
    tested: bool = True

    @property
    def lag(self) -> int:
        return self.first[1]

    @property
    def verdict(self) -> Verdict:
        """By the protocol: Holm's p below .05 and the sign; an interval within .02 of 0; else undecided."""
        found = self.found
        if not self.answered or found is None or found.low is None or found.high is None:
            return "not answered"
        if not self.tested:
            return "described"
        if self.adjusted is not None and self.adjusted < ALPHA:
            return "better" if found.mean > 0 else "worse"
        if found.low >= -MATTERS and found.high <= MATTERS:
            return "no difference that matters"
        return "undecided"


@dataclass(frozen=True)
class Family:
    """Tests that are corrected together; or, if not ``tested``, comparisons that are described together."""

    name: Name
    tests: list[Test]
    tested: bool = True

    @property
    def answered(self) -> int:
        return sum(test.answered for test in self.tests)

    @property
    def bases(self) -> list[str]:
        return list(dict.fromkeys(test.base for test in self.tests))

    def of(self, base: str) -> list[Test]:
        return [test for test in self.tests if test.base == base]

    def counts(self, base: str) -> Counter[Verdict]:
        return Counter(test.verdict for test in self.of(base))


def is_the_protocols(study: Study) -> bool:
    """Whether a study has the setting that the protocol fixes, and asks for a comparison of its."""
    same = all(study.settings.get(name) == value for name, value in SETTING.items())
    return same and any(arm.startswith("sat_") for arm in study.arms())


def described(study: Study) -> bool:
    """Whether a study of the real stack asks for too few seeds to test anything (:data:`TESTED_FROM`)."""
    return study.settings["engine"] == "verl" and max(map(len, study.asked.values()), default=0) < TESTED_FROM


def primary_blocks(study: Study) -> list[Block]:
    """The blocks that a family is about: the protocol's learning rates in its setting, else all there are."""
    if is_the_protocols(study):
        return [Block(task, LEARNING_RATES[task]) for task in TASKS]
    return study.blocks


def due_seeds(study: Study, block: Block, arm: str, lag: int) -> set[int]:
    """The seeds that a comparison needs of this side: those asked for, and the protocol's."""
    fixed = is_the_protocols(study) and block in primary_blocks(study)
    return {*study.asked.get((block, arm, lag), []), *(SEEDS if fixed else ())}


def compare(
    study: Study, block: Block, base: str, first: tuple[str, int], second: tuple[str, int], *, closed: bool,
    due: set[int] | None = None,
) -> Test:  # fmt: skip
    """One test, not yet corrected; ``due`` are the seeds it needs, by default those of :func:`due_seeds`."""
    sides = (first, second)
    due = {seed for side in sides for seed in due_seeds(study, block, *side)} if due is None else due
    states = {
        seed: [study.status.get(Place(block.task, arm, block.lr, lag, seed), "pending") for arm, lag in sides]
        for seed in due
    }
    failed = sum("failed" in state for state in states.values())
    missing = sum("failed" not in state and state != ["done", "done"] for state in states.values())
    found = difference(study.values(block, *first), study.values(block, *second))
    answered = found is not None and found.n > 1 and (closed or not missing)
    return Test(block, base, first, second, missing, failed, found, answered=answered)


def _sides(study: Study, name: Name) -> Iterator[tuple[Block, str, tuple[str, int], tuple[str, int]]]:
    fixed = is_the_protocols(study)
    for block in primary_blocks(study):
        arms = study.arms(block)
        for base in BASES if fixed else [arm for arm in ARMS if arm in arms and f"sat_{arm}" in ARMS]:
            sat, control = f"sat_{base}", f"{base}{SUFFIX}" if name == "H1" else base
            lags = LAGS[name] if fixed else [lag for lag in study.lags(block) if lag > 0]
            if name == "H3":
                if fixed or ((block, base, 0) in study.asked and lags):
                    yield block, base, (base, max(lags)), (base, 0)
                continue
            for lag in lags:
                if fixed or all((block, arm, lag) in study.asked for arm in (sat, control)):
                    yield block, base, (sat, lag), (control, lag)


def correct(tests: Sequence[Test]) -> list[Test]:
    """The tests of one family, with Holm's p; those that are not answered count as p = 1."""
    adjusted = holm([test.found.p if test.answered and test.found else None for test in tests])
    return [replace(test, adjusted=p) for test, p in zip(tests, adjusted, strict=True)]


def families(study: Study, *, closed: bool = False) -> dict[Name, Family]:
    """H1, H2 and H3 of a study.

    In the protocol's setting their members are those that it names, whether asked for or not. Elsewhere they are the
    comparisons that were asked for, under the same rule, at all learning rates, without lag 0 for H1 and H2. Where few
    seeds of the real stack were asked for, they are not tested.
    """
    names: tuple[Name, ...] = ("H1", "H2", "H3")
    found = {name: [compare(study, *sides, closed=closed) for sides in _sides(study, name)] for name in names}
    if described(study):
        return {
            name: Family(name, [replace(test, tested=False) for test in tests], tested=False)
            for name, tests in found.items()
        }
    return {name: Family(name, correct(tests)) for name, tests in found.items()}


def further(study: Study, tested: Iterable[Family]) -> list[Test]:
    """Every arm against its base, and every SAT arm against its matched one, outside the families: no correction."""
    inside = {(test.block, test.first, test.second) for family in tested for test in family.tests}
    found = []
    for block in study.blocks:
        arms = study.arms(block)
        for arm in arms:
            source = matched_to(arm)
            base = base_of(source).name if source else ARMS[arm].base if arm in ARMS else None
            control = f"{arm.removeprefix('sat_')}{SUFFIX}" if arm.startswith("sat_") else None
            for other in (base, control):
                for lag in study.lags(block):
                    sides = ((arm, lag), (other or "", lag))
                    if other in arms and (block, *sides) not in inside:
                        due = set.intersection(*(set(study.asked.get((block, *side), [])) for side in sides))
                        test = compare(study, block, base or arm, *sides, closed=True, due=due)
                        found += [test] if test.found else []
    return found


Claim = Literal[
    "beats", "is beaten", "depends", "not on every task", "one task", "no advantage", "not answered", "described"
]


def claim(tests: Sequence[Test]) -> Claim:
    """What the tests of one base loss say together.

    ``beats``: at least one lag is better on each task, and none worse on any. ``is beaten``: the mirror image.
    ``depends``: better and worse both occur. ``not on every task``: only one of them, and not on each task.
    ``one task``: better or worse, where another task was not asked for (a claim needs both, which differ in what a
    tighter radius does). ``no advantage``: all undecided or without a difference that matters. ``not answered``: a
    test is. ``described``: they are no tests.
    """
    verdicts = [test.verdict for test in tests]
    if not tests or "not answered" in verdicts:
        return "not answered"
    if "described" in verdicts:
        return "described"
    tasks = {test.block.task for test in tests}
    better = {test.block.task for test in tests if test.verdict == "better"}
    worse = {test.block.task for test in tests if test.verdict == "worse"}
    if (better or worse) and len(tasks) < len(TASKS):
        return "one task"
    if better and worse:
        return "depends"
    if better == tasks:
        return "beats"
    if worse == tasks:
        return "is beaten"
    return "not on every task" if better or worse else "no advantage"
