"""The command line of ``python -m recipes.prepare``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eval.benchmarks.columns import Columns
from eval.benchmarks.load import MATH_PROMPT
from eval.prompts import check_template
from recipes.errors import ConfigError
from recipes.prepare.decontaminate import AGAINST
from recipes.prepare.sets import SETS, Known
from recipes.tasks.cli import parse_settings

USAGE = f"""usage: python -m recipes.prepare SET[+SET...] out=DIR [KEY=VALUE ...]

SET: {", ".join(SETS)}, a file (.parquet, .jsonl, .json), or OWNER/NAME of the hub; SET+SET mixes them

source=PATH            local copy of the set (file, folder, or saved by the datasets library), or OWNER/NAME of the hub
revision=COMMIT        of the hub's copy (default: the pinned one, else that in OUT/manifest.json, else the newest)
problem_column=, answer_column=, id_column=    where the columns are not found by their names
                       (of one set in a mixture: source.SET=PATH, revision.SET=..., problem_column.SET=..., ...)
against={",".join(AGAINST)}    benchmarks whose problems are removed
benchmark_source.NAME=FILE            where a benchmark's problems are
skip=NAME              leave a benchmark of against= unchecked
contaminated=drop|keep|fail           what to do with a problem that is in a benchmark
contradicted=drop|keep                what to do with a problem whose copies have different answers
prompt=TEMPLATE        of the user turn, with {{statement}} (default: that of python -m eval)
allow_faults=true      go on where row counts or digests are not those of the known set"""

DEFAULTS: dict[str, Any] = {
    "against": ",".join(AGAINST),
    "skip": "",
    "contaminated": "drop",
    "contradicted": "drop",
    "prompt": MATH_PROMPT,
    "allow_faults": "false",
}
CHOICES = {
    "contaminated": ("drop", "keep", "fail"),
    "contradicted": ("drop", "keep"),
    "allow_faults": ("true", "false"),
}
PER_SET = ("source", "revision", "problem_column", "answer_column", "id_column")


@dataclass(frozen=True)
class SetSettings:
    """Of one training set: what it is, and where this run takes it from."""

    known: Known
    source: str | None = None
    revision: str | None = None
    columns: Columns = field(default_factory=Columns)


@dataclass(frozen=True)
class Settings:
    """Of one command."""

    sets: tuple[SetSettings, ...]
    out: Path
    against: tuple[str, ...] = AGAINST
    skip: tuple[str, ...] = ()
    benchmark_sources: dict[str, str] = field(default_factory=dict)
    contaminated: str = "drop"
    contradicted: str = "drop"
    prompt: str = MATH_PROMPT
    allow_faults: bool = False


def parse(words: Sequence[str]) -> Settings:
    """Read the command line.

    Raises:
        ConfigError: a word that is no setting, a value that is none of its choices, or a setting that is missing.
    """
    given = parse_settings(words[1:], DEFAULTS, required=("out",))
    rest = {name: str(value) for name, value in given.pop("difficulty").items()}
    for name, choices in CHOICES.items():
        if given[name] not in choices:
            raise ConfigError(name, given[name], "there is no such choice", f"choose one of {', '.join(choices)}")
    given["prompt"] = str(given["prompt"])
    check_template(given["prompt"])
    names = words[0].split("+")
    if not all(name.strip() for name in names):
        raise ConfigError(
            "set", repr(words[0]), "a set without a name", f"choose one of {', '.join(SETS)}, a path, ..."
        )
    if len(set(names)) < len(names):
        raise ConfigError("set", words[0], "it names a set twice", "name each once")
    sets = tuple(_set(name, rest, alone=len(names) == 1) for name in names)
    _check_different(sets)
    places = {name.partition(".")[2]: rest.pop(name) for name in list(rest) if name.startswith("benchmark_source.")}
    if rest:
        name = next(iter(rest))
        raise ConfigError(name, rest[name], "there is no such setting", f"see below\n\n{USAGE}")
    against, skip = (tuple(filter(None, str(given[name]).split(","))) for name in ("against", "skip"))
    if not against:
        raise ConfigError(
            "against", given["against"], "it names no benchmark", "name one, or keep all with contaminated=keep"
        )
    return Settings(
        sets, Path(str(given["out"])).expanduser(), against, skip, places, given["contaminated"], given["contradicted"],
        given["prompt"], given["allow_faults"] == "true",
    )  # fmt: skip


def _check_different(sets: Sequence[SetSettings]) -> None:
    """Refuse two sets that are one, or that reports could not tell apart."""
    for place, one in enumerate(sets):
        for other in sets[:place]:
            if _place(one) == _place(other):
                raise ConfigError(
                    "set", f"{other.known.name}+{one.known.name}", "it names a set twice", "name each once"
                )
            if one.known.name == other.known.name:
                raise ConfigError(
                    "set", one.known.name, f"{other.source or other.known.hub} and {one.source or one.known.hub} have "
                    "this name both", "rename the file or folder of one",
                )  # fmt: skip


def _place(one: SetSettings) -> str:
    source = one.source or one.known.hub
    path = Path(source).expanduser()
    return str(path.resolve()) if one.source and path.exists() else source


def _set(name: str, rest: dict[str, str], alone: bool) -> SetSettings:
    """One set, with its settings taken out of ``rest``."""
    known = SETS.get(name)
    source = None
    if known is None:
        short = "".join(char if char.isalnum() or char in "-_." else "_" for char in Path(name).stem)
        if not (Path(name).expanduser().exists() or name.count("/") == 1):
            raise ConfigError(
                "set",
                name,
                "there is no such set, file or folder",
                f"choose one of {', '.join(SETS)}, a path, or OWNER/NAME",
            )
        known, source = Known(short), name
    taken: dict[str, str] = {}
    for setting in PER_SET:
        for key in (f"{setting}.{name}", *([setting] if alone else ())):
            if key in rest:
                taken[setting] = rest.pop(key)
    where = Columns(
        taken.get("problem_column", known.columns.problem),
        taken.get("answer_column", known.columns.answer),
        taken.get("id_column", known.columns.id),
    )
    if "source" in taken and source is not None:
        raise ConfigError("source", taken["source"], f"{name} names its source already", "leave it out")
    return SetSettings(known, taken.get("source", source), taken.get("revision"), where)
