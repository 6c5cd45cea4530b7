"""Training problems that are also in a benchmark, found by text, by common word sequences, and by fingerprint.

Three rules, of which any removes a problem:

- ``text``: the statements are equal after :func:`~recipes.prepare.distinct.normalise`.
- ``ngram``: word sequences of length :data:`LENGTH` that the training problem has, too, cover at least
  :data:`COVERED` of the benchmark problem's words (as in Tülu 3, arXiv 2411.15124). It finds copies within a longer
  text, and copies with other numbers.
- ``fingerprint``: for AIME 2024 and 2025 hashes of word sequences are part of this package
  (:mod:`eval.benchmarks.fingerprint`), so that they are checked also where their statements are not at hand.

None finds a translation or a paraphrase.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from eval import benchmarks
from eval.benchmarks import contests, fingerprint
from eval.schema import Problem
from recipes.errors import ConfigError
from recipes.prepare.distinct import name_of, normalise

LENGTH = 8
COVERED = 0.5
AGAINST = ("aime24", "aime25", "math500")


@dataclass(frozen=True)
class Reference:
    """A benchmark to compare with.

    Attributes:
        name: of the benchmark.
        lineage: where its statements are from; empty without.
        statements: by the id of the problem; empty if they are not at hand.
        fingerprints: by the id of the problem.
    """

    name: str
    lineage: str
    statements: Mapping[str, str]
    fingerprints: Mapping[str, str]


@dataclass(frozen=True)
class Match:
    """A training problem that is in a benchmark.

    Attributes:
        place: of the training problem among those that were compared, from 0.
        problem: its ``SET:ID``, for people: a set may use an id twice.
        benchmark: name.
        matched: id of the benchmark's problem.
        rule: ``text``, ``ngram`` or ``fingerprint``.
        share: of the benchmark problem's words that are covered, or of its fingerprint; 1 for ``text``.
        numbers: where the two statements' numbers differ, in words; empty if nowhere, or unknown.
        beginning: of the training problem.
    """

    place: int
    problem: str
    benchmark: str
    matched: str
    rule: str
    share: float
    numbers: str
    beginning: str

    def as_dict(self) -> dict[str, Any]:
        """A line of ``contaminated.jsonl``."""
        return {name: value for name, value in asdict(self).items() if name != "place"}


def references(names: Sequence[str], places: Mapping[str, str], skipped: Sequence[str]) -> list[Reference]:
    """The benchmarks to compare with.

    Args:
        names: of benchmarks.
        places: where to take the statements of some of them from: files, or ``OWNER/NAME`` of the hub.
        skipped: those of ``names`` that may be left out.

    Raises:
        ConfigError: an unknown benchmark, or one that is not at hand and not skipped.
    """
    for setting, given in (("benchmark_source", places), ("skip", skipped)):
        for name in given:
            if name not in names:
                raise ConfigError(setting, name, "nothing is compared with it", f"name one of {', '.join(names)}")
    found = []
    for name in names:
        if name in skipped:
            continue
        prints = {key: entry["fingerprint"] for key, entry in contests.KEYS.get(name, {}).items()}
        try:
            benchmark = benchmarks.load(name, source=places.get(name), allow_faults=bool(prints))
        except ConfigError as error:
            if prints and name not in places:
                found.append(Reference(name, "", {}, prints))
                continue
            raise ConfigError(
                f"benchmark_source.{name}", places.get(name, ""),
                f"the training set cannot be compared with {name}: {error.problem}",
                f"give its problems with benchmark_source.{name}=FILE, or leave it unchecked with skip={name}: the set "
                "then does not count as decontaminated against it",
            ) from None  # fmt: skip
        found.append(Reference(name, benchmark.lineage, {one.id: one.statement for one in benchmark.problems}, prints))
    return found


class Finder:
    """Finds the problems of one benchmark in training problems."""

    def __init__(self, reference: Reference) -> None:
        self.reference = reference
        self.by_text = {normalise(text): key for key, text in reference.statements.items()}
        self.words = {key: fingerprint.words(text) for key, text in reference.statements.items()}
        self.places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
        for key, words in self.words.items():
            for start in range(len(words) - LENGTH + 1):
                self.places[tuple(words[start : start + LENGTH])].append((key, start))
        self.by_hash: dict[str, list[str]] = defaultdict(list)
        for key, kept in reference.fingerprints.items():
            for item in kept.split():
                self.by_hash[item].append(key)

    def find(self, problem: Problem, place: int = 0) -> Match | None:
        """The benchmark's problem that a training problem is, by the first rule that finds one."""
        if key := self.by_text.get(normalise(problem.statement)):
            return self._match(problem, place, key, "text", 1.0)
        key, share = self._covered(fingerprint.words(problem.statement))
        if key is not None and share >= COVERED:
            return self._match(problem, place, key, "ngram", share)
        key, share = self._alike(problem.statement)
        if key is not None and share >= contests.RECOGNISED:
            return self._match(problem, place, key, "fingerprint", share)
        return None

    def _covered(self, words: list[str]) -> tuple[str | None, float]:
        covered: dict[str, set[int]] = defaultdict(set)
        for start in range(len(words) - LENGTH + 1):
            for key, place in self.places.get(tuple(words[start : start + LENGTH]), ()):
                covered[key].update(range(place, place + LENGTH))
        shares = {key: len(places) / len(self.words[key]) for key, places in covered.items()}
        best = max(shares, key=shares.__getitem__, default=None)
        return best, shares.get(best, 0.0) if best is not None else 0.0

    def _alike(self, statement: str) -> tuple[str | None, float]:
        if not self.by_hash:
            return None, 0.0
        counts: dict[str, int] = defaultdict(int)
        for item in fingerprint.hashes(statement):
            for key in self.by_hash.get(item, ()):
                counts[key] += 1
        shares = {key: count / len(self.reference.fingerprints[key].split()) for key, count in counts.items()}
        best = max(shares, key=shares.__getitem__, default=None)
        return best, shares.get(best, 0.0) if best is not None else 0.0

    def _match(self, problem: Problem, place: int, key: str, rule: str, share: float) -> Match:
        numbers = fingerprint.numbers
        theirs = self.reference.statements.get(key)
        kept = numbers(theirs) if theirs is not None else contests.KEYS[self.reference.name][key]["numbers"].split()
        other = fingerprint.other_numbers(kept, numbers(problem.statement))
        begins = problem.statement[:100]
        return Match(place, name_of(problem), self.reference.name, key, rule, round(share, 3), other, begins)


