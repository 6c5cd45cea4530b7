"""A run without a signal says so; a healthy run says nothing."""

import json
import re

import pandas as pd
import pytest
from omegaconf import OmegaConf
from rich.console import Console

from recipes import report, signal

HEALTHY = {
    "reward/mean": 0.4,
    "reward/std": 0.49,
    "reward/groups_with_signal": 0.6,
    "actor/grad_norm": 0.8,
    "actor/abs_log_ratio": 0.011,
    "lag/age": 1.0,
    "response_length/average": 7.5,
    "response_length/truncated": 0.1,
}


def run(steps=10, dead=0, **changes):
    """``dead`` steps with ``changes`` after ``steps - dead`` healthy ones."""
    changed = {key.replace("__", "/"): value for key, value in changes.items()}
    return [HEALTHY] * (steps - dead) + [HEALTHY | changed] * dead


def only(rows):
    """The one warning of ``rows``."""
    found = signal.warnings(rows)
    assert len(found) == 1
    assert found[0].startswith("no signal: ")
    return found[0]


def test_a_healthy_run_warns_of_nothing():
    assert signal.warnings(run()) == []
    assert signal.warnings([]) == []
    assert signal.warnings([{"step": 1}, {"step": 2}]) == []


KINDS = [
    ({"reward__groups_with_signal": 0.0}, r"rewards within every prompt group were equal"),
    ({"actor__grad_norm": 0.0}, r"the gradient was 0"),
    ({"response_length__truncated": 1.0}, r"cut off .* raise data\.max_response_length"),
    ({"response_length__truncated": 0.995}, r"cut off"),
    ({"response_length__average": 1.0}, r"empty"),
]


@pytest.mark.parametrize(("changes", "text"), KINDS)
def test_half_of_the_steps_without_it_is_a_warning_that_says_how_many(changes, text):
    for dead in (5, 10):
        line = only(run(dead=dead, **changes))
        assert re.search(text, line)
        assert f"{dead} of 10 optimizer steps" in line
    assert signal.warnings(run(dead=4, **changes)) == [], "some such steps are part of a healthy run"


def test_equal_rewards_say_which():
    assert "mean reward 1" in only(run(dead=9, reward__groups_with_signal=0.0, reward__mean=1.0))
    assert "mean reward 0" in only(run(dead=9, reward__groups_with_signal=0.0, reward__mean=0.0))


def test_groups_may_have_no_signal_though_the_batch_has_variance():
    assert "prompt group" in only(run(dead=10, reward__groups_with_signal=0.0, reward__std=0.5))


def test_without_the_group_metric_the_whole_batch_counts():
    rows = [{key: value for key, value in row.items() if "groups" not in key} for row in run(dead=6, reward__std=1e-17)]
    assert "of the whole batch were equal in 6 of 10" in only(rows)
    assert signal.warnings(run(dead=10, reward__std=0.0)) == [], "where the group metric is present it decides"


@pytest.mark.parametrize("value", [0.0, 1e-12])
def test_a_ratio_of_one_on_old_data_is_no_signal(value):
    line = only(run(dead=10, actor__abs_log_ratio=value, lag__age=2.5))
    assert "all 10 optimizer steps" in line
    assert "mean age 2.5" in line


@pytest.mark.parametrize(
    "changes",
    [
        {"actor__abs_log_ratio": 0.0, "lag__age": 0.0},
        {"actor__abs_log_ratio": 1e-7},
        {"actor__abs_log_ratio": "nan"},
    ],
)
def test_a_small_drift_or_fresh_data_is_in_order(changes):
    assert signal.warnings(run(dead=10, **changes)) == []


def test_one_step_that_drifts_is_enough_and_fresh_steps_do_not_count():
    assert signal.warnings(run(dead=9, actor__abs_log_ratio=0.0)) == []
    fresh = [HEALTHY | {"lag/age": 0.0}] * 3
    assert "all 7 optimizer steps" in only(fresh + run(steps=7, dead=7, actor__abs_log_ratio=0.0))


def test_without_a_recorded_age_no_ratio_is_judged():
    rows = [{"actor/abs_log_ratio": 0.0}] * 5
    assert signal.warnings(rows) == []


def test_values_written_as_words_are_not_zero():
    assert signal.warnings(run(dead=10, actor__grad_norm="nan")) == []


def test_a_dead_run_names_everything():
    dead = dict.fromkeys(HEALTHY, 0.0) | {"lag/age": 1.0, "response_length/truncated": 1.0}
    assert len(signal.warnings([dead] * 3)) == 5


@pytest.fixture
def finished(tmp_path):
    """A run folder and the config that :mod:`recipes.report` reads, with a healthy run."""
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps({"step": i, **HEALTHY}) + "\n" for i in (1, 2)))
    (tmp_path / "validation.jsonl").write_text('{"global_step": 0, "seconds": 1.0}\n')
    (tmp_path / "phases.jsonl").write_text('{"phase": "done", "time": 1.0}\n')
    (tmp_path / "worker.json").write_text('[{"loss_mode": "vanilla", "function": "f"}]')
    (tmp_path / "provenance.json").write_text("{}")
    lag = {"schedule": "sync", "steps": 0, "ok": True, "broken_steps": [], "realised": {"0": 1.0}}
    (tmp_path / "lag.json").write_text(json.dumps(lag))
    pd.DataFrame([{"prompt": "1"}]).to_parquet(tmp_path / "test.parquet")
    choices = {"algorithm": "grpo", "task": "chain", "model": "tiny"}
    cfg = OmegaConf.create({"choices": choices, "seed": 0, "data": {"val_files": str(tmp_path / "test.parquet")}})
    return tmp_path, cfg


@pytest.mark.parametrize("dead", [False, True])
def test_warnings_are_in_the_summary_and_under_the_table(finished, dead):
    run_dir, cfg = finished
    if dead:
        rows = [HEALTHY | {"step": i, "actor/grad_norm": 0.0} for i in (1, 2)]
        (run_dir / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    console = Console(record=True, width=200, force_terminal=True)
    report.write(run_dir, cfg, 1.0, console)
    stored = json.loads((run_dir / "summary.json").read_text())["warnings"]
    text = console.export_text(styles=True)
    line = "no signal: the gradient was 0 in 2 of 2 optimizer steps: the weights did not move"
    assert stored == ([line] if dead else [])
    assert (f"\x1b[1;31m{line}" in text) == dead
    assert not dead or text.index(line) > text.index("run folder")


@pytest.mark.parametrize(("q", "gate_rate", "warned"), [(0.02, 0.0, True), (0.02, 0.1, False), (0.0, 0.0, False)])
def test_an_empty_gate_on_data_that_has_drifted_is_the_base_loss(q, gate_rate, warned):
    rows = [row | {"actor/sat/q": q, "actor/sat/gate_rate": gate_rate} for row in run()]
    assert any("gate was empty in 10 of 10" in line for line in signal.warnings(rows)) == warned
