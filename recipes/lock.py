"""One run per folder: two writing the same records would leave neither."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from recipes.errors import ConfigError

LOCK_FILE = "lock"
PATIENCE_S = 60.0
"""An earlier run that was killed needs some seconds until the last of its processes is gone."""


@contextmanager
def locked(
    run_dir: Path,
    console: Console,
    patience_s: float = PATIENCE_S,
    setting: str = "run_dir",
    name: Path | None = None,
) -> Iterator[int]:
    """Hold the run folder; yields a file descriptor, and whoever inherits it holds the folder too.

    The supervisor does, so that a folder whose command was killed stays locked until its last process is gone.

    Args:
        run_dir: the folder; it is made if it is not there.
        console: told that this run waits.
        patience_s: seconds to wait for an earlier run.
        setting: that names the folder, for the message.
        name: what the message calls it, where that is not ``run_dir``.

    Raises:
        ConfigError: another run holds it, and still does after ``patience_s`` seconds.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with open(run_dir / LOCK_FILE, "w") as file:
        deadline, told = time.monotonic() + patience_s, False
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise ConfigError(
                        setting,
                        name or run_dir,
                        "another run is going on in this folder",
                        "wait for its end, or stop it",
                    ) from None
                if not told:
                    console.print(f"waiting for the earlier run in {run_dir} to end")
                    told = True
                time.sleep(0.5)
        yield file.fileno()