def find(problems: Sequence[Problem], found: Sequence[Reference], progress: Callable[[int, int], None]) -> list[Match]:
    """The training problems that are in any of the benchmarks, each once per benchmark.

    Args:
        problems: of the training set.
        found: of :func:`references`.
        progress: told problems compared and matches so far.
    """
    finders = [Finder(reference) for reference in found]
    matches: list[Match] = []
    for place, problem in enumerate(problems):
        matches += [match for finder in finders if (match := finder.find(problem, place)) is not None]
        if (place + 1) % 1000 == 0 or place + 1 == len(problems):
            progress(place + 1, len(matches))
    return matches


def summary(found: Sequence[Reference], skipped: Sequence[str], matches: Sequence[Match]) -> dict[str, Any]:
    """By benchmark: whether and how it was checked, and what was found."""
    result: dict[str, Any] = {}
    for reference in found:
        mine = [match for match in matches if match.benchmark == reference.name]
        result[reference.name] = {
            "checked": True,
            "lineage": reference.lineage or "fingerprints of this package: no statements at hand",
            "statements": len(reference.statements),
            "fingerprints": len(reference.fingerprints),
            "training_problems": len(mine),
            "benchmark_problems": len({match.matched for match in mine}),
            "by_rule": {rule: sum(match.rule == rule for match in mine) for rule in ("text", "ngram", "fingerprint")},
        }
    return result | {name: {"checked": False} for name in skipped}
