"""``python -m recipes.tasks write task=chain out=DIR``: write a task's train and test sets."""

from __future__ import annotations

import sys

from recipes.errors import ConfigError
from recipes.tasks import get_task, write_parquet
from recipes.tasks.cli import parse_settings

USAGE = """usage: python -m recipes.tasks write task=NAME out=DIR [train_size=N] [test_size=N] [seed=N] [difficulty...]
tasks: chain (digits=6), sort (digits=8), arithmetic (digits=2 terms=2)"""


def main(words: list[str]) -> int:
    """Run the command line.

    Args:
        words: the arguments.

    Returns:
        The exit status: 0, or 2 for arguments that cannot work.
    """
    if words[:1] != ["write"]:
        print(USAGE, file=sys.stderr)
        return 2
    defaults = {"train_size": 8192, "test_size": 512, "seed": 0}
    try:
        settings = parse_settings(words[1:], defaults, required=("task", "out"))
        task = get_task(settings["task"], settings["difficulty"])
        made = write_parquet(
            task, str(settings["out"]), settings["train_size"], settings["test_size"], settings["seed"]
        )
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{made.train}\n{made.test}\nrows sha256 {made.manifest['rows_sha256']}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
