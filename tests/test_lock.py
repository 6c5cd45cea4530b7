"""One run per folder."""

import subprocess
import sys

import pytest
from rich.console import Console

from recipes.errors import ConfigError
from recipes.lock import locked


def test_a_second_run_is_refused_and_a_third_is_not(tmp_path):
    console = Console(record=True)
    with (
        locked(tmp_path / "run", console),
        pytest.raises(ConfigError, match="another run is going on"),
        locked(tmp_path / "run", console, 0.6),
    ):
        pass
    assert "waiting for the earlier run" in console.export_text()
    with locked(tmp_path / "run", console, 0):
        pass


def test_the_folder_is_held_by_whoever_inherits_the_lock(tmp_path):
    console = Console(record=True)
    with locked(tmp_path, console) as lock:
        heir = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock])
    try:
        with pytest.raises(ConfigError), locked(tmp_path, console, 0):
            pass
    finally:
        heir.communicate(b"\n")
    with locked(tmp_path, console, 5):
        pass
