"""``python -m eval.compare a=RUN b=RUN [c=RUN ...] [policy=strict] [out=FILE.json]``: is a checkpoint better?"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from rich.console import Console

from eval.comparison import Comparisons, compare
from eval.comparison_table import print_comparisons
from eval.paired import Resample
from eval.schema import POLICIES
from eval.storage import read_results, write_atomically
from recipes.errors import ConfigError
from recipes.tasks.cli import parse_settings

USAGE = """usage: python -m eval.compare a=RUN b=RUN [c=RUN ...] [policy=strict|lenient] [resample=problems|samples]
           [seed=0] [out=FILE.json]
Each run is compared with the first. The names (a, b, ...) are yours."""

DEFAULTS: dict[str, Any] = {"policy": "strict", "resample": "problems", "seed": 0, "out": ""}


def _read(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, Path]]:
    settings = parse_settings(words, DEFAULTS, ())
    for name, good in (("policy", POLICIES), ("resample", ("problems", "samples"))):
        if settings[name] not in good:
            raise ConfigError(name, settings[name], "there is no such value", f"choose {' or '.join(good)}")
    if settings["seed"] < 0:
        raise ConfigError("seed", settings["seed"], "it is negative", "write e.g. seed=0")
    folders = {name: Path(str(value)) for name, value in settings["difficulty"].items()}
    for name, folder in folders.items():
        if not folder.is_dir():
            others = ", ".join(DEFAULTS)
            raise ConfigError(name, folder, "there is no such folder", f"name a run's folder (or a setting: {others})")
    if len(folders) < 2:
        raise ConfigError("argument", "", f"{len(folders)} run(s) to compare", "name two, as a=RUN b=RUN")
    return settings, folders


def _out(settings: dict[str, Any]) -> Path | None:
    """The file to write, which can be made; None if none is asked for."""
    if not settings["out"]:
        return None
    out = Path(str(settings["out"]))
    if out.is_dir():
        raise ConfigError("out", out, "it is a folder", "name a file in it, e.g. out=comparison.json")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError("out", out, f"its folder cannot be made ({error})", "name another file") from error
    return out


def _compare(settings: dict[str, Any], folders: dict[str, Path]) -> Comparisons:
    runs = {name: read_results(folder) for name, folder in folders.items()}
    try:
        return compare(
            runs, settings["policy"], resample=cast(Resample, settings["resample"]), seed=settings["seed"],
            folders={name: str(folder) for name, folder in folders.items()},
        )  # fmt: skip
    except ConfigError as error:
        if error.setting not in folders:
            raise
        raise ConfigError(error.setting, folders[error.setting], error.problem, error.fix) from error


def _write(out: Path, found: Comparisons) -> None:
    try:
        write_atomically(out, found.model_dump_json(indent=2) + "\n")
    except OSError as error:
        raise ConfigError("out", out, f"it cannot be written ({error})", "name another file") from error


def main(words: Sequence[str]) -> int:
    """Run the command line.

    Returns:
        0, or 2 for runs or settings that cannot be compared.
    """
    if not words or {"-h", "--help"} & {*words}:
        print(USAGE)
        return 0 if words else 2
    try:
        settings, folders = _read(words)
        out = _out(settings)
        found = _compare(settings, folders)
        if out is not None:
            _write(out, found)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print_comparisons(found, Console(width=None if sys.stdout.isatty() else 140))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
