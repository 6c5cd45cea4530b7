"""``python -m benchmarks.report DIR [DIR ...] out=FILE.html``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from recipes.errors import ConfigError

USAGE = """usage: python -m benchmarks.report DIR [DIR ...] out=FILE.html [closed=true]
DIR are folders of benchmarks.lag_sweep, or hold such. Beside FILE.html, FILE.md and cells.parquet are written.
closed=true: the sweeps go no further; comparisons are judged by the seeds that they have."""


def main(words: Sequence[str]) -> int:
    """Run the command line; returns the exit status: 0, or 2 for bad input."""
    if not words or words[0] in ("help", "--help", "-h"):
        print(USAGE)
        return 0 if words else 2
    try:
        folders, out, closed = parse(words)
        from benchmarks.report.page import write
        from benchmarks.report.studies import read

        written = write(read(folders), out, ["python", "-m", "benchmarks.report", *words], closed=closed)
    except ConfigError as error:
        print(f"error: {error}\n{USAGE}", file=sys.stderr)
        return 2
    print("\n".join(map(str, written)))
    return 0


def parse(words: Sequence[str]) -> tuple[list[Path], Path, bool]:
    """(folders, page, closed) of a command line.

    Raises:
        ConfigError: no folder, no page, an unknown or repeated setting, a value that cannot work.
    """
    folders = [Path(word) for word in words if "=" not in word]
    given: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            continue
        if name not in ("out", "closed"):
            raise ConfigError(name, value, "there is no such setting", "use out=FILE.html and closed=true")
        if name in given:
            raise ConfigError(name, value, f"it is given twice, as {given[name]} before", "give it once")
        given[name] = value
    if not folders:
        raise ConfigError("DIR", "", "no folder is named", "name the out=DIR of python -m benchmarks.lag_sweep")
    if "out" not in given:
        raise ConfigError("out", "", "it is missing", "add out=FILE.html")
    if not given["out"].endswith(".html"):
        raise ConfigError("out", given["out"], "it is no page", "let it end in .html")
    if given.get("closed", "false") not in ("true", "false"):
        raise ConfigError("closed", given["closed"], "it is neither true nor false", "use closed=true")
    return folders, Path(given["out"]), given.get("closed") == "true"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
