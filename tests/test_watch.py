"""A wait that does not end ends the run, and says what it was for."""

import json
import subprocess
import sys
import threading
import time

import pytest
from omegaconf import OmegaConf
from rich.console import Console

from recipes import launch
from recipes.progress import Progress


@pytest.fixture
def process():
    started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    yield started
    started.kill()
    started.wait()


def follow(process, run_dir, limit):
    cfg = OmegaConf.create({"steps": 4, "sat_verl": {"wait_limit_s": limit}})
    console = Console(record=True, force_terminal=False, width=200)
    with Progress(run_dir, cfg, console) as progress:
        return launch.watch(process, cfg, progress), console.export_text()


def waits(run_dir, what):
    (run_dir / "wait.json").write_text(json.dumps({"for": what, "since": time.time()}))


def test_a_wait_without_progress_is_given_up(process, tmp_path, monkeypatch):
    monkeypatch.setattr("recipes.progress._LONG_WAIT_S", 0.3)
    waits(tmp_path, "the weight sync")
    cause, shown = follow(process, tmp_path, 1)
    assert "while waiting for the weight sync" in cause
    assert "sat_verl.wait_limit_s=1" in cause
    assert "still waiting for the weight sync (" in shown


def test_a_process_that_never_begins_is_given_up(process, tmp_path):
    cause, _ = follow(process, tmp_path, 0.5)
    assert "while waiting for the training processes to start" in cause


def test_progress_and_an_end_are_not_a_hang(process, tmp_path):
    """The wait is longer than the limit, but there is progress within it."""
    waits(tmp_path, "the validation")
    timer = threading.Timer(0.6, waits, (tmp_path, "the validation"))
    end = threading.Timer(1.2, process.kill)
    timer.start()
    end.start()
    cause, shown = follow(process, tmp_path, 1)
    assert cause is None
    assert "waiting for" not in shown, "a short wait is no news"
