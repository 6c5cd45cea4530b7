"""Cells of the real stack: what is read of a run folder, and what a run that failed leaves in its record."""

import json
import os
import subprocess
import sys
import time

import pandas as pd
import pytest
from rich.console import Console

from benchmarks.lag_sweep import runner, verl_cells
from benchmarks.lag_sweep.lab_cells import ROOT
from benchmarks.lag_sweep.settings import parse
from benchmarks.lag_sweep.spec import Spec
from benchmarks.lag_sweep.store import Place
from recipes.compose import compose
from recipes.derive import derive
from recipes.launch import open_run_folder
from recipes.report import SUMMARY_FILE
from sat_verl import checkpoints
from sat_verl.lag import COUNTS, TIMES, LagSchedule
from sat_verl.records import RunRecorder

STEPS, LAG, RESPONSES, TOKENS = 8, 4, 128, 640
RATE = 1280.0
"""Response tokens per second of every step: half a second each."""


def spec(out, *words):
    settings = parse(["engine=verl", "task=chain", "arms=sat_gspo", f"lags={LAG}", f"steps={STEPS}", "eval_every=4",
                      f"out={out}", *words])  # fmt: skip
    return Spec(Place("chain", settings.arms[0], 1e-3, LAG, 0), settings)


def fill(cell, out):
    """The folder of a run that has done all its steps, written by the launcher's and the trainer's own functions."""
    folder = verl_cells.run_dir(out, cell.identity().key)
    cfg = derive(compose([*cell.words, f"run_dir={folder}", f"cache_dir={out / 'cache'}"]))
    problems = out / "test.parquet"
    pd.DataFrame({"prompt": ["1"] * 256}).to_parquet(problems)
    cfg.data.train_files = cfg.data.val_files = str(problems)
    cfg.actor_rollout_ref.model.path = "model"
    open_run_folder(cfg, ["python", "-m", "recipes.train"])
    recorder, schedule = RunRecorder(folder), LagSchedule("broadcast", LAG)
    recorder.worker([{"loss_mode": "sat_gspo", "function": "f"}])
    for phase in ("start engines", "engines ready", "train", "done"):
        recorder.phase(phase)
    recorder.validation(0, {"val-core/sat_verl/chain/acc/mean@1": 0.4}, 1.0)
    for window in (1, 2):
        for offset in range(LAG):
            age = schedule.age((window - 1) * LAG + offset + 1)
            row = {"actor/sat/eps_eff_low": 0.04, "actor/sat/eps_eff_high": 0.05, "actor/sat/intercepted": 0.02,
                   "actor/abs_log_ratio": 0.01 * (age + 1), "actor/grad_norm": 1.0, "lag/age": float(age),
                   "actor/ppo_kl": float("nan") if window == 1 and offset == 0 else 0.001,
                   "reward/groups_with_signal": 0.9, "response_length/tokens": TOKENS,
                   "perf/response_tokens_per_s": RATE}  # fmt: skip
            counts = dict.fromkeys(COUNTS + TIMES, 0) | {"responses": RESPONSES}
            recorder.add(row, {"prompts": [], "tokens_by_age": {str(age): TOKENS}} | counts)
        recorder.flush(window, LAG, {"timing_s/step": 2.0})
        recorder.validation(window, {"val-core/sat_verl/chain/acc/mean@1": 0.4 + 0.2 * window}, 1.0)
    saved = folder / "checkpoints" / "global_step_2"
    saved.mkdir(parents=True)
    checkpoints.mark(saved, {"global_step": 2, "optimizer_step": STEPS})
    return folder


@pytest.fixture(scope="module")
def closed(tmp_path_factory):
    """A run that was killed between its last step and its summary, taken up by the sweep."""
    out = tmp_path_factory.mktemp("sweep")
    cell = spec(out)
    folder = fill(cell, out)
    assert not verl_cells.finished(folder)
    return folder, verl_cells.run_cell(cell, folder)


def test_a_run_that_lacks_its_summary_alone_is_closed_not_run_again(closed):
    folder, outcome = closed
    assert outcome["status"] == "done", outcome.get("error")
    assert verl_cells.finished(folder)
    assert not folder.with_suffix(".log").exists()  # nothing was started


def test_a_run_folder_has_all_that_a_record_needs(closed):
    outcome = closed[1]
    metrics = outcome["metrics"]
    assert outcome["evaluations"] == {"step": [0, 4, 8], "success": [0.4, pytest.approx(0.6), pytest.approx(0.8)]}
    assert (metrics["final"], metrics["auc"]) == (pytest.approx(0.6), pytest.approx(0.6))
    assert (metrics["eps_eff_low"], metrics["eps_eff_high"], metrics["intercepted"]) == (0.04, 0.05, 0.02)
    assert outcome["ages"] == {"0": 1 / 8, "1": 2 / 8, "2": 2 / 8, "3": 2 / 8, "4": 1 / 8}
    assert metrics["lost_values"] == 1
    assert len(outcome["series"]["d_bar"]) == STEPS


