"""The lag sweep: settings, keys, measures, records, and a small matrix in the laboratory."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

import benchmarks.lab
from benchmarks.arms import ARMS
from benchmarks.lag_sweep import __main__ as command_line
from benchmarks.lag_sweep import load, measures, runner, verl_cells, workers
from benchmarks.lag_sweep.matched import Radii, arm_of, matched_to, mean_radii
from benchmarks.lag_sweep.settings import parse
from benchmarks.lag_sweep.spec import Spec, places, sources
from benchmarks.lag_sweep.store import Cell, Place, cell_path, write_cell
from recipes.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
SMALL = (
    "task=chain", "seeds=1", "steps=4", "prompts_per_step=8", "responses_per_prompt=4", "eval_every=2",
    "eval_problems=16", "workers=0",
)  # fmt: skip
STRONG = ("lr=[2e-3]", "overrides=[actor_rollout_ref.actor.optim.lr_warmup_steps=0]")
"""Four steps make a difference."""


def settings(*words, out="out", **changes):
    return parse([*words, *(f"{name}={value}" for name, value in changes.items()), f"out={out}"])


# --- settings ---------------------------------------------------------------------------------------------------------


def test_lists_and_short_forms():
    got = settings("arms=[grpo, gspo]", "lags=0,1,8", "seeds=3", "lr=[1e-3,5e-4]", "overrides=[a.b=[1,2],'c=x,y']")
    assert got.arms == ("grpo", "gspo")
    assert got.lags == (0, 1, 8)
    assert got.seeds == (0, 1, 2)
    assert got.lr == (1e-3, 5e-4)
    assert got.overrides == ("a.b=[1,2]", "'c=x,y'")
    assert settings("seeds=[4,7]", "dual_clip=null").seeds == (4, 7)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["arms=[grop]"], "there is no arm grop, did you mean grpo"),
        (["arms=[grpo,grpo_matched]"], "has the radii that sat_grpo had"),
        (["arms=[grpo,grpo]"], "grpo is there twice"),
        (["arms=[grpo_r3]"], "grpo_r3 replays routes.*engine=verl"),
        (["arms=[ppo]"], "ppo needs a critic"),
        (["arms=[]"], "arms"),
        (["lags=[-1]"], "greater than or equal to 0"),
        (["lags=8,x"], "valid integer"),
        (["seeds=0"], "seeds"),
        (["lr=0"], "greater than 0"),
        (["dual_clip=1"], "greater than 1"),
        (["schedule=bounded"], "'broadcast' or 'constant'"),
        (["micro_batches=7"], "does not divide the 128 responses"),
        (["noise=0.1", "engine=verl"], "it is for engine=lab"),
        (["submit=ray"], "it is for engine=verl"),
        (["seed=3"], "there is no such setting. Fix: did you mean seeds"),
        (["steps=1", "steps=2"], "given twice"),
        (["steps"], "not of the form name=value"),
    ],
)
def test_what_cannot_work_is_refused(words, text):
    with pytest.raises(ConfigError, match=text):
        settings(*words)


def test_bad_input_ends_with_status_2(capsys):
    assert command_line.main(["lags=1"]) == 2
    assert "error: out: it is missing" in capsys.readouterr().err
    assert command_line.main(["paln", "out=x"]) == 2
    assert "there is no such command" in capsys.readouterr().err


def test_the_matrix_is_seed_by_seed_and_matched_arms_come_last():
    got = list(places(settings("task=chain,sort", "arms=[grpo_matched,grpo,sat_grpo]", "lags=0,8", "seeds=2")))
    assert len(got) == 2 * 3 * 2 * 2
    assert [place.seed for place in got] == [0] * 12 + [1] * 12
    assert [place.arm for place in got[:3]] == ["grpo", "sat_grpo", "grpo_matched"]
    matched = got[2]
    assert sources(matched, settings("seeds=2")) == [matched._replace(arm="sat_grpo", seed=seed) for seed in (0, 1)]
    with pytest.raises(ConfigError, match="arithmetic has no default learning rate"):
        list(places(settings("task=arithmetic")))


# --- matched radii ----------------------------------------------------------------------------------------------------


def test_matched_arms_are_those_whose_sat_form_is_an_arm():
    assert matched_to("grpo_matched") == "sat_grpo"
    assert matched_to("grpo_dual_matched") == "sat_grpo_dual"
    assert [matched_to(name) for name in ("grpo", "is_matched", "sat_grpo_matched", "x_matched")] == [None] * 4
    radii = mean_radii([Radii(0.1, 0.11), Radii(0.2, 0.22)])
    assert radii == (0.15, 0.165, None)
    words = arm_of("grpo_matched", radii).words
    assert words == (*ARMS["grpo"].words, "clip_ratio_low=0.15", "clip_ratio_high=0.165")


# --- keys -------------------------------------------------------------------------------------------------------------


def test_the_key_is_that_of_what_runs(lab_cache):
    base = Place("chain", "sat_grpo", 2e-3, 8, 0)

    def key(place=base, *words, radii=None):
        return Spec(place, settings(*SMALL[:-1], *STRONG, *words, cache=lab_cache), radii).identity().key

    assert key() == key(base, "workers=3", "retry=true")
    assert key() == key(base, "quantile_scope=batch")  # that of its preset
    grpo = base._replace(arm="grpo")
    assert key(grpo) != key(grpo, "dual_clip=3") == key(base._replace(arm="grpo_dual"))
    assert len({key(), key(base._replace(seed=1)), key(base._replace(lag=1))}) == 3
    matched = base._replace(arm="grpo_matched")
    assert key(matched, radii=Radii(0.2, 0.2)) == key(grpo)  # the radii that it has anyway
    assert key(matched, radii=Radii(0.1, 0.2)) != key(grpo)


def test_the_words_are_those_of_the_real_stack(tmp_path):
    real = settings("engine=verl", "schedule=constant", "micro_batches=2", "eval_every=16", "dual_clip=3")
    spec = Spec(Place("sort", "gspo", 1e-3, 4, 7), real)
    assert {"algorithm=gspo", "task=sort", "lag=constant4", "seed=7", "validate_every=16"} <= set(spec.words)
    assert "dual_clip=3.0" not in spec.words  # gspo has none, and the recipe would refuse it
    other = Spec(Place("sort", "gspo", 1e-3, 4, 8), real)
    assert spec.identity().key != other.identity().key
    folder = tmp_path / "runs" / "k"
    assert verl_cells.command(spec, folder)[3:] == [*spec.words, f"cache_dir={ROOT / '.cache'}", f"run_dir={folder}"]
    folder.mkdir(parents=True)
    (folder / "config.yaml").touch()
    assert verl_cells.command(spec, folder)[3:] == [f"resume={folder}"]


def test_a_ray_cluster_must_be_named(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    spec = Spec(Place("sort", "gspo", 1e-3, 4, 7), settings("engine=verl", "submit=ray"))
    with pytest.raises(ConfigError, match="RAY_ADDRESS names no cluster"):
        verl_cells.submit_ray(spec, tmp_path / "k")


# --- measures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("scores", "step"),
    [
        ([0.4, 0.8, 0.9, 0.5, 0.5, 0.5], 30),  # .5 is below .54
        ([0.4, 0.8, 0.9, 0.55, 0.5, 0.5], None),  # only two below
        ([0.4, 0.9, 0.5, 0.5, 0.6, 0.5], None),  # not in a row
        ([0.4, 0.9, 0.1, 0.1, 0.1, 0.9], 20),  # recovers later
        ([0.5, 0.1, 0.1, 0.1], 10),  # the evaluation before the first step counts
        ([0.0, 0.0, 0.0, 0.0], None),
    ],
)
def test_collapse_rule(scores, step):
    assert measures.collapse_step([10 * index for index in range(len(scores))], scores) == step


def test_area_and_gradient_spikes():
    assert measures.area([0, 10, 30], [0.0, 1.0, 1.0]) == pytest.approx((5 + 20) / 30)
    assert measures.area([0], [0.3]) == 0.3
    steady = [1.0] * 10
    assert measures.gradient_spikes([*steady, 5.1, 4.9, None]) == 2
    assert measures.gradient_spikes([9.0, 1.0, 1.0, 1.0, 1.0]) == 0  # the first steps
    # The median is of the twenty steps before, so that a new level is not a spike for ever.
    assert measures.gradient_spikes([*steady, *[10.0] * 20]) == 10


def rows(**columns):
    length = max(len(values) for values in columns.values())
    return [{"step": index + 1} | {name: values[index] for name, values in columns.items()} for index in range(length)]


def test_measures_of_a_hand_made_run():
    steps = rows(
        age=[0, 1, 2, 2], abs_log_ratio=[0.0, 0.02, 0.04, 0.06], grad_norm=[1.0, 2.0, float("nan"), 3.0],
        entropy=[1.0, 0.9, 0.8, 0.7], ess=[1.0, 0.9, 0.5, 0.6],
    )  # fmt: skip
    found = measures.series(steps, "lab")
    assert found["grad_norm"] == [1.0, 2.0, None, 3.0]
    assert "intercepted" not in found
    scores = [{"step": step, "success": score} for step, score in enumerate([0.4, 0.8, 0.6, 0.7, 0.5])]
    got = measures.measure(found, scores)
    expected = {
        "initial": 0.4, "final": 0.6, "peak": 0.8, "peak_step": 1, "drop": 0.2, "d_bar": 0.03, "d_bar_spikes": 2,
        "d_bar_max": 0.06, "ess_min": 0.5, "entropy_end": 0.7, "grad_norm_median": 2.0, "grad_norm_max": 3.0,
        "grad_norm_spikes": 1, "lost_values": 1, "age": 1.25,
    }  # fmt: skip
    assert {name: got[name] for name in expected} == pytest.approx(expected)
    assert got["collapse_step"] is None
    assert got["intercepted"] is None
    verl = measures.series([{"step": 1, "actor/ppo_kl": 0.1}, {"step": 2, "rollout_corr/kl": 0.2}], "verl")
    assert verl["kl"] == [0.1, 0.2]


def test_no_signal_marks():
    def marks(**columns):
        found = measures.series(rows(**columns), "lab")
        return measures.no_signal(found, measures.measure(found, [{"step": 0, "success": 0.5}]))

    alive = {"groups_with_signal": [0.5] * 4, "abs_log_ratio": [0.1] * 4, "age": [1] * 4, "grad_norm": [1.0] * 4}
    assert marks(**alive, **{"actor/sat/intercepted": [0.01] * 4}) == []
    assert marks(**alive, **{"actor/sat/intercepted": [0.0] * 4})[0].startswith("SAT intercepted 0 of the tokens")
    assert (
        "all rewards within every prompt group were equal in 3 of 4"
        in marks(**alive | {"groups_with_signal": [0, 0, 0, 1]})[0]
    )
    assert "the policy ratio was 1" in marks(**alive | {"abs_log_ratio": [0.0] * 4})[0]


# --- records ----------------------------------------------------------------------------------------------------------


def record(**changes):
    fields = {
        "key": "k", "config_hash": "c", "engine": "lab", "code_version": 1, "task": "chain", "model": "tiny",
        "arm": "grpo", "lr": 1e-3, "lag": 8, "schedule": "broadcast", "seed": 0, "steps": 4, "words": [],
        "status": "done", "metrics": {"final": 0.5, "kl": None}, "digest": "d",
    }  # fmt: skip
    return Cell(**fields | changes)


def test_a_record_survives_its_file_and_replaces_it_whole(tmp_path):
    write_cell(tmp_path, record())
    write_cell(tmp_path, record(status="failed", error="out of memory"))
    assert [path.name for path in (tmp_path / "cells").iterdir()] == ["k.json"]
    assert runner.read_cell(tmp_path, "k") == record(status="failed", error="out of memory")
    assert runner.read_cell(tmp_path, "other") is None
    cell_path(tmp_path, "k").write_text('{"mine": 1}')
    with pytest.raises(ConfigError, match="not a file of this version of the sweep"):
        runner.read_cell(tmp_path, "k")


def test_no_sweep_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="there is no sweep in this folder"):
        load(tmp_path)


# --- a small matrix ---------------------------------------------------------------------------------------------------


def sweep(words, out, cache):
    return runner.run(settings(*SMALL, *words, out=out, cache=cache), ["test"], Console(quiet=True))


def test_a_small_matrix_in_the_laboratory(tmp_path, lab_cache, monkeypatch, capsys):
    words = [*STRONG, "arms=[grpo,grpo_dual,sat_grpo,grpo_matched,sat_grpo_microbatch]", "lags=[2]", "dual_clip=3"]
    plan = [*SMALL, *words, f"out={tmp_path}", f"cache={lab_cache}"]
    assert command_line.main(["plan", *plan]) == 0
    text = capsys.readouterr().out
    assert "4 cells to run: time unknown" in text
    assert "1 cells are the same run as another" in text  # grpo with a dual clip
    assert "1 waiting" in text
    assert not list(tmp_path.iterdir())

    def broken(config, report):
        if config.algorithm == "sat_grpo":
            raise RuntimeError("no luck")
        return real(config, report)

    real = benchmarks.lab.run
    monkeypatch.setattr(benchmarks.lab, "run", broken)
    assert sweep(words, tmp_path, lab_cache) == 1
    first = load(tmp_path)
    assert {cell.arm: cell.status for cell in first.cells} == {
        "grpo": "done", "grpo_dual": "done", "sat_grpo": "failed", "sat_grpo_microbatch": "failed",
    }  # fmt: skip
    assert "RuntimeError: no luck" in first.cells[2].error
    assert [place.arm for place in first.pending] == ["grpo_matched"]

    monkeypatch.setattr(benchmarks.lab, "run", real)
    kept = cell_path(tmp_path, first.cells[0].key)
    before = kept.stat().st_mtime_ns
    assert sweep(words, tmp_path, lab_cache) == 1  # a failed cell is not run again unasked
    assert sweep([*words, "retry=true"], tmp_path, lab_cache) == 0
    assert kept.stat().st_mtime_ns == before
    done = load(tmp_path)
    cells = {cell.arm: cell for cell in done.cells}
    assert set(cells) == {"grpo", "grpo_dual", "sat_grpo", "grpo_matched", "sat_grpo_microbatch"}
    assert cells["grpo_dual"].key == cells["grpo"].key
    radii = cells["grpo_matched"].matched
    assert radii.high == float(f"{cells['sat_grpo'].metrics['eps_eff_high']:.4g}") < 0.2
    assert radii.keys == [cells["sat_grpo"].key]
    assert cells["grpo"].ages == pytest.approx({"0": 0.25, "1": 0.5, "2": 0.25}, abs=0.1)
    assert cells["grpo"].evaluations["step"] == [0, 2, 4]
    assert cells["grpo"].provenance["command"] == ["test"]
    assert len(cells["sat_grpo"].series["q"]) == 4
    frame = done.frame()
    assert len(frame) == 5
    same = dict(zip(frame.arm, frame.identical_to, strict=True))
    assert "sat_grpo_microbatch" in same["sat_grpo"]  # another config, and the same numbers in one micro-batch
    assert same["grpo_matched"] == ""
    assert (tmp_path / "sweep.parquet").is_file()
    assert len(done.asked.commands) == 3
    with pytest.raises(ConfigError, match=r"noise=0.1: the sweep in .* has 0.0"):
        sweep([*words, "noise=0.1"], tmp_path, lab_cache)


def test_a_worker_that_dies_costs_its_own_task_alone():
    outcomes, begun = {}, []
    tasks = ["1 + 1", "__import__('os')._exit(9)", "2 + 2"]
    workers.run_all(eval, tasks, 1, begun.append, outcomes.__setitem__)
    assert outcomes == dict(zip(tasks, (2, None, 4), strict=True))
    assert begun == tasks


@pytest.mark.slow
def test_killed_in_mid_matrix_it_goes_on_where_it_was(tmp_path):
    words = [*SMALL[:1], "seeds=3", *SMALL[2:], "arms=[grpo,gspo]", "lags=[1,2]", f"out={tmp_path}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "benchmarks.lag_sweep", *(word for word in words if word != "workers=0")]
    # Both in processes of their own: here another start model may be in use.
    process = subprocess.Popen(command, cwd=ROOT, env=environment)
    deadline = time.monotonic() + 120
    while len(list((tmp_path / "cells").glob("*.json"))) < 2:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.05)
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").glob("*.json")}
    assert 2 <= len(before) < 12
    assert all(json.loads(path.read_text())["status"] == "done" for path in (tmp_path / "cells").glob("*.json"))
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children):
        assert time.monotonic() < deadline, "a worker outlives the command"
        time.sleep(0.05)
    subprocess.run([sys.executable, "-m", "benchmarks.lag_sweep", *words], cwd=ROOT, env=environment, check=True)
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cells").glob("*.json")}
    assert len(after) == 12
    assert before.items() <= after.items()
    assert not load(tmp_path).pending
