"""From the sets that were asked for to a folder with ``train.parquet``, its manifest and its report."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path, PurePosixPath
from typing import Any

from eval.schema import Problem
from recipes import benchmark
from recipes.errors import ConfigError
from recipes.prepare import decontaminate, distinct, report
from recipes.prepare import out as target
from recipes.prepare.distinct import Distinct, Merged
from recipes.prepare.sets import MIXTURES
from recipes.prepare.settings import SetSettings, Settings
from recipes.prepare.sources import Opened, open_source
from recipes.tasks.artifacts import MANIFEST, key_digest, publish, read_intact

# Part of every key: raise it when a change here changes the rows.
VERSION = 2
TRAIN, REPORT, MATCHES = "train.parquet", "report.md", "contaminated.jsonl"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Prepared:
    """A finished folder.

    Attributes:
        folder: it holds ``train.parquet``, ``manifest.json``, ``report.md`` and ``contaminated.jsonl``.
        manifest: as it was written.
        reused: whether it was there already.
    """

    folder: Path
    manifest: dict[str, Any]
    reused: bool


def _silent(_line: str) -> None:
    pass


def prepare(settings: Settings, say: Say = _silent, progress: Say = _silent) -> Prepared:
    """Build a training set, or find it built.

    An interrupted command goes on when it is given again: what each set's rows came down to is kept beside ``out``
    until ``out`` is whole, and is used only if the files it was read from are still the same.

    Args:
        settings: of the command.
        say: told what the user should read.
        progress: told how far it is, now and then.

    Raises:
        ConfigError: a set or a benchmark that cannot be had, data that are not what they should be, or an ``out`` that
            holds other files, cannot be written, or is being written by another command.
    """
    out = target.resolve(settings.out)
    found = decontaminate.references(settings.against, settings.benchmark_sources, settings.skip)
    opened = [open_source(one.known, one.source, one.revision or _recorded(out, one)) for one in settings.sets]
    for source in opened:
        for warning in source.warnings:
            say(f"warning: {warning}")
    key = _key(settings, opened, found)
    manifest = read_intact(out, key)
    if manifest is not None:
        return Prepared(settings.out, manifest, reused=True)
    with target.alone(out) as work:
        manifest = publish(out, key, _content(settings, opened, found, work, say, progress))
        target.clear(work)
    return Prepared(settings.out, manifest, reused=False)


def _content(
    settings: Settings,
    opened: Sequence[Opened],
    found: Sequence[decontaminate.Reference],
    work: Path,
    say: Say,
    progress: Say,
) -> Callable[[Path], dict[str, Any]]:
    """What writes the files and returns what the manifest says of them; all is read and compared before."""
    sets = [_distinct(one, source, work, say, progress) for one, source in zip(settings.sets, opened, strict=True)]
    checks = [
        check
        for one, source, got in zip(settings.sets, opened, sets, strict=True)
        for check in _checks(one, source, got)
    ]
    _require(checks, settings.allow_faults)
    merged = distinct.merge(sets, settings.contradicted == "keep")
    matches = decontaminate.find(
        merged.problems,
        found,
        lambda done, hits: progress(f"compared {done} of {len(merged.problems)} problems: {hits} matches"),
    )
    kept = _without(merged, matches, settings.contaminated)
    facts = _facts(settings, opened, sets, checks, merged, found, matches, kept)

    def write(staged: Path) -> dict[str, Any]:
        import pandas as pd

        rows = benchmark.rows(kept, settings.prompt, "train")
        pd.DataFrame(rows).to_parquet(staged / TRAIN, index=False)
        (staged / MATCHES).write_text("".join(json.dumps(one.as_dict(), ensure_ascii=False) + "\n" for one in matches))
        digest = {"rows_sha256": hashlib.sha256(json.dumps(rows, sort_keys=True).encode()).hexdigest()}
        (staged / REPORT).write_text(report.markdown(facts | digest))
        return facts | digest

    return write


def _recorded(out: Path, one: SetSettings) -> str | None:
    """The commit that an earlier command read into ``out``, so that the same command reads the same rows again."""
    if one.known.revision is not None and one.source is None:
        return None
    try:
        sets = json.loads((out / MANIFEST).read_text())["sets"]
    except (OSError, ValueError, KeyError):
        return None
    return next((before["commit"] for before in sets if before["name"] == one.known.name), None)


def _key(settings: Settings, opened: Sequence[Opened], found: Sequence[decontaminate.Reference]) -> dict[str, Any]:
    texts = {
        one.name: hashlib.sha256(json.dumps([dict(one.statements), dict(one.fingerprints)]).encode()).hexdigest()
        for one in found
    }
    return {
        "sets": [
            {"name": one.known.name, "files": source.sha256, "columns": vars(one.columns), "commit": source.commit}
            for one, source in zip(settings.sets, opened, strict=True)
        ],
        "against": texts,
        "skipped": list(settings.skip),
        "contaminated": settings.contaminated,
        "contradicted": settings.contradicted,
        "prompt": settings.prompt,
        "allow_faults": settings.allow_faults,
        "rule": [decontaminate.LENGTH, decontaminate.COVERED],
        "version": VERSION,
    }


def _distinct(one: SetSettings, source: Opened, work: Path, say: Say, progress: Say) -> Distinct:
    """A set's different texts: read, or found as an interrupted command left them."""
    name = one.known.name
    key = {"set": name, "files": source.sha256, "columns": vars(one.columns), "version": VERSION}
    folder = work / key_digest(key)
    manifest = read_intact(folder, key)
    if manifest is None:
        got = distinct.collect(
            one.known,
            source.batches(),
            one.columns,
            lambda rows, texts: progress(f"{name}: {rows} rows, {texts} different texts"),
        )

        def write(staged: Path) -> dict[str, Any]:
            with (staged / "problems.jsonl").open("w", encoding="utf-8") as file:
                file.writelines(distinct.to_lines(got.problems))
            return {"rows": got.rows, "wrapped": got.wrapped, "contradicted": got.contradicted}

        publish(folder, key, write, owned=True)
        return got
    say(f"{name}: going on with the {manifest['rows']} rows that were read before")
    with (folder / "problems.jsonl").open(encoding="utf-8") as lines:
        problems = [Problem.model_validate_json(line) for line in lines]
    return Distinct(problems, manifest["rows"], manifest["wrapped"], manifest["contradicted"])


