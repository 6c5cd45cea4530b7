"""``python -m eval.regrade run=DIR``: grade the samples of a run again, and show which verdicts change."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from eval.resume import check_samples, graded_again
from eval.schema import POLICIES, Policy, Sample, Verdict
from eval.second_opinion import math_verify_verdict
from eval.storage import (
    PLAN_FILE,
    REPORT_FILE,
    RESULTS_FILE,
    SAMPLES_FILE,
    Plan,
    read_plan,
    read_results,
    read_samples,
    write_atomically,
    write_samples,
)
from eval.text import visible
from recipes.errors import ConfigError
from recipes.lock import locked
from recipes.tasks.cli import parse_settings
from sat_verl.grading import MathVerifyMissingError

USAGE = """usage: python -m eval.regrade run=DIR [policy=both|strict|lenient] [grader=ours|math_verify] [out=FILE.jsonl]
           [write=false|true]
Grades the samples of DIR again, shows the verdicts that change, and writes all samples with their new verdicts to
DIR/regraded.jsonl. grader=math_verify: what math-verify alone makes of the whole response, as a second opinion.
write=true: the new verdicts replace those of DIR/samples.jsonl, and results and report are made anew."""

DEFAULTS: dict[str, Any] = {"policy": "both", "grader": "ours", "out": "", "write": "false"}
REGRADED_FILE = "regraded.jsonl"
ANSWER_CHARS = 60

Samples = dict[tuple[str, int], Sample]


@dataclass(frozen=True)
class Change:
    """A verdict that is another one now."""

    problem: str
    sample: int
    policy: Policy
    old: Verdict
    new: Verdict


def second_opinion(plan: Plan, samples: Mapping[tuple[str, int], Sample]) -> Samples:
    """math-verify by itself, which knows no policies."""
    golds = {problem.id: problem.gold for problem in plan.benchmark.problems}
    found: Samples = {}
    for place, sample in samples.items():
        cut = sample.finish_reason == "length"
        verdict = math_verify_verdict(sample.response, golds[sample.problem], cut, plan.deadline_s)
        verdicts = dict.fromkeys(POLICIES, verdict)
        found[place] = sample.model_copy(update={"verdicts": verdicts, "grader": "math-verify alone"})
    return found


GRADERS: dict[str, Callable[[Plan, Samples], Samples]] = {"ours": graded_again, "math_verify": second_opinion}


def regrade(plan: Plan, samples: Samples, grader: str = "ours") -> Iterator[Sample]:
    """The samples with their new verdicts, in the order of problem and sample number.

    Args:
        plan: of the run.
        samples: of the run.
        grader: a name in :data:`GRADERS`.

    Raises:
        sat_verl.grading.MathVerifyMissingError: if math-verify is needed and not installed.
    """
    places = {problem.id: place for place, problem in enumerate(plan.benchmark.problems)}
    found = GRADERS[grader](plan, samples)
    yield from (found[key] for key in sorted(found, key=lambda key: (places[key[0]], key[1])))


def changes(old: Sample, new: Sample, policies: Sequence[Policy]) -> list[Change]:
    """The verdicts whose status or answer differ; other fields say how, not what."""
    pairs = [(policy, old.verdicts.get(policy), new.verdicts[policy]) for policy in policies]
    return [
        Change(old.problem, old.sample, policy, before, after)
        for policy, before, after in pairs
        if before is not None and (before.status, before.answer) != (after.status, after.answer)
    ]


def show(found: Sequence[Change], samples: int, console: Console) -> None:
    """Print what changes, statuses before answers."""
    if found:
        table = Table(title="Verdicts that change")
        for column in ("problem", "sample", "policy", "old", "new", "answer"):
            table.add_column(column, overflow="fold")
        for change in sorted(found, key=lambda change: change.old.status == change.new.status):
            table.add_row(
                escape(visible(change.problem)), str(change.sample), change.policy, change.old.status,
                " ".join(filter(None, (change.new.status, change.new.detail))), escape(visible(_answers(change))),
            )  # fmt: skip
        console.print(table)
    status = sum(change.old.status != change.new.status for change in found)
    console.print(f"{samples} samples: {status} statuses change, and {len(found) - status} answers without them")


def _answers(change: Change) -> str:
    old, new = (verdict.answer if verdict.answer is not None else "-" for verdict in (change.old, change.new))
    texts = [old] if old == new else [old, new]
    return " -> ".join(text if len(text) <= ANSWER_CHARS else text[:ANSWER_CHARS] + "..." for text in texts)


def _settings(words: Sequence[str]) -> dict[str, Any]:
    settings = parse_settings(words, DEFAULTS, required=("run",))
    for name, value in settings["difficulty"].items():
        raise ConfigError(name, value, "there is no such setting", f"choose among run, {', '.join(DEFAULTS)}")
    choices = {"policy": ("both", *POLICIES), "grader": tuple(GRADERS), "write": ("false", "true")}
    for name, good in choices.items():
        settings[name] = str(settings[name]).lower()
        if settings[name] not in good:
            raise ConfigError(name, settings[name], "there is no such value", f"choose {' or '.join(good)}")
    if settings["write"] == "true" and settings["grader"] != "ours":
        raise ConfigError("write", "true", "a second opinion is no verdict of this grader", "leave out grader or write")
    return settings


def _replace(folder: Path, plan: Plan, old: Samples, new: Sequence[Sample], command: list[str]) -> None:
    """New verdicts into samples.jsonl, and what follows from them."""
    from eval.run import conclude
    from eval.summary import summarize

    write_samples(folder, new)
    if (folder / RESULTS_FILE).is_file():
        before = read_results(folder)
        # What the old verdicts gave rise to may no longer be so; the rest is of the sampling.
        stale = summarize(plan, old, grader={}, timing={}, provenance={}, warnings=[]).warnings
        conclude(folder, plan, before.timing, [one for one in before.warnings if one not in stale], command)


def _target(settings: dict[str, Any], folder: Path) -> Path:
    """Where the new verdicts go.

    Raises:
        ConfigError: over a file of the run, or no file.
    """
    out = Path(str(settings["out"])) if settings["out"] else folder / REGRADED_FILE
    own = {(folder / name).resolve() for name in (PLAN_FILE, SAMPLES_FILE, RESULTS_FILE, REPORT_FILE)}
    if out.resolve() in own or out.is_dir():
        raise ConfigError(
            "out", out, "it is a file of the run, or a folder", "name another file; write=true replaces the verdicts"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    return out


def _run(words: Sequence[str], console: Console) -> Path:
    settings = _settings(words)
    folder = Path(str(settings["run"]))
    plan = read_plan(folder)
    with locked(folder, console, patience_s=5.0, setting="run"):
        samples = read_samples(folder)
        check_samples(folder, plan, samples)
        policies: Sequence[Policy] = POLICIES if settings["policy"] == "both" else (settings["policy"],)  # type: ignore[assignment]
        out = _target(settings, folder)
        new = list(regrade(plan, samples, settings["grader"]))
        found = [change for one in new for change in changes(samples[one.problem, one.sample], one, policies)]
        write_atomically(out, "".join(sample.model_dump_json() + "\n" for sample in new))
        show(found, len(new), console)
        if settings["write"] == "true":
            _replace(folder, plan, samples, new, ["python", "-m", "eval.regrade", *words])
    return out


def main(words: Sequence[str]) -> int:
    """Run the command line.

    Returns:
        0, or 2 for a run or settings that cannot be used.
    """
    if not words or {"-h", "--help"} & {*words}:
        print(USAGE)
        return 0 if words else 2
    console = Console()
    try:
        out = _run(words, console)
    except (ConfigError, MathVerifyMissingError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    console.print(str(out), soft_wrap=True, highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