def test_speed_is_that_of_every_step_whenever_its_row_was_written(closed):
    # A window's rows are written together: their times would give 4 steps' time to 7.
    assert closed[1]["metrics"]["samples_per_s"] == pytest.approx(RESPONSES * RATE / TOKENS)


def test_seconds_of_a_resumed_run_are_those_of_all_parts(closed):
    folder, before = closed
    path = folder / SUMMARY_FILE
    summary = json.loads(path.read_text())
    summary["wall_seconds"] |= {"total": 5.0, "phases": {"start engines": 20.0, "train": 30.0}}
    path.write_text(json.dumps(summary))
    assert verl_cells.read(folder)["metrics"]["seconds"] == 5
    summary["provenance"]["earlier_parts"] = [{}]
    path.write_text(json.dumps(summary))
    assert verl_cells.read(folder)["metrics"]["seconds"] == 50
    assert before["digest"] == verl_cells.read(folder)["digest"]


def test_a_folder_that_cannot_be_read_is_a_failed_cell(closed, tmp_path):
    (tmp_path / SUMMARY_FILE).write_text("{}")
    outcome = verl_cells.read_or_fail(tmp_path)
    assert outcome["status"] == "failed"
    assert "its folder cannot be read" in outcome["error"]


def test_a_failed_run_names_exit_status_cause_and_last_lines_without_places(tmp_path):
    folder, log = tmp_path / "runs" / "k", tmp_path / "runs" / "k.log"
    folder.mkdir(parents=True)
    earlier = "EarlierError: of the call before\n"
    log.write_text(
        earlier + f"run folder  {folder}\nerror training ended with exit code 1. First error in {folder}/train.log:\n\n"
        f'  File "{sys.prefix}/lib/x.py", line 3\nValueError: no luck; go on with: recipes.train resume={folder}\n'
    )
    outcome = verl_cells.failed(folder, log, 1, len(earlier))
    assert outcome["status"] == "failed"
    text = outcome["error"]
    assert text.splitlines()[-1].startswith("exit code 1: ValueError: no luck")
    assert "EarlierError" not in text
    assert "First error in runs/k/train.log" in text
    assert str(tmp_path) not in text
    assert sys.prefix not in text
    assert verl_cells.failed(folder, log, verl_cells.INTERRUPTED)["status"] == "interrupted"


def test_a_run_that_was_killed_shows_the_log_of_its_processes(tmp_path):
    folder, log = tmp_path / "runs" / "k", tmp_path / "runs" / "k.log"
    folder.mkdir(parents=True)
    log.write_text("  12.0 s  train\n")
    (folder / "train.log").write_text("".join(f"line {number}\n" for number in range(99)))
    text = verl_cells.failed(folder, log, -9)["error"]
    assert "line 98" in text
    assert "line 60" not in text
    assert text.splitlines()[-1] == "killed by SIGKILL: line 98"


def test_a_folder_of_a_run_that_never_began_does_not_stand_in_the_way(tmp_path):
    for name in ("begun", "unbegun", "foreign"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "lock").touch()
    (tmp_path / "begun" / "config.yaml").touch()
    (tmp_path / "foreign" / "thesis.tex").touch()
    for folder in list(tmp_path.iterdir()):
        verl_cells._clear(folder)
    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["begun", "foreign"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="prctl")
def test_a_run_ends_with_the_sweep_that_is_killed(tmp_path):
    child = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(open('ended', 'w').close())); "
    child += "open('ready', 'w').close(); signal.pause()"
    parent = (
        "import subprocess, sys; from benchmarks.lag_sweep.workers import end_with_parent; "
        f"subprocess.Popen([sys.executable, '-c', {child!r}], preexec_fn=end_with_parent).wait()"
    )
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen([sys.executable, "-c", parent], cwd=tmp_path, env=environment)
    deadline = time.monotonic() + 120
    while not (tmp_path / "ready").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.kill()
    process.wait()
    while not (tmp_path / "ended").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.slow
def test_a_run_that_the_recipe_refuses_is_a_failed_cell_that_says_why(tmp_path):
    """The real command: experts are to be replayed of a model that has none."""
    words = ["engine=verl", "task=chain", "arms=grpo_r3", "lags=1", "seeds=1", "steps=4", f"out={tmp_path}"]
    assert runner.run(parse(words), ["test"], Console(quiet=True)) == 1
    (record,) = (tmp_path / "cells").glob("*.json")
    cell = json.loads(record.read_text())
    assert cell["status"] == "failed"
    assert cell["error"].splitlines()[-1].startswith("exit code 2: error model=tiny: routing replay needs")
    assert str(tmp_path) not in record.read_text()
    assert (tmp_path / cell["run_dir"]).with_suffix(".log").is_file()
