"""``python -m benchmarks.speed COMMAND [NAME=VALUE ...]``; a command is a module here with ``USAGE`` and ``main``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from recipes.errors import ConfigError
from recipes.launch import RunFailedError

COMMANDS = ("loss", "start", "overlap", "overhead", "sync", "requests")


def main(words: Sequence[str]) -> int:
    """Run a command; 0; 2 for settings that cannot work, 1 for a stack that failed."""
    if not words or words[0] in ("-h", "--help", "help"):
        print(f"usage: python -m benchmarks.speed {{{','.join(COMMANDS)}}} [NAME=VALUE ...]")
        return 0
    try:
        if words[0] not in COMMANDS:
            raise ConfigError("command", words[0], "there is no such command", f"choose among {', '.join(COMMANDS)}")
        command = importlib.import_module(f"benchmarks.speed.{words[0]}")
        if {"-h", "--help"} & {*words}:
            print(command.USAGE)
            return 0
        return command.main(words[1:])
    except (ConfigError, RunFailedError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
