"""What a run writes, and what is made of it."""

import json
import math

import numpy as np
import pytest
import torch
from rich.console import Console

from recipes import plots, report
from recipes.progress import Tail
from sat_verl.lag import COUNTS, TIMES, LagSchedule
from sat_verl.records import LAG_FILE, METRICS_FILE, SAMPLES_FILE, RunRecorder, plain, read_rows


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.array(2.0), 2.0),
        (torch.tensor(1.5), 1.5),
        (True, True),
        (None, None),
        ("a", "a"),
        (float("nan"), "nan"),
        (np.float64("inf"), "inf"),
    ],
)
def test_metrics_become_plain_json(value, expected):
    assert plain(value) == expected
    json.loads(json.dumps(plain(value)), parse_constant=pytest.fail)


def rows(folder):
    return read_rows(folder / METRICS_FILE)


def samples(age, prompts=("0000000000",)):
    return {"prompts": list(prompts), "tokens_by_age": {str(age): 10}} | dict.fromkeys(COUNTS + TIMES, 0)


def test_optimizer_steps_are_numbered_over_the_whole_run_and_the_window_joins_its_last(tmp_path):
    recorder = RunRecorder(tmp_path)
    for global_step in (1, 2):
        for index in range(3):
            recorder.add({"actor/x": 10 * global_step + index, "shared": index}, samples(0))
        recorder.flush(global_step, 3, {"timing_s/step": 5.0, "shared": "average"})
    found = rows(tmp_path)
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    assert [row["global_step"] for row in found] == [1, 1, 1, 2, 2, 2]
    assert [row["actor/x"] for row in found] == [10, 11, 12, 20, 21, 22]
    assert [row["shared"] for row in found] == [0, 1, 2, 0, 1, 2], "a step's own value wins over the window's average"
    assert ["timing_s/step" in row for row in found] == [False, False, True] * 2


def test_the_lag_of_a_run_is_read_from_what_it_trained_on(tmp_path):
    recorder = RunRecorder(tmp_path)
    for global_step, ages in ((1, (0, 1)), (2, (2, 1))):
        for age in ages:
            recorder.add({}, samples(age))
        recorder.add_drain(0.5)
        recorder.add_drain(0.25)  # a checkpoint drains too
        recorder.flush(global_step, 2, {})
    found = recorder.finish_lag(LagSchedule("broadcast", 2))
    assert found == json.loads((tmp_path / LAG_FILE).read_text())
    assert found["ok"]
    assert found["realised"] == {"0": 0.25, "1": 0.5, "2": 0.25}
    assert found["drain_seconds"] == 1.5
    assert [row.get("timing_s/drain") for row in rows(tmp_path)] == [None, 0.75, None, 0.75]
    assert [row["step"] for row in read_rows(tmp_path / SAMPLES_FILE)] == [1, 2, 3, 4]


def test_a_step_that_breaks_the_schedule_is_in_the_record(tmp_path):
    recorder = RunRecorder(tmp_path)
    recorder.add({}, samples(0))
    recorder.broken_step(2, 1, samples(0))
    assert [row["step"] for row in read_rows(tmp_path / SAMPLES_FILE)] == [1, 2]
    assert recorder.finish_lag(LagSchedule("broadcast", 2))["broken_steps"] == [2]


def test_what_is_waited_for_is_known_outside(tmp_path):
    recorder = RunRecorder(tmp_path)

    def wait():
        return json.loads((tmp_path / "wait.json").read_text())

    with recorder.waiting("the weight sync"):
        begun = wait()
        recorder.touch()
        assert wait()["for"] == begun["for"] == "the weight sync"
        assert wait()["since"] >= begun["since"]
    assert wait()["for"] == ""


