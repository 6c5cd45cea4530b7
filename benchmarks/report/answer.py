"""The answer in words, as they follow from the verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from benchmarks.report.estimates import Difference, Unpaired
from benchmarks.report.protocol import ALPHA, Claim, Family, Name, Test, Verdict, claim, due_seeds, primary_blocks
from benchmarks.report.studies import Block, Study, label

Tone = Literal["yes", "no", "open"]


@dataclass(frozen=True)
class Finding:
    """One answer: a headline and the sentences under it; ``tone`` colours it."""

    title: str
    headline: str
    tone: Tone
    sentences: list[str] = field(default_factory=list)


def signed(value: float) -> str:
    """``+0.031``, with a real minus sign; what rounds to 0 keeps its sign."""
    return f"{value + 0.0:+.3f}".replace("-", "−")  # + 0.0: 0 itself has none


def p_text(p: float | None) -> str:
    """A p-value to two digits, or as many as show on which side of the level it is; a dash where there is none."""
    if p is None or p < 0.001:
        return "–" if p is None else "<0.001"
    texts = (f"{p:.{digits}g}" for digits in range(2, 18))  # with 17 digits it is p itself
    return next(text for text in texts if (float(text) < ALPHA) == (p < ALPHA))


def p_words(p: float | None) -> str:
    """``p = 0.012``, ``p < 0.001``."""
    text = p_text(p)
    return f"p < {text[1:]}" if text.startswith("<") else f"p = {text}"


def interval(found: Difference | Unpaired | None) -> str:
    """``+0.031 [−0.002, +0.064]``."""
    if found is None:
        return "–"
    if found.low is None or found.high is None:
        return f"{signed(found.mean)} (no interval)"
    return f"{signed(found.mean)} [{signed(found.low)}, {signed(found.high)}]"


def counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def joined(items: Iterable[str]) -> str:
    """``a, b and c``."""
    parts = list(items)
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}" if parts else ""


def _where(test: Test, tests: Sequence[Test]) -> str:
    return f"{_task(test, tests)} at lag {test.lag}"


def _task(test: Test, tests: Sequence[Test]) -> str:
    """The task, with the learning rate where these tests have several."""
    rates = {other.block.lr for other in tests if other.block.task == test.block.task}
    return test.block.task if len(rates) == 1 else str(test.block)


def _each(tests: Sequence[Test], verdict: str) -> str:
    chosen = [test for test in tests if test.verdict == verdict]
    return "; ".join(f"{_where(test, tests)} {interval(test.found)}, {p_words(test.adjusted)}" for test in chosen)


def _left_open(tests: Sequence[Test]) -> str:
    """The largest difference either way that an interval still holds."""
    known = [test for test in tests if test.answered and test.found and test.found.high is not None]
    if not known:
        return ""
    top = max(known, key=lambda test: test.found.high or 0.0)  # type: ignore[union-attr]
    low = min(known, key=lambda test: test.found.low or 0.0)  # type: ignore[union-attr]
    assert top.found is not None
    assert low.found is not None
    assert top.found.high is not None
    assert low.found.low is not None
    return (
        f"The intervals leave open differences from {signed(low.found.low)} ({_where(low, tests)}) "
        f"to {signed(top.found.high)} ({_where(top, tests)})."
    )


_VERDICTS: tuple[Verdict, ...] = ("better", "worse", "no difference that matters", "undecided")
_HEADLINES: dict[Claim, tuple[str, Tone]] = {
    "beats": ("Yes: {first} beats {second}, on every task and worse nowhere", "yes"),
    "is beaten": ("No: {first} is worse than {second} on every task and better nowhere", "no"),
    "depends": ("It depends: {first} is better than {second} in places and worse in others", "open"),
    "one task": ("No claim from one task: {first} differs from {second} in places", "open"),
    "not on every task": ("Not claimed: {first} differs from {second}, but not on every task", "open"),
    "no advantage": ("No advantage of {first} over {second} was found", "no"),
}


def _not_answered(tests: Sequence[Test], study: Study) -> str:
    """How much of it is there, in comparisons and in their cells."""
    sides = {(test.block, *side) for test in tests for side in (test.first, test.second)}
    due = sum(len(due_seeds(study, *side)) for side in sides)
    done = sum(len(study.values(*side)) for side in sides)
    rest = sum(not test.answered for test in tests)
    return (
        f"Not answered: {rest} of {counted(len(tests), 'comparison')} incomplete, "
        f"{done:,} of {counted(due, 'cell')} done"
    )


def _about(family: Family, base: str) -> tuple[str, str]:
    sat = label(f"sat_{base}")
    return sat, f"{label(base)} at the same mean radius, fixed" if family.name == "H1" else label(base)


def _finding(study: Study, family: Family, base: str, rest: Sequence[Test]) -> Finding:
    tests = family.of(base)
    first, second = _about(family, base)
    said = claim(tests)
    title = f"{first} against {second}"
    if said == "described" or (tests and not family.tested):
        return _described(title, tests, study)
    if said == "not answered":
        sentences = _verdicts(tests) if any(test.answered for test in tests) else []
        return Finding(title, _not_answered(tests, study), "open", [*sentences, *_interim(tests)])
    text, tone = _HEADLINES[said]
    sentences = [
        *_verdicts(tests),
        _left_open(tests),
        *_elsewhere(study, family, base, said, rest),
    ]
    return Finding(title, text.format(first=first, second=second), tone, [one for one in sentences if one])


def _described(title: str, tests: Sequence[Test], study: Study) -> Finding:
    """Of comparisons that are no tests: what the seeds say, and no claim."""
    title = f"{title} (described, not tested)"
    if not all(test.answered for test in tests):
        return Finding(title, _not_answered(tests, study), "open", _interim(tests))
    means = [test.found.mean for test in tests if test.found]
    n = max(test.found.n for test in tests if test.found)
    texts = [f"{_where(test, tests)}: {interval(test.found)}" for test in tests]
    headline = f"{counted(n, 'seed')}, no claim: means from {signed(min(means))} to {signed(max(means))}"
    return Finding(title, headline, "open", [f"{'; '.join(texts)}. 95 % intervals, uncorrected.", _left_open(tests)])


def _verdicts(tests: Sequence[Test]) -> list[str]:
    """How many of each verdict, with the numbers of those that are better or worse."""
    found = []
    answered = [test for test in tests if test.answered]
    n = sorted({test.found.n for test in answered if test.found})
    seeds = f"{n[0]}" if len(n) == 1 else f"{n[0]} to {n[-1]}"
    counts = {name: sum(test.verdict == name for test in answered) for name in _VERDICTS}
    shares = ", ".join(f"{name} in {number}" for name, number in counts.items())
    found.append(f"{counted(len(answered), 'comparison')} over {seeds} common seeds, corrected by Holm: {shares}.")
    for verdict in ("better", "worse"):
        if counts[verdict]:
            found.append(f"{verdict.capitalize()}: {_each(answered, verdict)}.")
    return found


def _interim(tests: Sequence[Test]) -> list[str]:
    """What there is so far of the unanswered ones; no verdict."""
    some = [test for test in tests if not test.answered and test.found]
    if not some:
        return []
    texts = [f"{_where(test, tests)} {interval(test.found)} (n = {test.found.n})" for test in some if test.found]
    return [f"So far, uncorrected and no verdict: {'; '.join(texts)}."]


def _elsewhere(study: Study, family: Family, base: str, said: Claim, rest: Sequence[Test]) -> list[str]:
    """The same comparison at learning rates outside the family: a claim that holds at one rate alone is named so."""
    sides = {(test.first[0], test.second[0]) for test in family.of(base)}
    others = [
        test for test in rest
        if (test.first[0], test.second[0]) in sides and test.lag > 0 and test.block not in primary_blocks(study)
    ]  # fmt: skip
    if not others:
        return [] if said == "no advantage" else ["It was not run at another learning rate."]
    above = {test.block.task for test in others if test.found and (test.found.low or 0) > 0}
    below = {test.block.task for test in others if test.found and (test.found.high or 0) < 0}
    tasks = {test.block.task for test in family.of(base)}
    rates = ", ".join(dict.fromkeys(f"{test.block.task} {test.block.lr:g}" for test in others))
    count = sum(bool(test.found and ((test.found.low or 0) > 0 or (test.found.high or 0) < 0)) for test in others)
    if any(test.missing for test in others):
        return [f"At other learning rates ({rates}) seeds are missing yet."]
    text = f"At other learning rates ({rates}; uncorrected): {count} of {counted(len(others), 'interval')} exclude 0"
    if said in ("beats", "is beaten"):
        holds = (above, below) if said == "beats" else (below, above)
        text += (
            "; the claim holds there too" if holds[0] >= tasks and not holds[1] else "; the claim does not hold there"
        )
    elif count:
        directions = [f"above on {joined(sorted(above))}"] if above else []
        directions += [f"below on {joined(sorted(below))}"] if below else []
        text += f", {joined(directions)}"
    return [f"{text}."]


def lag_hurts(study: Study, family: Family) -> Finding:
    """H3: the base losses at the longest lag against lag 0."""
    tests = family.tests
    title = "What lag costs the base losses"
    if not family.tested:
        return _described(title, tests, study)
    if not all(test.answered for test in tests):
        return Finding(title, _not_answered(tests, study), "open", _interim(tests))
    texts = [
        f"{label(test.base)}, {_task(test, tests)}: {interval(test.found)} from lag 0 to {test.lag}, "
        f"{p_words(test.adjusted)}"
        for test in tests
    ]
    worse = sum(test.verdict == "worse" for test in tests)
    headline = f"Lag hurts in {worse} of {counted(len(tests), 'case')}"
    return Finding(title, headline, "yes" if worse == len(tests) else "open", [f"{text}." for text in texts])


def _trend(values: Sequence[float]) -> str:
    steps = np.diff(values)
    return "rises" if (steps > 0).all() else "falls" if (steps < 0).all() else "goes up and down"


def turns_itself_off(study: Study, blocks: Sequence[Block]) -> Finding | None:
    """H4: SAT's mean effective radius and intercepted share over the lags; described, not tested. None without SAT."""
    sentences, agreeing, whole = [], [], True
    for block in blocks:
        for arm in [arm for arm in study.arms(block) if arm in ("sat_grpo", "sat_gspo")]:
            lags = [lag for lag in study.lags(block) if lag > 0 and study.values(block, arm, lag, "eps_eff_high")]
            if len(lags) < 2:
                continue
            parts, trends = [], []
            for metric, name in (("eps_eff_high", "upper effective radius"), ("intercepted", "intercepted share")):
                means = [float(np.mean(list(study.values(block, arm, lag, metric).values()))) for lag in lags]
                trends.append(_trend(means))
                parts.append(f"{name} {trends[-1]} ({means[0]:.3g} to {means[-1]:.3g})")
            agreeing.append(trends == ["rises", "falls"])
            seeds = [len(study.values(block, arm, lag)) for lag in lags]
            whole &= all(n == len(due_seeds(study, block, arm, lag)) for n, lag in zip(seeds, lags, strict=True))
            n = f"{seeds[0]}" if len(set(seeds)) == 1 else f"{min(seeds)} to {max(seeds)}"
            where = f"{label(arm)}, {block.task} at rate {block.lr:g}, lags {lags[0]} to {lags[-1]} (n = {n})"
            sentences.append(f"{where}: {joined(parts)}.")
    if not sentences:
        return None
    title = "Does SAT turn itself off as lag grows? (described, not tested)"
    count = f"in {sum(agreeing)} of {counted(len(agreeing), 'case')}"
    headline = f"{'' if whole else 'So far: '}Radius up and interceptions down, lag by lag, {count}"
    return Finding(title, headline, "yes" if whole and all(agreeing) else "open", sentences)


def findings(study: Study, families: dict[Name, Family], rest: Sequence[Test]) -> list[Finding]:
    """The answers of one study, the primary one first; ``rest`` are the comparisons outside the families."""
    found = [_finding(study, families[name], base, rest) for name in ("H1", "H2") for base in families[name].bases]  # type: ignore[index]
    if not families["H1"].tests:
        nothing = "No arm with SAT's mean radius was asked for, so nothing here says whether adapting helps"
        found.insert(0, Finding("Does SAT beat its matched fixed radius?", nothing, "open"))
    found += [lag_hurts(study, families["H3"])] if families["H3"].tests else []
    trend = turns_itself_off(study, primary_blocks(study))
    return [*found, *([trend] if trend else [])]
