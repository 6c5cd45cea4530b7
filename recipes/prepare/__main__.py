"""``python -m recipes.prepare SET[+SET...] out=DIR``: training data in verl's schema."""

from __future__ import annotations

import sys
import time

from rich.console import Console
from rich.status import Status

from recipes.errors import ConfigError
from recipes.prepare.build import TRAIN, Prepared, prepare
from recipes.prepare.settings import USAGE, parse

LOG_EVERY_S = 10.0
"""Seconds between two lines of progress where nobody watches."""


def main(words: list[str]) -> int:
    """Run the command line.

    Args:
        words: the arguments.

    Returns:
        The exit status: 0, 2 for input that cannot work, 130 when interrupted (the same command then goes on).
    """
    if not words or words[0] in ("-h", "--help", "help"):
        print(USAGE, file=sys.stderr)
        return 2
    console = Console(stderr=True)
    with Status("reading", console=console) as status:
        shown = time.monotonic()

        def say(line: str) -> None:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

        def progress(line: str) -> None:
            nonlocal shown
            if console.is_terminal:
                status.update(line)
            elif time.monotonic() - shown >= LOG_EVERY_S:
                shown = time.monotonic()
                say(line)

        try:
            made = prepare(parse(words), say, progress)
        except ConfigError as error:
            console.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
            return 2
        except KeyboardInterrupt:
            console.print("interrupted: the same command goes on")
            return 130
    _tell(made, console)
    return 0


def _tell(made: Prepared, console: Console) -> None:
    facts = made.manifest
    state = "already there" if made.reused else "written"
    against = ", ".join(facts["decontaminated_against"]) or "nothing"
    console.print(f"{facts['rows']} rows {state}; decontaminated against {against}", highlight=False)
    if facts["not_checked_against"]:
        console.print(f"NOT checked against {', '.join(facts['not_checked_against'])}", highlight=False)
    print(f"{made.folder / TRAIN}\nrows sha256 {facts['rows_sha256']}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
