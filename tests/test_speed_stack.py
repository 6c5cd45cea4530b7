"""The benchmarks of start, step, overlap, sync and requests: what they compute of what they measure, and the stack."""

import itertools
import json
import os

import pytest
from omegaconf import OmegaConf

from benchmarks.speed import curve, overhead, overlap, requests, start, stock, sync, training
from benchmarks.speed.__main__ import COMMANDS, main
from recipes.compose import compose
from recipes.derive import derive
from recipes.upstream import upstream


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_says_how_it_is_used(command, capsys):
    assert main([command, "--help"]) == 0
    assert f"usage: python -m benchmarks.speed {command} " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["requests", "in_flight=12"], "in_flight=12"),
        (["requests", "in_flight=none"], "in_flight=none"),
        (["sync", "sizes=5m,7b"], "sizes=7b"),
        (["overlap", "lags=1", "steps=many"], "steps=many"),
        (["nothing"], "command=nothing"),
    ],
)
def test_bad_settings_are_refused_before_anything_starts(words, says, capsys):
    assert main(words) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_a_result_that_could_not_be_written_is_refused_before_anything_starts(command, tmp_path, capsys):
    (tmp_path / "file").touch()
    assert main([command, f"out={tmp_path}"]) == 2
    assert f"out={tmp_path}: it is a folder" in capsys.readouterr().err
    assert main([command, f"out={tmp_path / 'file' / 'x.json'}"]) == 2
    assert "its folder cannot be made" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("spans", "length"),
    [
        ([], 0),
        ([(1, 3), (2, 4)], 3),
        ([(2, 4), (1, 3), (6, 20)], 7),
        ([(-5, 0.5), (9.5, 30)], 1),
        ([(1, 9), (2, 3)], 8),
    ],
)
def test_union_counts_every_second_once(spans, length):
    assert overlap.union(spans, 0, 10) == pytest.approx(length)


def test_requests_row_takes_the_engine_of_the_same_repeat_away():
    found = {
        requests.ENGINE: [(0.1, 0.2), (0.1, 0.4)],
        requests.VERL: [(2.0, 1.0), (4.0, 1.2)],
        requests.OURS: [(1.0, 0.6), (1.0, 0.8)],
    }
    row = requests.row(8, found)
    paths = row["paths"]
    assert row["ratio"]["median"] == 3  # of 2 and 4
    assert paths[requests.VERL]["cpu_ms_outside"]["median"] == pytest.approx(100)
    assert paths[requests.OURS]["cpu_ms_outside"]["median"] == pytest.approx(50)
    assert paths[requests.ENGINE]["cpu_ms_outside"]["median"] == 0
    assert paths[requests.OURS]["requests_per_s"]["median"] == 8
    assert "| 8 | 80.0 | 3.0 | 8.0 | 3.00 (" in requests.table([row])


def run_folder(folder, every, spans, **settings):
    folder.mkdir()
    OmegaConf.save(
        {
            "trainer": {"v1": {"separate_async": {"parameter_sync_step": every}}},
            "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 2}, "rollout": {"n": 4}},
        },
        folder / "config.yaml",
    )
    lines = [json.dumps({"generated_between": span}) for span in spans]
    (folder / "samples.jsonl").write_text("\n".join(lines) + "\n")
    drains = [{"time": time, "timing_s/drain": 0.5} for time in range(0, 30, 5)] + [{"time": 7}]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, drains)) + "\n")
    lag = {"ok": True, "mean_age": 1.5, "realised": {"1": 0.5, "2": 0.5}, "mixed_responses": 1, "responses": 40}
    (folder / "lag.json").write_text(json.dumps(lag))
    return folder


def marks(count, seconds, **data):
    by = [{"TaskRunnerV1": 2.0 * place, "other": 1.0 * place} for place in range(count)]
    return [{"time": seconds * one, "cpu": 3.0 * one, "cpu_by": by[one], "data": data} for one in range(count)]