def test_half_a_line_of_a_killed_process_is_left_out(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"a": 1}\n{"a":')
    assert read_rows(tmp_path / "x.jsonl") == [{"a": 1}]
    assert read_rows(tmp_path / "absent.jsonl") == []


def test_by_lag_weighs_steps_by_their_tokens():
    steps = [
        {"lag/1/tokens": 10, "lag/1/abs_log_ratio": 0.1, "lag/1/intercepted": 0.0},
        {"lag/1/tokens": 30, "lag/1/abs_log_ratio": 0.3, "lag/1/intercepted": 0.2, "lag/10/tokens": 5},
    ]
    found = report.by_lag(steps)
    assert list(found) == ["1", "10"]
    assert found["1"] == pytest.approx({"tokens": 40, "abs_log_ratio": 0.25, "intercepted": 0.15})
    assert found["10"] == {"tokens": 5}


def test_a_reader_sees_whole_lines_only(tmp_path):
    path = tmp_path / "file"
    tail = Tail(path)
    assert tail.rows() == []
    path.write_text('{"a": 1}\n{"a"')
    assert tail.rows() == [{"a": 1}]
    with open(path, "a") as file:
        file.write(": 2}\n")
    assert tail.rows() == [{"a": 2}]
    assert tail.rows() == []


def test_a_failure_shows_the_cause_not_rays_wrapper(tmp_path):
    log = tmp_path / "train.log"
    log.write_text(
        "(pid=1) UserWarning: engine is not available: ModuleNotFoundError('x')\n"
        "ray.exceptions.RayTaskError(AssertionError): ray::TaskRunner.run() (pid=1)\n"
        "(WorkerDict pid=7)   File 'engine.py', line 125, in prepare\n"
        "(WorkerDict pid=7) AssertionError: data size must be divisible\n"
        "ValueError: a consequence\n"
    )
    text = report.failure(log, 1)
    assert text.endswith("AssertionError: data size must be divisible")
    assert "engine.py" in text
    assert str(log) in text
    assert "exit code 9" in report.failure(tmp_path / "absent", 9)


def test_a_resumed_run_fails_of_its_own_cause(tmp_path):
    log = tmp_path / "train.log"
    log.write_text("EngineDeadError: the first time\n")
    start = log.stat().st_size
    with open(log, "a") as file:
        file.write("NoSpaceError: the second time\n")
    assert report.failure(log, 1, start).endswith("NoSpaceError: the second time")


def test_phases_do_not_count_the_time_until_a_resume():
    names = ["start engines", "train", "start engines", "train", "done"]
    rows = [
        {"phase": name, "time": time} for name, time in zip(names, (0.0, 10.0, 1000.0, 1020.0, 1050.0), strict=True)
    ]
    assert report.phase_seconds(rows) == {"start engines": 30.0, "train": 30.0}


def test_success_has_the_binomial_standard_error():
    metrics = {"val-aux/x/score/mean@1": 0.1, "val-core/sat_verl/chain/acc/mean@1": 0.25}
    assert report.success(metrics, 300) == {
        "rate": 0.25,
        "standard_error": math.sqrt(0.25 * 0.75 / 300),
        "problems": 300,
    }
    assert report.success({"x": 1}, 10) is None


def test_plots_are_drawn_for_the_numbers_that_exist(tmp_path):
    steps = [
        {"step": i, "reward/mean": 0.1 * i, "actor/abs_log_ratio": 0.01, "actor/pg_clipfrac": "nan"} for i in (1, 2, 3)
    ]
    names = [path.name for path in plots.draw(steps, tmp_path, "title")]
    assert names == ["reward.png", "staleness.png"]


def test_an_early_end_leaves_a_readable_table(tmp_path):
    summary = {
        "algorithm": "grpo",
        "task": "chain",
        "model": "tiny",
        "loss_in_worker": {"function": "f"},
        "steps": 1,
        "success_before": None,
        "success_after": {"rate": 0.5, "standard_error": 0.1, "problems": 25},
        "lag": {"schedule": "broadcast", "steps": 2, "ok": False, "broken_steps": [3], "realised": {"0": 1.0}},
        "last_step": {},
        "wall_seconds": {"total": 3.0},
        "hf_checkpoint": None,
    }
    console = Console(record=True, width=100)
    console.print(report.table(summary, tmp_path))
    text = console.export_text()
    assert "50.0% ± 10.0%" in text
    assert "BROKEN in steps [3]" in text