def _checks(one: SetSettings, source: Opened, got: Distinct) -> list[dict[str, Any]]:
    """What is known of a set against what was read."""
    known = one.known
    checks: list[dict[str, Any]] = []

    def add(what: str, expected: Any, actual: Any) -> None:
        checks.append(
            {"set": known.name, "what": what, "expected": expected, "actual": actual, "ok": expected == actual}
        )

    names = {name: PurePosixPath(name).name for name in source.sha256}
    digests = {names[name]: digest for name, digest in source.sha256.items() if names[name] in known.sha256}
    original = source.commit is not None and source.commit == known.revision and one.source is None
    for name, digest in digests.items():
        if original:
            add(f"sha256 of {name}", known.sha256[name], digest)
    # A local copy may hold each text once: then its rows are the different texts of the original.
    if known.rows is not None and (original or known.distinct is None or got.rows != len(got.problems)):
        add("rows", known.rows, got.rows)
    if known.distinct is not None:
        add("different texts", known.distinct, len(got.problems))
    if known.wrapper is not None and got.wrapped not in (0, len(got.problems)):
        add("texts with the set's own instructions", len(got.problems), got.wrapped)
    return checks


def _require(checks: Sequence[dict[str, Any]], allowed: bool) -> None:
    wrong = [check for check in checks if not check["ok"]]
    if wrong and not allowed:
        listed = "; ".join(f"{one['set']}: {one['what']} {one['actual']}, expected {one['expected']}" for one in wrong)
        raise ConfigError(
            "source", wrong[0]["set"], f"this copy is not the known one ({listed})",
            "take another copy or revision, or set allow_faults=true to go on with this one",
        )  # fmt: skip


def _without(merged: Merged, matches: Sequence[decontaminate.Match], action: str) -> list[Problem]:
    """The problems that are kept."""
    if not merged.problems:
        raise ConfigError(
            "contradicted", "drop", f"no problem is left: all {len(merged.contradicted)} texts have copies with "
            f"different answers, first {merged.contradicted[0]}", "contradicted=keep keeps the first of each",
        )  # fmt: skip
    hit = {match.place for match in matches}
    if hit and action == "fail":
        first = matches[0]
        raise ConfigError(
            "contaminated", action, f"{len(hit)} problems are in a benchmark, first {first.problem} ({first.benchmark} "
            f"{first.matched}, by {first.rule})", "contaminated=drop removes them",
        )  # fmt: skip
    kept = [problem for place, problem in enumerate(merged.problems) if action == "keep" or place not in hit]
    if not kept:
        others = f", {len(merged.contradicted)} more are contradicted" if merged.contradicted else ""
        raise ConfigError(
            "contaminated", action, f"no problem is left: {len(hit)} are in a benchmark{others}",
            "give another training set",
        )  # fmt: skip
    return kept


def _facts(
    settings: Settings,
    opened: Sequence[Opened],
    sets: Sequence[Distinct],
    checks: Sequence[dict[str, Any]],
    merged: Merged,
    found: Sequence[decontaminate.Reference],
    matches: Sequence[decontaminate.Match],
    kept: Sequence[Problem],
) -> dict[str, Any]:
    """What the manifest says beside keys and digests."""
    compared = decontaminate.summary(found, settings.skip, matches)
    clean = settings.contaminated == "drop" or not matches
    return {
        "sets": [
            {
                "name": one.known.name,
                "lineage": source.lineage,
                "commit": source.commit,
                "pinned": source.commit is not None and not source.warnings,
                "sha256": source.sha256,
                "rows": got.rows,
                "different_texts": len(got.problems),
                "kept": sum(problem.data_source == one.known.name for problem in kept),
            }
            for one, source, got in zip(settings.sets, opened, sets, strict=True)
        ],
        "checks": list(checks),
        "repeated": len(merged.repeated),
        "contradicted": merged.contradicted,
        "contaminated": {"action": settings.contaminated, "problems": len({match.place for match in matches})},
        "benchmarks": compared,
        "decontaminated_against": [name for name, one in compared.items() if one["checked"] and clean],
        "not_checked_against": [name for name, one in compared.items() if not one["checked"]],
        "rows": len(kept),
        "rows_as_published": MIXTURES.get(tuple(one.known.name for one in settings.sets)),
        "prompt": settings.prompt,
        "made_with": {name: version(name) for name in ("pyarrow", "pandas")},
    }