def test_overlap_measures_windows_in_steps(tmp_path):
    run = run_folder(tmp_path / "run", 2, [(0, 3), (8, 10)])
    data = {"timing_s/gen": 1.0, "timing_s/update_actor": 2.0}
    row = overlap.measured(marks(3, 5.0, **data), run, sync=False)
    assert row["windows"] == 2
    assert row["all_responses_per_s"] == pytest.approx(2 * 2 * 8 / 10)
    assert (row["step_s"], row["cpu_s_per_step"]) == (2.5, 1.5)
    assert (row["trainer_waits"], row["drain"], row["update"], row["rollout_has_requests"]) == (0.2, 0.1, 0.4, 0.5)
    assert (row["kept"], row["mean_age"], row["mixed_responses"]) == (True, 1.5, 0.025)
    assert row["cpu_s_by_process"] == {"TaskRunnerV1": 1.0, "other": 0.5}
    of_sync = overlap.measured(marks(3, 5.0, **{"timing_s/gen": 4.0}), run, sync=True)
    assert (of_sync["step_s"], of_sync["rollout_has_requests"]) == (5.0, 0.8)
    assert "mean_age" not in of_sync
    lines = overlap.table([{"lag": "1"} | row, {"lag": "sync"} | of_sync]).splitlines()
    assert lines[2].startswith("| 1 | 3.2 | 1.00 |")
    assert lines[2].endswith("| 50 % | 1.5 | 2.5 % |")
    assert len({line.count("|") for line in lines}) == 1


def overlap_row(lag, rate):
    spread = {"low": 0.9 * rate, "median": rate, "high": 1.1 * rate}
    shares = {"trainer_waits": 0.2, "drain": 0.1, "rollout_has_requests": 0.6}
    return {"lag": lag, "all_responses_per_s": rate, "responses_per_s": spread} | shares


