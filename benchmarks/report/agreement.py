"""Does the laboratory predict the real stack? The same places of both engines, compared by a rule that is stated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any, Literal, NamedTuple

from benchmarks.arms import ARMS
from benchmarks.lag_sweep.matched import SUFFIX
from benchmarks.report.estimates import Difference, Unpaired, difference, holm, welch
from benchmarks.report.protocol import ALPHA
from benchmarks.report.studies import Block, Study

MARGIN = 0.05
"""Engines agree where the 95 % interval of their difference lies within plus and minus this (PROTOCOL_VERL.md)."""

OUTCOMES = {"auc": "AUC", "final": "final score"}
"""The first one is judged: with three seeds the other's interval is wider than the margin."""
JUDGED = "auc"

SAME = ("schedule", "model", "steps", "prompts_per_step", "responses_per_prompt", "eval_every", "eval_problems",
        "dual_clip", "quantile_scope")  # fmt: skip
"""Settings that two studies must share to be compared."""
_ENGINE_WORDS = ("backend=", "trainer_ranks=", "rollout_replicas=", "checkpoint.", "actor_rollout_ref.rollout.")
"""Overrides that mean nothing to the laboratory."""

Verdict = Literal["agree", "differ", "open", "interim", "not run"]


class Where(NamedTuple):
    """A place without its seed."""

    block: Block
    arm: str
    lag: int


@dataclass(frozen=True)
class Comparison:
    """One number of each engine at one place; or of a contrast of two arms, or of the mean over places.

    Attributes:
        name: of what is compared.
        lab, verl: by seed. The seeds of the two engines have nothing in common but their number.
        whole: no seed that was asked for is missing yet, on either side.
        found: the real stack minus the laboratory.
        adjusted: Holm's p among the places of the pair.
    """

    name: tuple[str, ...]
    lab: dict[int, float]
    verl: dict[int, float]
    whole: bool
    adjusted: float | None = None

    @cached_property
    def found(self) -> Unpaired | None:
        return welch(list(self.verl.values()), list(self.lab.values()))

    @property
    def verdict(self) -> Verdict:
        """``agree``: the interval lies within the margin. ``differ``: else, and p below .05, corrected where it is one
        of many. ``open``: neither. ``interim``: seeds are missing yet. ``not run``: a side has nothing."""
        if self.found is None:
            return "not run"
        if not self.whole:
            return "interim"
        if self.found.low is None or self.found.high is None:
            return "open"
        if self.found.low >= -MARGIN and self.found.high <= MARGIN:
            return "agree"
        p = self.found.p if self.adjusted is None else self.adjusted
        return "differ" if p is not None and p < ALPHA else "open"


@dataclass
class Pair:
    """A study of the real stack and the one of the laboratory at the same settings; one of them may be missing."""

    lab: Study | None
    verl: Study | None
    _cache: dict[str, list[Comparison]] = field(default_factory=dict)

    @property
    def id(self) -> str:
        return f"agreement-{self.lab.number if self.lab else 'x'}-{self.verl.number if self.verl else 'x'}"

    @property
    def commands(self) -> list[dict[str, Any]]:
        return [call for study in (self.lab, self.verl) if study for call in study.commands]

    @cached_property
    def alone(self) -> list[str]:
        """Arms that the real stack was asked for and that the laboratory cannot run: they replay routes, or need a
        critic."""
        return [arm for arm in (self.verl.arms() if self.verl else []) if {"experts", "critic"} & set(_needs(arm))]

    @cached_property
    def places(self) -> list[Where]:
        """What the real stack was asked for and the laboratory can run, in order; without a real stack nothing."""
        if self.verl is None:
            return []
        study = self.verl
        return [
            Where(block, arm, lag)
            for block in study.blocks for arm in study.arms(block) for lag in study.lags(block)
            if (block, arm, lag) in study.asked and arm not in self.alone
        ]  # fmt: skip

    @property
    def shared(self) -> list[Where]:
        """Places of which both engines have a done cell."""
        return [place for place in self.places if self.values("lab", place) and self.values("verl", place)]

    def values(self, engine: str, place: Where, metric: str = JUDGED) -> dict[int, float]:
        study = self.lab if engine == "lab" else self.verl
        return study.values(*place, metric) if study else {}

    def whole(self, *places: Where) -> bool:
        """Whether every cell of these places is done or has failed, on both sides."""
        return all(_settled(study, place) for study in (self.lab, self.verl) for place in places)

    def compared(self, metric: str) -> list[Comparison]:
        """Every place; Holm's p over those that are whole."""
        if metric not in self._cache:
            found = [
                Comparison((place.arm, place.block.task, str(place.lag)), self.values("lab", place, metric),
                           self.values("verl", place, metric), self.whole(place))
                for place in self.places
            ]  # fmt: skip
            p = holm([one.found.p if one.whole and one.found else None for one in found])
            self._cache[metric] = [replace(one, adjusted=value) for one, value in zip(found, p, strict=True)]
        return self._cache[metric]

    def together(self, metric: str = JUDGED) -> list[Comparison]:
        """By task, the mean over all places that both engines have whole: one number a seed, so a narrower interval."""
        found = []
        for block in dict.fromkeys(place.block for place in self.shared):
            places = [place for place in self.shared if place.block == block and self.whole(place)]
            if len(places) > 1:
                lab, verl = (
                    _means([self.values(engine, place, metric) for place in places]) for engine in ("lab", "verl")
                )
                found.append(Comparison((f"mean of {len(places)} places", block.task, "all"), lab, verl, whole=True))
        return found

    def effects(self, metric: str = JUDGED) -> list[tuple[Comparison, Difference | None, Difference | None]]:
        """What a method does, in each engine: SAT minus its base and minus its matched radius, paired by seed there.

        Returns:
            (the engines' effects compared, the laboratory's effect, the real stack's).
        """
        found = []
        for place in self.places:
            if not place.arm.startswith("sat_"):
                continue
            base = place.arm.removeprefix("sat_")
            for other in (base, f"{base}{SUFFIX}"):
                control = place._replace(arm=other)
                if control not in self.places:
                    continue
                sides = [
                    (self.values(side, place, metric), self.values(side, control, metric)) for side in ("lab", "verl")
                ]
                lab, verl = ({seed: a[seed] - b[seed] for seed in sorted(a.keys() & b.keys())} for a, b in sides)
                name = (place.arm, other, place.block.task, str(place.lag))
                one = Comparison(name, lab, verl, whole=self.whole(place, control))
                found.append((one, difference(*sides[0]), difference(*sides[1])))
        return found


