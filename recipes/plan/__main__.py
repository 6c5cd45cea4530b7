"""``python -m recipes.plan [KEY=VALUE ...]`` plans a run; ``python -m recipes.plan paper [FILE]`` writes PAPER.md."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from recipes.compose import compose
from recipes.derive import derive
from recipes.errors import ConfigError
from recipes.plan import report
from recipes.plan.paper import document

PAPER_FILE = Path(__file__).parent / "PAPER.md"


def main(arguments: list[str]) -> int:
    """Plan what the arguments say; exit code 2 for bad input.

    Args:
        arguments: as for ``python -m recipes.train``; or ``paper`` and perhaps a file.
    """
    console = Console()
    try:
        if arguments[:1] == ["paper"]:
            target = Path(arguments[1]) if len(arguments) > 1 else PAPER_FILE
            target.write_text(document())
            console.print(f"wrote {target}", highlight=False)
            return 0
        cfg = derive(compose(arguments))
        run_dir = cfg.run_dir if any(one.startswith("run_dir=") for one in arguments) else None
        report(cfg, console, run_dir)
    except ConfigError as error:
        Console(stderr=True).print(Text.assemble(("error ", "bold red"), str(error)), soft_wrap=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