def test_the_overlap_curve_has_one_line_by_kind_of_schedule(tmp_path):
    rates = [("sync", 10), ("0", 15), ("8", 18), ("bounded2", 22), ("1", 20), ("constant2", 21)]
    rows = [overlap_row(lag, rate) for lag, rate in rates]
    lines = {name: [(lag, row["lag"]) for lag, row in points] for name, points in curve.series(rows).items()}
    assert lines == {
        "broadcast": [(0, "0"), (1, "1"), (8, "8")],
        "bounded": [(0, "0"), (2, "bounded2")],
        "constant": [(0, "0"), (1, "1"), (2, "constant2")],
    }
    assert list(curve.series(rows[:3])) == ["broadcast"]
    curve.draw(rows, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 10_000


@pytest.mark.parametrize(("every", "windows", "kept"), [(1, 10, 5), (2, 8, 5), (8, 4, 3)])
def test_first_steps_and_the_last_window_are_not_measured(tmp_path, every, windows, kept):
    run = run_folder(tmp_path / "run", every, [])
    (run / training.MARKS_FILE).write_text(json.dumps(marks(windows, 1.0)))
    found = training.trained(training.OURS, [], run)
    assert len(found) == kept
    # The first mark is the end of a window that holds the last of the first steps.
    assert found[0]["time"] * every < training.SKIP <= (found[0]["time"] + 1) * every
    assert found[-1]["time"] == windows - 2


def test_processes_are_told_apart_by_their_titles():
    titles = ("ray::TaskRunnerV1.run", "ray::WorkerDict", "VLLM::Worker", "/x/raylet --a", "python -m recipes.driver")
    assert [training.kind_of(title) for title in titles] == ["TaskRunnerV1", "WorkerDict", "Worker", "raylet", "other"]


def test_overhead_compares_with_verls_trainer():
    rows = [overhead.row(name, [[2.0, 4.0], [4.0, 4.0]]) for name in overhead.TRAINERS[:1]]
    rows.append(overhead.row(training.OURS, [[3.3, 4.2]]))
    assert rows[0]["mean_step_s"] == 3
    assert overhead.table(rows).splitlines()[-1].endswith("| 4.20 (4.20-4.20) | 1.050 |")
    assert "| 1.100 |" in overhead.table(rows)


def test_start_gives_every_phase_and_the_sum():
    row = {"way": "forked", "total_s": {"median": 10.0}, "phases": {name: {"median": 2.0} for name in start.PHASES}}
    assert start.table([row]).splitlines()[-1] == "| forked | 10.0 | 1.00 |" + " 2.0 |" * len(start.PHASES)


def test_sizes_are_what_they_are_called():
    for name, (layers, width) in sync.SHAPES.items():
        named = float(name[:-1]) * {"k": 1e3, "m": 1e6}[name[-1]]
        assert 13 * layers * width**2 == pytest.approx(named, rel=0.2)


def test_marks_of_parts_add_up():
    class Manager:
        async def abort_replicas(self):
            return "aborted"

        def build_process_group(self):
            return "open"

    import asyncio

    manager, spent = Manager(), {}
    for name in ("abort_replicas", "build_process_group"):
        setattr(manager, name, sync.clocked(manager, name, name, spent))
    assert asyncio.run(manager.abort_replicas()) == "aborted"
    assert manager.build_process_group() == "open"
    assert set(spent) == {"abort_replicas", "build_process_group"}


def test_verls_samplers_look_as_often_as_ours():
    pytest.importorskip("verl")
    from benchmarks.speed import samplers

    for name, kind in itertools.product(stock.SAMPLERS.values(), [0.05, 0.5]):
        made = getattr(samplers, name)(
            trainer_mode="separate_async",
            trainer_config=OmegaConf.create({}),
            max_off_policy_threshold=1,
            max_off_policy_strategy="wait",
            sampler_kwargs=OmegaConf.create({"poll_interval_s": kind}),
        )
        assert made.poll_interval == kind


# --- the real stack


@pytest.fixture
def same_environment():
    """What a benchmark needs in its programs' environment must not stay in this one."""
    # Its imports set variables of their own, in whichever test comes first.
    upstream(derive(compose(["algorithm=grpo"])))
    before = dict(os.environ)
    yield
    changed = {key for key in os.environ.keys() | before if os.environ.get(key) != before.get(key)}
    assert not changed - {"PYTEST_CURRENT_TEST"}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("same_environment")
def test_the_three_paths_of_a_request_through_the_real_stack(tmp_path):
    out = tmp_path / "out.json"
    words = ["requests", "in_flight=1,8", "repeats=1", f"run_dir={tmp_path / 'run'}", f"out={out}", "algorithm=grpo"]
    assert main(words) == 0
    report = json.loads(out.read_text())
    assert [row["in_flight"] for row in report["rows"]] == [1, 8]
    for row in report["rows"]:
        assert set(row["paths"]) == {requests.ENGINE, requests.VERL, requests.OURS}
        rates = {name: path["requests_per_s"]["median"] for name, path in row["paths"].items()}
        assert rates[requests.ENGINE] > max(rates[requests.VERL], rates[requests.OURS]) > 0
    assert report["versions"]["verl"] == "0.9.1"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("same_environment")
def test_verls_synchronous_trainer_is_measured_on_a_recipe(tmp_path):
    out = tmp_path / "out.json"
    small = ["prompts_per_step=4", "responses_per_prompt=4", "task.test_size=8", "algorithm=grpo"]
    words = ["overlap", "lags=sync", "steps=9", f"run_dir={tmp_path / 'run'}", f"out={out}", *small]
    assert main(words) == 0
    report = json.loads(out.read_text())
    assert report["command"] == ["python", "-m", "benchmarks.speed", *words]
    (row,) = report["rows"]
    assert row["windows"] == 3
    assert 0 < row["trainer_waits"] < 1
    assert row["all_responses_per_s"] * row["step_s"] == pytest.approx(16)