def _needs(arm: str) -> tuple[str, ...]:
    known = ARMS.get(arm.removesuffix(SUFFIX))
    return known.needs if known else ()


def _settled(study: Study | None, place: Where) -> bool:
    if study is None:
        return False
    states = {
        study.status[entry] for entry in study.status
        if (Block(entry.task, entry.lr), entry.arm, entry.lag) == (place.block, place.arm, place.lag)
    }  # fmt: skip
    return bool(states) and states <= {"done", "failed"}


def _means(values: Sequence[dict[int, float]]) -> dict[int, float]:
    """Mean over several places, of the seeds that all have."""
    seeds = set.intersection(*(set(one) for one in values))
    return {seed: fmean(one[seed] for one in values) for seed in sorted(seeds)}


def _comparable(lab: Study, verl: Study) -> bool:
    def own(study: Study) -> list[str]:
        return sorted(word for word in study.settings.get("overrides") or [] if not word.startswith(_ENGINE_WORDS))

    return all(lab.settings.get(name) == verl.settings.get(name) for name in SAME) and own(lab) == own(verl)


def pairs(studies: Sequence[Study]) -> list[Pair]:
    """Every study of the real stack with each of the laboratory at its settings.

    One without a partner is a pair with a side missing, and so are the laboratory's together where no study is of the
    real stack: the report says what was not run.
    """
    labs = [study for study in studies if study.settings["engine"] == "lab"]
    found = []
    for verl in (study for study in studies if study.settings["engine"] == "verl"):
        partners = [lab for lab in labs if _comparable(lab, verl)]
        found += [Pair(lab, verl) for lab in partners] or [Pair(None, verl)]
    return found or [Pair(labs[0] if labs else None, None)]


def unlike(pair: Pair) -> list[tuple[str, str, str]]:
    """(what, the laboratory's, the real stack's) of what differs although both are called the same."""
    assert pair.lab
    assert pair.verl
    lab, verl = pair.lab.settings, pair.verl.settings
    noise = f" and normal noise of {lab['noise']:g}" if lab.get("noise") else ""
    rows = [
        ("sampler", f"the trainer's own forward pass at older weights: log-probs differ by rounding (1e-6){noise}",
         "a separate inference engine: its kernels, its batching, its own random numbers"),
        ("trainer", "one process", "verl's workers, sharded, over the transfer queue"),
        ("order of prompts and noise of samples", "the laboratory's streams of a seed",
         "verl's data loader and one seed a response: a seed has no counterpart in the laboratory"),
        ("evaluation", "sampled by the trainer's weights", "sampled by the inference engine, after the weight sync"),
        ("matched radii", "the laboratory's own SAT cells", "the real stack's own SAT cells"),
    ]  # fmt: skip
    for name in sorted(lab.keys() | verl.keys()):
        if name != "engine" and lab.get(name) != verl.get(name):
            rows.append((name, str(lab.get(name)), str(verl.get(name))))
    for name, getter in (("code", "git"), ("versions", "versions")):
        ours, theirs = _origins(pair.lab, getter), _origins(pair.verl, getter)
        if ours != theirs:
            rows.append((name, ours, theirs))
    return rows


def _origins(study: Study, name: str) -> str:
    """Commits, or versions, that occur among the cells."""
    found = []
    for cell in study.cells:
        value = cell.provenance.get(name) or {}
        found.append(value.get("commit", "")[:10] if name == "git" else ", ".join(f"{k} {v}" for k, v in value.items()))
    return "; ".join(dict.fromkeys(text for text in found if text)) or "–"
