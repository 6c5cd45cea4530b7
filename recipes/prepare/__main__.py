"""``python -m recipes.prepare SET[+SET...] out=DIR``: training data in verl's schema."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.status import Status

from recipes.errors import ConfigError
from recipes.prepare.build import TRAIN, Prepared, prepare
from recipes.prepare.settings import USAGE, parse


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

        def say(line: str) -> None:
            # A terminal shows the last line of progress, and keeps what has to be read.
            if console.is_terminal and not line.startswith("warning"):
                status.update(line)
            else:
                console.print(line, highlight=False, soft_wrap=True)

        try:
            made = prepare(parse(words), say)
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
